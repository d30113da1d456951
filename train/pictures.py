"""What the routing of a run did, from its metrics and its trace: a picture, and a page that works offline.

`python -m train.pictures RUN_FOLDER ...` makes them again for runs that are over.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layouts.errors import InputError
from layouts.routing_trace import RoutingTrace, specialisation
from train.metrics import Lines, read_metrics

TRACE = "routing.npz"
PAGE = Path(__file__).with_name("routing_page.html")
# Layers that the picture has room for; the page shows them all.
_MOST_LAYERS = 4
_CURVES = (
    ("worst_load", "load of the fullest expert", "times its layer's mean", 1.0),
    ("token_straggler", "straggler: fullest device less mean", "rows", None),
    ("dropped_fraction", "dropped (token, expert) pairs", "%", None),
    ("routing_entropy", "entropy of the router's scores", "nats", None),
)


def draw_routing(folder: Path, title: str) -> list[Path]:
    """Draws `routing.png` and writes `routing.html` of a run folder.

    Args:
      folder: with the run's metrics.jsonl and, where one was recorded, its trace.
      title: of both.

    Returns:
      Their paths; none for a run without MoE layers.

    Raises:
      InputError: where the trace is damaged.
    """
    moe = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train" and "tokens_per_expert" in line]
    if not moe:
        return []
    trace = RoutingTrace.load(folder / TRACE) if (folder / TRACE).exists() else None
    picture, page = folder / "routing.png", folder / "routing.html"
    figure = routing_figure(moe, trace, title)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    page.write_text(routing_page(moe, trace, title))
    return [picture, page]


def routing_figure(moe: Lines, trace: RoutingTrace | None, title: str) -> Figure:
    """Load over steps by layer and expert, curves, and who the experts work for.

    Args:
      moe: the "train" lines of a run's metrics.
      trace: its routing by domain; None: that row is left out.
      title: of the picture.
    """
    loads = load_over_mean(moe)  # [n, layers, E]
    layers = _chosen(loads.shape[1])
    rows = 2 + (trace is not None and len(trace) > 0)
    figure = plt.figure(figsize=(4 * max(len(layers), 2) + 2, 3.6 * rows), layout="constrained")
    figure.suptitle(title)
    top, middle, *rest = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    _draw_loads(top, loads, [line["step"] for line in moe], layers)
    _draw_curves(middle, moe)
    for part in rest:
        assert trace is not None
        _draw_domains(part, trace, layers)
    return figure


def load_figure(tokens_per_expert: Sequence[Sequence[int]], step: int) -> Figure:
    """The load of every expert of every layer at one step."""
    loads = load_over_mean([{"tokens_per_expert": tokens_per_expert}])[0]
    # Wide enough for the title, and no larger than a screen shows.
    size = (1.5 + 0.45 * min(max(loads.shape[1], 7), 30), 1.5 + min(0.4 * loads.shape[0], 6))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(loads, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
    axes.set(xlabel="expert", ylabel="MoE layer", title=f"tokens over the layer's mean, step {step}")
    _whole(axes)
    figure.colorbar(image, ax=axes, extend="max", pad=0.01, fraction=0.05)
    return figure


def load_over_mean(moe: Lines) -> np.ndarray:
    """[n, layers, E] each expert's tokens over the mean of its layer."""
    tokens = np.array([line["tokens_per_expert"] for line in moe], float)
    return tokens / np.maximum(tokens.mean(-1, keepdims=True), 1e-9)


def _chosen(num_layers: int) -> list[int]:
    """As many layers as there is room for, from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, num_layers - 1, min(num_layers, _MOST_LAYERS))})


def _draw_loads(figure, loads: np.ndarray, steps: list[int], layers: list[int]) -> None:
    figure.suptitle("load: tokens that each expert took", fontsize="medium", fontweight="bold")
    panels = figure.subplots(1, len(layers), squeeze=False, sharey=True)[0]
    half = (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2 or 0.5
    extent = (steps[0] - half, steps[-1] + half, loads.shape[2] - 0.5, -0.5)
    for axes, layer in zip(panels, layers, strict=True):
        options = {"cmap": "RdBu_r", "vmin": 0, "vmax": 2, "interpolation": "nearest"}
        image = axes.imshow(loads[:, layer].T, aspect="auto", extent=extent, **options)
        axes.set(xlabel="optimizer step", title=f"MoE layer {layer}")
        _whole(axes)
    panels[0].set_ylabel("expert")
    bar = figure.colorbar(image, ax=list(panels), extend="max")
    bar.set_label("tokens over the layer's mean\n(1: an even share)")


def _draw_curves(figure, moe: Lines) -> None:
    figure.suptitle("balance", fontsize="medium", fontweight="bold")
    shown = [curve for curve in _CURVES if curve[0] in moe[0]]
    for axes, (name, title, unit, floor) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        values = np.array([line[name] for line in moe]) * (100 if unit == "%" else 1)
        # One point is no line.
        axes.plot([line["step"] for line in moe], values, color="C0", marker="o" if len(moe) == 1 else None)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))
        top = max(values.max() * 1.08, (floor or 0) + 1e-3)
        axes.set(xlabel="optimizer step", ylabel=unit, ylim=(floor or 0, max(top, 1) if unit == "%" else top))
        axes.set_title(title, fontsize=9)
        if name == "routing_entropy":
            even = np.log(len(moe[0]["tokens_per_expert"][0]))
            axes.axhline(even, color="black", linestyle=":", linewidth=1)
            axes.annotate(
                "all experts alike", (0.98, even), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
            )
            axes.set_ylim(0, 1.2 * even)
        axes.grid(alpha=0.3)


def _draw_domains(figure, trace: RoutingTrace, layers: list[int]) -> None:
    """For each layer of the last record, the experts' share of each domain over their share of all tokens."""
    counts = trace.by_domain()  # [n, layers, domains, E]
    names, last = _domains_there(trace, counts), counts[-1]
    figure.suptitle("specialisation: where tokens of each kind go", fontsize="medium", fontweight="bold")
    panels = figure.subplots(1, len(layers) + 1, width_ratios=[1] * len(layers) + [0.8])
    for axes, layer in zip(panels[:-1], layers, strict=True):
        image = axes.imshow(_lift(last[layer])[names], aspect="auto", cmap="PuOr_r", vmin=-3, vmax=3)
        axes.set(xlabel="expert", title=f"MoE layer {layer}, step {trace.step[-1]}")
        _whole(axes)
        axes.set_yticks(range(len(names)), [trace.domain_names[d] for d in names] if layer == layers[0] else [])
    bar = figure.colorbar(image, ax=list(panels[:-1]), ticks=[-3, -2, -1, 0, 1, 2, 3], extend="both")
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.set_label("the expert's share of the domain\nover its share of all tokens")
    bits = specialisation(counts)
    for layer in layers:
        panels[-1].plot(trace.step, bits[:, layer], "o-", markersize=3, label=f"layer {layer}")
    panels[-1].set(xlabel="optimizer step", ylabel="bits", ylim=(0, None), title="over training")
    panels[-1].legend(fontsize=8)
    panels[-1].grid(alpha=0.3)


def _domains_there(trace: RoutingTrace, counts: np.ndarray) -> list[int]:
    return [d for d in range(len(trace.domain_names)) if counts[-1, :, d].any()]


def _lift(counts: np.ndarray) -> np.ndarray:
    """[domains, E] counts -> log2 of each expert's share of the domain over its share of all."""
    share = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    mean = counts.sum(0) / max(counts.sum(), 1)
    return np.log2(np.clip(share / np.where(mean > 0, mean, 1), 2**-6, 2**6))


def _whole(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def routing_page(moe: Lines, trace: RoutingTrace | None, title: str) -> str:
    """One HTML page with all its data and code inside; arguments as in `routing_figure`."""
    curves = [
        {"title": name, "unit": unit, "values": [line[key] * (100 if unit == "%" else 1) for line in moe]}
        for key, name, unit, _ in _CURVES
        if key in moe[0]
    ]
    data: dict[str, Any] = {
        "title": title,
        "steps": [line["step"] for line in moe],
        "loads": np.round(load_over_mean(moe), 3).tolist(),
        "curves": curves,
    }
    if trace is not None and len(trace):
        data["domains"] = _domain_data(trace)
    # "</" would end the script it stands in.
    return PAGE.read_text().replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def _domain_data(trace: RoutingTrace) -> dict[str, Any]:
    counts = trace.by_domain()
    there = _domains_there(trace, counts)
    return {
        "names": [trace.domain_names[d] for d in there],
        "steps": trace.step.tolist(),
        "lift": [[np.round(_lift(layer)[there], 2).tolist() for layer in record] for record in counts],
        "tokens": counts.sum(-1)[:, 0][:, there].tolist(),
        "bits": np.round(specialisation(counts), 4).tolist(),
    }


def main(folders: Sequence[str]) -> int:
    """Draws the runs in these folders; the exit code."""
    for folder in map(Path, folders):
        try:
            paths = draw_routing(folder, f"{folder.name}: routing")
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if not paths:
            print(f"error: {folder}: no metrics of MoE layers; needs a run folder with metrics.jsonl", file=sys.stderr)
            return 2
        print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
