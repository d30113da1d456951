"""How many micro-batches of each chunk a pipeline's stages hold at once: what the schedule's table says, without making one
for the schedules that every search meets.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence

from layouts.layout import Layout
from layouts.schedules import make_schedule
from layouts.tables import Shape
from moejax.pipeline import Placement

Live = tuple[int, ...]  # micro-batches held of each chunk of a stage, at one moment
# Tables repeat themselves: with more micro-batches than this many times the stages and units, they hold no more.
_PERIODS = 4
# Schedules whose chunk c on stage r is part c * P + r of the model, and whose live micro-batches have a closed form here.
LOOPS = ("gpipe", "1f1b", "interleaved", "zb_h1", "zeropp")


def placement(layout: Layout) -> Placement:
    """Which part of the model each chunk of each stage holds."""
    if layout.schedule in ("none", *LOOPS):
        return _loop(layout.stage, layout.stage_chunks)
    return _table(*_key(layout)).placement


def live(layout: Layout) -> tuple[tuple[Live, ...], ...]:
    """For each stage the moments at which it holds the most: none of them holds at most another's in every chunk."""
    if layout.schedule == "none":
        return (((layout.microbatch_overlap,),),)
    return _live(*_key(layout))


def _key(layout: Layout) -> tuple[str, int, int, int, int | None]:
    count = layout.num_microbatches
    if layout.schedule not in LOOPS:
        period = layout.unit or 2 * layout.stage
        count = count if count <= _PERIODS * period else _PERIODS * period + count % period
    if layout.schedule == "interleaved" and count % layout.stage == 0:
        count = min(count, _PERIODS * layout.stage)
    return layout.schedule, layout.stage, layout.stage_chunks, count, layout.unit


@functools.cache
def _loop(stages: int, chunks: int) -> Placement:
    return Placement.loop(stages, chunks)


@functools.cache
def _table(name: str, stages: int, chunks: int, microbatches: int, unit: int | None):
    return make_schedule(name, Shape(stages, microbatches, chunks, unit))


@functools.cache
def _live(name: str, stages: int, chunks: int, microbatches: int, unit: int | None) -> tuple[tuple[Live, ...], ...]:
    if name == "gpipe":
        return (((microbatches,) * chunks,),) * stages
    if name == "1f1b":
        return tuple(((min(stages - stage, microbatches),),) for stage in range(stages))
    if name == "zb_h1":
        return (((min(stages, microbatches),),),) * stages
    if name == "zeropp":
        return (((min(microbatches, unit or 2 * stages),) * chunks,),) * stages
    if name == "interleaved":
        return tuple(_most(_interleaved(stage, stages, chunks, microbatches)) for stage in range(stages))
    table = _table(name, stages, chunks, microbatches, unit)
    return tuple(_most(_of_row(row, table.placement.num_chunks)) for row in table.rows)


def waiting(layout: Layout, by_chunk: bool) -> tuple[tuple[Live, ...], ...]:
    """The same for those whose B is done and whose W is not: what a W needs of its B is held until then.

    Args:
      layout: the layout.
      by_chunk: also where W follows B within one op: it begins when the B of the whole chunk is done.
    """
    if layout.schedule == "none":
        return (((0,),),)
    return _waiting(*_few(layout), by_chunk)


def _few(layout: Layout) -> tuple[str, int, int, int, int | None]:
    """As `_key`, for tables: with few micro-batches."""
    name, stages, chunks, count, unit = _key(layout)
    period = unit or 2 * stages
    return name, stages, chunks, count if count <= period else period + (count % period or period), unit


@functools.cache
def _waiting(name: str, stages: int, chunks: int, microbatches: int, unit: int | None, by_chunk: bool):
    if name in ("gpipe", "1f1b", "interleaved"):
        one = tuple(tuple(int(by_chunk and i == chunk) for i in range(chunks)) for chunk in range(chunks))
        return (_most(iter(one)),) * stages
    if name == "zb_h1":
        return tuple(((min(stage + 1, microbatches),),) for stage in range(stages))
    table = _table(name, stages, chunks, microbatches, unit)
    return tuple(_most(_waits_of_row(row, table.placement.num_chunks, by_chunk)) for row in table.rows)


def _waits_of_row(row: Sequence, num_chunks: int, by_chunk: bool) -> Iterator[Live]:
    held = [0] * num_chunks
    yield tuple(held)
    for cell in row:
        for op in cell:
            held[op.chunk] += op.kind == "B"
        if by_chunk:
            yield tuple(held)
        for op in cell:
            held[op.chunk] -= op.kind == "W"
        yield tuple(held)


def _of_row(row: Sequence, num_chunks: int) -> Iterator[Live]:
    held = [0] * num_chunks
    for cell in row:
        for op in cell:
            held[op.chunk] += op.kind == "F"
        yield tuple(held)
        for op in cell:
            held[op.chunk] -= op.kind == "W"


def _interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> Iterator[Live]:
    """Forwards in groups of P micro-batches, each through the chunks in turn, some ahead; then one, and a backward, in turn.

    Looks at the start and two groups more: from there on a stage holds what it held a group before.
    """
    number = max(1, microbatches // stages)
    cuts = [-(-microbatches * g // number) for g in range(number + 1)]
    groups = [end - first for first, end in itertools.pairwise(cuts)]
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * groups[0]
    forwards = (chunk for size in groups for chunk in range(chunks) for _ in range(size))
    backwards = (chunk for size in groups for chunk in reversed(range(chunks)) for _ in range(size))
    held = [0] * chunks
    for chunk in itertools.islice(forwards, ahead):
        held[chunk] += 1
    yield tuple(held)
    for backward in itertools.islice(backwards, 2 * ahead + 2 * chunks * (stages + 1)):
        for chunk in itertools.islice(forwards, 1):
            held[chunk] += 1
        yield tuple(held)
        held[backward] -= 1


def _most(moments: Iterator[Live]) -> tuple[Live, ...]:
    found: list[Live] = []
    for moment in dict.fromkeys(moments):
        if not any(_covers(other, moment) for other in found):
            found = [other for other in found if not _covers(moment, other)] + [moment]
    return tuple(found)


def _covers(one: Live, other: Live) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
