"""A run as one picture."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from train.metrics import Lines

_PANELS = {"squeeze": False, "sharex": True, "layout": "constrained"}


def plot_run(metrics: Lines, path: Path, title: str) -> None:
    """Draws loss, expert load and drops over the steps of a run into a PNG.

    Args:
      metrics: the lines of its metrics file; the last holds the n-gram models' bits per byte.
      path: where to.
      title: of the picture.
    """
    train = [line for line in metrics if line["kind"] == "train"]
    moe = [line for line in train if "tokens_per_expert" in line]
    heights = [3, 3, 1.2] if moe else [1]
    figure, axes = plt.subplots(len(heights), 1, figsize=(10, 1.3 * sum(heights) + 1), height_ratios=heights, **_PANELS)
    _plot_loss(axes[0, 0], metrics, train)
    if moe:
        _plot_load(axes[1, 0], moe)
        _plot_drops(axes[2, 0], moe)
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1, 0].set_xlim(0, 1.01 * metrics[-1]["step"])
    axes[-1, 0].set_xlabel("optimizer step")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_loss(axes: Axes, metrics: Lines, train: Lines) -> None:
    held_out = [line for line in metrics if line["kind"] == "eval"]
    final = [line for line in metrics if line["kind"] == "final"][-1]
    # Targets are tokens: the held-out text says how many bits a byte a nat a target is.
    scale = held_out[-1]["bits_per_byte"] / held_out[-1]["loss"]
    axes.plot(_steps(train), [line["loss"] * scale for line in train], color="C0", alpha=0.6, label="training batches")
    values = [line["bits_per_byte"] for line in held_out]
    axes.plot(_steps(held_out), values, "o-", color="C3", label=f"held out (last {values[-1]:.2f})")
    for name, style in (("bigram", "--"), ("trigram", ":")):
        value = final[f"{name}_bits_per_byte"]
        axes.axhline(value, color="black", linestyle=style, label=f"byte {name} model ({value:.2f})")
    axes.set_ylim(0, 1.25 * max(final["bigram_bits_per_byte"], *values))
    axes.set_ylabel("bits per byte")
    axes.set_title("loss: lower is better")
    axes.legend(loc="upper right", framealpha=0.9)
    axes.grid(alpha=0.3)


def _plot_load(axes: Axes, moe: Lines) -> None:
    tokens = np.array([line["tokens_per_expert"] for line in moe], float)
    load = tokens / np.maximum(tokens.mean(-1, keepdims=True), 1e-9)
    num_layers, num_experts = load.shape[1:]
    steps = _steps(moe)
    half = (steps[-1] - steps[0]) / max(1, len(steps) - 1) / 2 or 0.5
    extent = (steps[0] - half, steps[-1] + half, num_layers * num_experts - 0.5, -0.5)
    picture = load.reshape(len(moe), -1).T
    image = axes.imshow(picture, aspect="auto", extent=extent, cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts - 0.5, color="black", linewidth=0.8)
    axes.set_yticks([(layer + 0.5) * num_experts - 0.5 for layer in range(num_layers)], map(str, range(num_layers)))
    axes.set_ylabel(f"MoE layer ({num_experts} experts each)")
    axes.set_title("share of the tokens that each expert took (one row an expert, in blocks of a layer)")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.01, extend="max")
    bar.set_label("tokens over the layer's mean\n(1: an even share)")


def _plot_drops(axes: Axes, moe: Lines) -> None:
    dropped = [100 * line["dropped_fraction"] for line in moe]
    axes.plot(_steps(moe), dropped, color="C1")
    axes.set_ylim(0, max(1, 1.1 * max(dropped)))
    axes.set_ylabel("dropped (%)")
    axes.set_title("(token, expert) pairs dropped because the expert was full")
    axes.grid(alpha=0.3)


def _steps(lines: Lines) -> list[int]:
    return [line["step"] for line in lines]
