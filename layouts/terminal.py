"""Answers in the terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table

from layouts.layout import Layout
from layouts.results import reasons, utilisation
from layouts.search import Answer, Found, Problem

if TYPE_CHECKING:
    from layouts.verify import Proof


def print_answer(problem: Problem, answer: Answer) -> None:
    """The ranked table, and what was looked at."""
    # Into a file or a pipe whole lines are written, whatever the width of a terminal.
    console, tally = Console(width=None if sys.stdout.isatty() else 160), answer.tally
    batch = problem.batch
    console.print(
        f"{problem.model.name} on {problem.cluster}: {problem.cluster.num_devices} devices, {batch.sequences} x {batch.seq} "
        f"tokens a step, {problem.limit_bytes / 1e9:.4g} GB a device, objective {problem.objective}",
        highlight=False,
    )
    console.print(table(problem, answer.found))
    console.print(
        f"{tally.layouts:,} layouts considered ({tally.pairs:,} pairs of mesh and plan), {tally.priced:,} priced exactly, "
        f"{tally.seconds:.1f} s; the best of each mesh is shown",
        highlight=False,
    )
    if lacking := problem.model.not_runnable():
        console.print(f"moejax does not run {problem.model.name} in any layout: {', '.join(lacking)}", highlight=False)


def table(problem: Problem, found: Sequence[Found]) -> Table:
    """A line a layout."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in _COLUMNS:
        shown.add_column(name, justify=justify, overflow="fold")
    for rank, one in enumerate(found, 1):
        per_second = one.tokens_per_second / one.layout.num_devices
        shown.add_row(
            str(rank),
            seconds(one.cost.step_seconds),
            f"{per_second:,.0f}",
            f"{utilisation(problem, per_second):.0%}",
            f"{one.memory.peak_bytes / 1e9:.4g}",
            layout_words(one.layout),
            largest(one.cost.terms),
            "no" if reasons(problem, one.layout) else "yes",
        )
    return shown


_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("#", "right"),
    ("step", "right"),
    ("tok/s/dev", "right"),
    ("MFU", "right"),
    ("GB", "right"),
    ("layout", "left"),
    ("most time", "left"),
    ("runs", "left"),
)


def seconds(number: float) -> str:
    """With the unit that suits."""
    return f"{number:.4g} s" if number >= 0.1 else f"{number * 1e3:.4g} ms"


def layout_words(layout: Layout) -> str:
    """The mesh; micro-batches and schedule; what a layer does."""
    return f"{mesh_words(layout)}; {pipeline_words(layout)}; {layer_words(layout)}"


def mesh_words(layout: Layout) -> str:
    """The axes larger than 1, and where experts lie if not on the axis expert alone."""
    sizes = " ".join(f"{name} {size}" for name, size in layout.sizes.items() if size > 1) or "1 device"
    return sizes if layout.expert_axes == ("expert",) else f"{sizes}, experts on {'+'.join(layout.expert_axes)}"


def pipeline_words(layout: Layout) -> str:
    """Micro-batches, schedule, cuts."""
    if layout.stage == 1:
        return f"{layout.num_microbatches} micro-batch" + ("es" if layout.num_microbatches > 1 else "")
    chunks = f" x{layout.stage_chunks}" if layout.stage_chunks > 1 else ""
    cuts = f", cuts {runs(layout.cuts)}" if layout.cuts else ""
    return f"{layout.num_microbatches} micro-batches, {layout.schedule}{chunks}{cuts}"


def runs(cuts: Sequence[int]) -> str:
    """ "5x12 4x12": numbers of layers in a row of stages."""
    found: list[list[int]] = []
    for size in cuts:
        if found and found[-1][0] == size:
            found[-1][1] += 1
        else:
            found.append([size, 1])
    return " ".join(f"{size}x{times}" if times > 1 else str(size) for size, times in found)


def layer_words(layout: Layout) -> str:
    """What a layer does: exchange, codec, chunks, remat, policies; what is as by default is left out."""
    words = []
    if layout.expert_shards > 1:
        codec = layout.codec if isinstance(layout.codec, str) else "+".join(layout.codec)
        words.append(layout.exchange + ("" if codec == "plain" else f" {codec}"))
        words += [f"{layout.num_chunks} chunks"] if layout.num_chunks > 1 else []
    words += [f"remat {layout.remat}"] if layout.remat != "none" else []
    words += ["sequence"] if layout.sequence else []
    words += ["moments over data"] if layout.moments == "over_data" else []
    kinds = dict(layout.policy)
    for choice in ("keep", "offload"):
        groups = [group for group in kinds if kinds[group] == choice]
        words += [f"{choice} {_groups(groups)}"] if groups else []
    return ", ".join(words) or "nothing recomputed"


def _groups(groups: Sequence[str]) -> str:
    return "all" if len(groups) >= 6 else "experts" if list(groups) == ["experts"] else "all but experts"


def largest(terms: Mapping[str, float], count: int = 3) -> str:
    """The terms that take the most."""
    total = sum(terms.values())
    ranked = sorted(terms.items(), key=lambda term: -term[1])[:count]
    return ", ".join(f"{name} {size / total:.0%}" for name, size in ranked)


def print_proofs(proofs: Sequence["Proof"]) -> None:
    """What the compiler said of each."""
    for proof in proofs:
        print("\n".join(proof.lines()))
