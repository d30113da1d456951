"""Pictures of schedules: a row a stage over time, one schedule under another; and the same in text."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layouts.errors import InputError
from layouts.simulate import Event, Simulation
from moejax.pipeline import COMPUTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Blue, orange, green and purple that stay apart for colour-blind readers (Okabe and Ito); each from light to dark.
SHADES = {"F": ("#9ecae9", "#2f6fa8"), "B": ("#ffc98a", "#d9730d"), "W": ("#b5e0b0", "#3f9142"), "send": ("#999999",) * 2}
MARKS = {"gather": ("#7b3294", "v"), "reduce": ("#7a3b12", "^")}
SAYS = {"F": "F: forward", "B": "B: input gradient", "W": "W: weight gradient", "send": "blocked: sends"}
LANES = {
    "compute": (0.0, 0.8),
    "upper": (0.0, 0.4),
    "lower": (0.4, 0.4),
    "gather": (0.81, 0.08),
    "reduce": (0.89, 0.08),
}  # top and height in a row
POINTS = 72


def plot(simulations: Sequence[Simulation], path: Path) -> None:
    """Draws schedules one under another, on one scale of time, into a .png or .svg.

    Raises:
      InputError: for another suffix, where matplotlib is not installed, or the file cannot be written.
    """
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"{path}: legal are .png and .svg files")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"{path}: pictures need matplotlib: pip install 'moejax[plot]'") from error
    figure = Figure(figsize=_size(simulations), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [s.schedule.num_stages + 1 for s in simulations]
    panels = figure.subplots(len(simulations), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, simulation in zip(panels, simulations, strict=True):
        _draw(axes, simulation, max(s.makespan for s in simulations), figure.get_figwidth())
    panels[-1].set_xlabel("time, in the unit of the costs")
    _legend(figure, simulations)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error


def _size(simulations: Sequence[Simulation]) -> tuple[float, float]:
    """Inches: a typical op is wide enough for its micro-batch's number, between 11 and 48 inches in all."""
    finest = min(_typical(s) for s in simulations)
    longest = max(s.makespan for s in simulations)
    digits = max(len(str(s.schedule.num_microbatches - 1)) for s in simulations)
    width = min(48.0, max(11.0, (0.04 + 0.045 * digits) * longest / finest))
    return width, 0.8 + sum(0.5 + 0.3 * s.schedule.num_stages for s in simulations)


def _typical(simulation: Simulation) -> float:
    sizes = sorted(e.end - e.start for e in simulation.events if e.op.kind in COMPUTE and e.end > e.start)
    return sizes[len(sizes) // 2] if sizes else 1.0


def _draw(axes: "Axes", simulation: Simulation, longest: float, width: float) -> None:
    from matplotlib.collections import PolyCollection

    num_stages = simulation.schedule.num_stages
    idle = [_box(0, simulation.makespan, r, "compute") for r in range(num_stages)]
    axes.add_collection(PolyCollection(idle, facecolors="#ececec"))
    boxes: dict[str, list[Any]] = {}
    for event in simulation.events:
        color = _color(simulation, event)
        boxes.setdefault(color, []).append(_box(event.start, event.end, event.stage, event.lane))
    for color, each in boxes.items():
        axes.add_collection(PolyCollection(each, facecolors=color, edgecolors="white", linewidths=0.4))
    axes.add_collection(PolyCollection(_frames(simulation), facecolors="none", edgecolors="black", linewidths=0.8, zorder=2.5))
    axes.set_xlim(0, longest)
    axes.set_ylim(num_stages - 0.1, -0.15)
    axes.set_yticks([r + 0.4 for r in range(num_stages)], [f"stage {r}" for r in range(num_stages)], fontsize=8)
    axes.tick_params(left=False, labelright=width > 16)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(simulation, int(14.5 * width)), fontsize=9, loc="left")
    _marks(axes, simulation)
    _numbers(axes, simulation, 0.93 * width / longest)


def _frames(simulation: Simulation) -> list[list[tuple[float, float]]]:
    """The boxes of cells of several ops that compute."""
    times: dict[tuple[int, int], list[float]] = {}
    for event in simulation.events:
        if event.op.kind in COMPUTE:
            times.setdefault((event.stage, event.cell), []).extend((event.start, event.end))
    return [_box(min(ends), max(ends), stage, "compute") for (stage, _), ends in times.items() if len(ends) > 2]


def _box(start: float, end: float, stage: int, lane: str) -> list[tuple[float, float]]:
    top, height = LANES[lane]
    low, high = stage + top, stage + top + height
    return [(start, low), (end, low), (end, high), (start, high)]


def _color(simulation: Simulation, event: Event) -> str:
    """Later chunks are darker."""
    from matplotlib.colors import to_hex, to_rgb

    if event.op.kind in MARKS:
        return MARKS[event.op.kind][0]
    (r, g, b), dark = map(to_rgb, SHADES[event.op.kind])
    share = _shade(simulation, event.op.chunk)
    return to_hex((r + share * (dark[0] - r), g + share * (dark[1] - g), b + share * (dark[2] - b)))


def _shade(simulation: Simulation, chunk: int) -> float:
    return chunk / max(1, simulation.schedule.placement.num_chunks - 1)


def _marks(axes: "Axes", simulation: Simulation) -> None:
    """Gathers and reduces that take no time, as small triangles."""
    for kind, (color, shape) in MARKS.items():
        free = [e for e in simulation.events if e.op.kind == kind and e.start == e.end]
        high = -0.02 if kind == "gather" else 0.84
        x, y = [e.start for e in free], [e.stage + high for e in free]
        axes.scatter(x, y, s=14, color=color, marker=shape, linewidths=0, clip_on=False, zorder=3)


def _numbers(axes: "Axes", simulation: Simulation, inches: float) -> None:
    """The micro-batch in every op that is wide enough, at so many inches a unit of time.

    Equal numbers are one collection: as texts they would take a millisecond each.
    """
    digits = len(str(simulation.schedule.num_microbatches - 1))
    places: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    for event in simulation.events:
        if event.op.kind not in COMPUTE:
            continue
        text, (top, height) = str(event.op.index), LANES[event.lane]
        fits = (event.end - event.start) * inches * POINTS / (0.8 * digits)
        size = round(min(8.5, fits, 0.3 * height * POINTS * 0.8), 1)
        if size >= 3.0:
            color = "white" if _shade(simulation, event.op.chunk) > 0.6 else "black"
            at = (event.start + event.end) / 2, event.stage + top + height / 2
            places.setdefault((text, size, color), []).append(at)
    for (text, size, color), each in places.items():
        _stamp(axes, text, size, color, each)


def _stamp(axes: "Axes", text: str, size: float, color: str, places: list[tuple[float, float]]) -> None:
    from matplotlib.collections import PathCollection
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), text, size=size)
    box = path.get_extents()
    path = path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))
    points = Affine2D().scale(1 / POINTS) + axes.figure.dpi_scale_trans
    stamp = PathCollection([path], offsets=places, offset_transform=axes.transData, facecolors=color, linewidths=0)
    stamp.set_transform(points)
    stamp.set_in_layout(False)
    axes.add_collection(stamp, autolim=False)


def _title(simulation: Simulation, width: int) -> str:
    schedule, chunks = simulation.schedule, simulation.schedule.placement.num_chunks
    gathers = schedule.count("gather")
    title = (
        f"{schedule.name}: {schedule.num_stages} stages{f' of {chunks} chunks' if chunks > 1 else ''}, "
        f"{schedule.num_microbatches} micro-batches{f' in units of {schedule.unit}' if schedule.num_units > 1 else ''}"
        f" \N{EM DASH} makespan {simulation.figures()['makespan']:g}; idle {simulation.bubble_makespan:.1%} of it, "
        f"{simulation.bubble_span:.1%} of the worst stage's span; a stage holds up to {max(simulation.peak_activations):g} "
        f"micro-batches; gathers a stage: {_range(gathers)}"
    )
    return textwrap.fill(title, width, break_on_hyphens=False)


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _legend(figure: "Figure", simulations: Sequence[Simulation]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {event.op.kind for s in simulations for event in s.events}
    chunks = max(s.schedule.placement.num_chunks for s in simulations)
    handles: list[Any] = [Patch(color=SHADES[kind][0], label=says) for kind, says in SAYS.items() if kind in seen]
    handles.append(Patch(color="#ececec", label="idle"))
    for kind, (color, shape) in MARKS.items():
        says = {"gather": "gathers a chunk's parameters", "reduce": "reduces a chunk's gradients"}[kind]
        if kind in seen:
            handles.append(Line2D([], [], color=color, marker=shape, linestyle="", label=says))
    outlined = any(len(cell) > 1 for s in simulations for row in s.schedule.rows for cell in row)
    if outlined:
        handles.append(Patch(facecolor="white", edgecolor="black", label="framed: one cell, its results leave at its end"))
    notes = ["number: micro-batch"] + (["darker: a later chunk, or the other direction"] if chunks > 1 else [])
    handles += [Line2D([], [], linestyle="", label=note) for note in notes]
    columns = min(len(handles), int(figure.get_figwidth() / 2.6))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, fontsize=9, frameon=False, handletextpad=0.4)


def text_rows(simulation: Simulation) -> list[str]:
    """A line a stage, a column a tick: F, B or W, the chunk's letter where there are several, the micro-batch.

    F3&B1 is an overlapped pair, a dot an idle tick. A tick is the shortest op; where ops take no whole number of ticks the
    words stand one after another, without idle time.
    """
    rows = [_words(simulation, stage) for stage in range(simulation.schedule.num_stages)]
    times = [time for row in rows for start, end, _ in row for time in (start, end)]
    tick = min((end - start for row in rows for start, end, _ in row if end > start), default=0.0)
    whole = tick > 0 and all(abs(time / tick - round(time / tick)) < 1e-6 for time in times)
    lines = _grid(rows, tick, simulation.makespan) if whole else [" ".join(word for _, _, word in row) for row in rows]
    width = len(str(len(lines) - 1))
    return [f"stage {stage:<{width}}  {line}" for stage, line in enumerate(lines)]


def _words(simulation: Simulation, stage: int) -> list[tuple[float, float, str]]:
    """(start, end, word) of what the stage computes; an overlapped pair is one word, its W unsaid."""
    letters = simulation.schedule.placement.num_chunks > 1
    mine = sorted((e for e in simulation.events if e.stage == stage), key=lambda e: (e.start, e.cell))
    backward = {e.cell: _word(e, letters) for e in mine if e.lane == "lower" and e.op.kind == "B"}
    found = []
    for event in mine:
        if event.op.kind in COMPUTE and event.lane != "lower":
            pair = "&" + backward[event.cell] if event.lane == "upper" else ""
            found.append((event.start, event.end, _word(event, letters) + pair))
    return found


def _word(event: Event, letters: bool) -> str:
    chunk = chr(ord("a") + event.op.chunk % 26) if letters else ""
    return f"{event.op.kind}{chunk}{event.op.index}"


def _grid(rows: list[list[tuple[float, float, str]]], tick: float, makespan: float) -> list[str]:
    spans = [(round(start / tick), round(end / tick), word) for row in rows for start, end, word in row]
    width = max(math.ceil((len(word) + 1) / max(1, end - start)) for start, end, word in spans)
    lines = []
    for row in rows:
        places = ["."] * round(makespan / tick)
        for start, end, word in row:
            first, last = round(start / tick), round(end / tick)
            places[first:last] = [word, *[""] * (last - first - 1)]
        lines.append(_line(places, width))
    return lines


def _line(places: list[str], width: int) -> str:
    line = ""
    for k, word in enumerate(places):
        line += " " * (k * width - len(line)) + word if word else ""
    return line
