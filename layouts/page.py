"""One self-contained HTML page of a search: the ranked table, where time and memory go, what else could be had, the proof."""

import dataclasses
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from layouts import svg
from layouts.cost import cost
from layouts.devices import axis_links, device_grid
from layouts.errors import InfeasibleError
from layouts.hardware import Cluster
from layouts.results import reasons, utilisation
from layouts.search import Answer, Found, Problem, search
from layouts.terminal import layer_words, mesh_words, pipeline_words, seconds

# Shares of the best layout's memory that the front asks for, and the factors that the sensitivities try.
_FRONT = (0.8, 0.6, 0.45, 0.3)
IMBALANCES = (1.0, 1.25, 1.5, 2.0, 3.0)
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SHOWN = 8


def write_page(path: Path, problem: Problem, answer: Answer, entry: dict[str, Any]) -> None:
    """Writes the page.

    Args:
      path: of the file.
      problem: what was searched for.
      answer: what was found.
      entry: the answer as JSON, with the proofs that were made.
    """
    found = answer.found
    parts = [
        _summary(problem, answer),
        _section(
            "Ranked layouts", _ranked(problem, found), "The best layout of each mesh; step times and memory are predicted."
        ),
        _section("Where the time goes", _times(found[:_SHOWN]), "Seconds of one step, term by term."),
        _section("Where the memory goes", _memories(problem, found[:_SHOWN]), "GB on a device of the fullest stage."),
        _section("Time against memory", _front(problem, answer), _FRONT_SAYS),
        _section("If things were otherwise", _sensitivity(problem, found[0]), _SENSITIVITY_SAYS),
        _section("Which axis lies on which link", _devices(problem, found[0]), "The best layout on the cluster."),
        _section("Proof", _proof(entry), "What the compiler for this hardware says of the same step."),
    ]
    title = f"Layouts: {problem.model.name} on {problem.cluster}"
    path.write_text(_PAGE.format(title=html.escape(title), style=svg.STYLE + _STYLE, body="\n".join(parts)))


_FRONT_SAYS = "Each point is the fastest layout under a limit on a device's memory; points of the ranked layouts are hollow."
_SENSITIVITY_SAYS = (
    "The best layout's step time if the fullest device's experts had more rows than the mean (nothing dropped), and if links "
    "were slower or faster."
)


def _section(title: str, body: str, says: str) -> str:
    return f"<section><h2>{title}</h2><p class=says>{html.escape(says)}</p>{body}</section>"


def _summary(problem: Problem, answer: Answer) -> str:
    best, batch, tally = answer.found[0], answer.found[0].batch, answer.tally
    per_second = best.tokens_per_second / best.layout.num_devices
    facts = [
        ("step", seconds(best.cost.step_seconds)),
        ("tokens a second and device", f"{per_second:,.0f}"),
        ("of peak FLOP/s", f"{utilisation(problem, per_second):.0%}"),
        ("GB a device", f"{best.memory.peak_bytes / 1e9:.3g} of {problem.limit_bytes / 1e9:.3g}"),
    ]
    cards = "".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for name, value in facts)
    lacking = reasons(problem, best.layout)
    runs = "moejax runs it today." if not lacking else f"moejax does not run it yet: {', '.join(lacking)}."
    return (
        f"<header><h1>{html.escape(problem.model.name)} on {html.escape(str(problem.cluster))}</h1>"
        f"<p>{problem.cluster.num_devices} devices, {batch.sequences} sequences of {batch.seq:,} tokens a step, least "
        f"{html.escape(problem.objective.replace('_', ' '))}. The best of {tally.layouts:,} layouts: "
        f"<b>{html.escape(mesh_words(best.layout))}</b>; {html.escape(pipeline_words(best.layout))}; "
        f"{html.escape(layer_words(best.layout))}. {html.escape(runs)}</p><div class=cards>{cards}</div></header>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table that scrolls by itself on narrow screens; columns from `words` on are text."""
    cell = lambda tag, index, text: f"<{tag}{' class=words' if index >= words else ''}>{html.escape(str(text))}</{tag}>"
    line = lambda tag, cells: "<tr>" + "".join(cell(tag, index, text) for index, text in enumerate(cells)) + "</tr>"
    return f"<div class=scroll><table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table></div>"


def _ranked(problem: Problem, found: Sequence[Found]) -> str:
    rows = []
    for rank, one in enumerate(found, 1):
        per_second = one.tokens_per_second / one.layout.num_devices
        runs = "no" if reasons(problem, one.layout) else "yes"
        figures = (seconds(one.cost.step_seconds), f"{per_second:,.0f}", f"{utilisation(problem, per_second):.0%}")
        room = f"{one.memory.peak_bytes / 1e9:.4g}"
        rows.append((rank, *figures, room, runs, mesh_words(one.layout), pipeline_words(one.layout), layer_words(one.layout)))
    head = ("#", "step", "tok/s/device", "MFU", "GB", "runs", "mesh", "micro-batches", "layers")
    return _table(head, rows, 6)


def _times(found: Sequence[Found]) -> str:
    rows = [(f"#{rank}", one.cost.terms) for rank, one in enumerate(found, 1)]
    return svg.stacked(rows, lambda value: seconds(value))


def _memories(problem: Problem, found: Sequence[Found]) -> str:
    rows = []
    for rank, one in enumerate(found, 1):
        stage = one.memory.heaviest
        rows.append((f"#{rank}", {name: stage.term(name) / 1e9 for name in stage.terms}))
    return svg.stacked(rows, lambda value: f"{value:.3g} GB", limit=problem.limit_bytes / 1e9)


def _front(problem: Problem, answer: Answer) -> str:
    best = answer.found[0]
    found = [best]
    for share in _FRONT:
        limited = dataclasses.replace(problem, memory_bytes=share * best.memory.peak_bytes)
        try:
            found.append(search(limited, 1).found[0])
        except InfeasibleError:
            break  # leaner ones need not be asked for
    point = lambda one: (one.memory.peak_bytes / 1e9, one.cost.step_seconds, mesh_words(one.layout))
    others = [point(one) for one in answer.found[1:]]
    rows = [
        (seconds(one.cost.step_seconds), f"{one.memory.peak_bytes / 1e9:.4g}", mesh_words(one.layout), layer_words(one.layout))
        for one in found
    ]
    table = _table(("step", "GB", "mesh", "layers"), rows, 2)
    return svg.scatter([point(one) for one in found], others, ("GB a device", "seconds a step")) + table


def _sensitivity(problem: Problem, best: Found) -> str:
    recipe = dataclasses.replace(problem.recipe, capacity="exact", loads=())
    loads = [(x, _step(problem, best, recipe=dataclasses.replace(recipe, imbalance=x))) for x in IMBALANCES]
    fabric, network = (
        [(x, _step(problem, best, cluster=scaled(problem.cluster, link, x))) for x in BANDWIDTHS]
        for link in ("fabric", "network")
    )
    kinds = [problem.cluster.classes[0].chip.fabric.kind, problem.cluster.classes[0].chip.network.kind]
    lines = dict(zip(kinds, (fabric, network), strict=True))
    left = svg.lines({"rows of the fullest device over the mean": loads}, "imbalance", "seconds a step")
    return f"<div class=pair>{left}{svg.lines(lines, 'bandwidth, over what it is', 'seconds a step', log=True)}</div>"


def _step(problem: Problem, best: Found, **changes: Any) -> float:
    return cost(dataclasses.replace(problem, **changes).job(best.layout, best.batch)).step_seconds


def scaled(cluster: Cluster, link: str, factor: float) -> Cluster:
    """The cluster with that share of the bandwidth of its links of one kind, "fabric" or "network"."""
    faster = lambda one: dataclasses.replace(one, bytes_per_second=factor * one.bytes_per_second)
    parts = []
    for part in cluster.classes:
        chip = dataclasses.replace(part.chip, **{link: faster(getattr(part.chip, link))})
        parts.append(dataclasses.replace(part, chip=chip))
    between = faster(cluster.between) if link == "network" else cluster.between
    return dataclasses.replace(cluster, classes=tuple(parts), between=between)


def _devices(problem: Problem, best: Found) -> str:
    links = axis_links(problem, best.layout)
    table = _table(("axis", "devices", "stride", "link"), links, 3)
    return table + device_grid(problem.cluster, best.layout)


def _proof(entry: dict[str, Any]) -> str:
    proofs = [(one["rank"], one["proof"]) for one in entry["layouts"] if "proof" in one]
    if not proofs:
        return (
            "<p>None was asked for: <code>python -m layouts verify FILE.json#1</code>, or <code>search --verify 1</code>.</p>"
        )
    rows = []
    for rank, proof in proofs:
        for what in proof["checks"]:
            rows.append((f"#{rank}", proof["verdict"], what["name"], what["predicted"], what["compiled"], what["says"]))
        if not proof["checks"]:
            rows.append((f"#{rank}", proof["verdict"], "-", "-", "-", proof["words"]))
    return _table(("layout", "verdict", "figure", "predicted", "compiled", "says"), rows, 1)


_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1c2430;background:#fff}
main{max-width:1080px;margin:0 auto;padding:16px}
h1{font-size:1.6rem;margin:.6em 0 .2em}h2{font-size:1.15rem;margin:2em 0 0}
.says{color:#5a6675;margin:.1em 0 .8em}
.cards{display:flex;flex-wrap:wrap;gap:12px}.card{flex:1 1 140px;border:1px solid #d8dee6;border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:1.25rem}.card span{color:#5a6675;font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;border-bottom:1px solid #e6eaf0;text-align:right;white-space:nowrap;vertical-align:top}
th{color:#5a6675;font-weight:600}.words{text-align:left;white-space:normal;min-width:130px}
.pair{display:flex;flex-wrap:wrap;gap:16px}.pair>svg{flex:1 1 320px;min-width:0}
code{background:#f2f4f7;padding:1px 5px;border-radius:4px}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""
