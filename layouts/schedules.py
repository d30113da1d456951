"""Makers of pipeline schedules, by name: P stages, M micro-batches, V chunks a stage, units of U micro-batches.

A row a stage; digits are micro-batches, F forward, B input gradient, W weight gradient. docs/schedules.md draws them all.
"""

import dataclasses
import difflib
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from layouts.auto import chunk_counts, search
from layouts.errors import InfeasibleError, InputError
from layouts.listing import Limits, Policy, list_schedule
from layouts.simulate import Costs, simulate
from layouts.tables import Row, Shape, backward_cells, finish, op_cell
from moejax.pipeline import Cell, Op, Placement, Schedule


def make_schedule(name: str, shape: Shape) -> Schedule:
    """The schedule of that name.

    Raises:
      InputError: for an unknown name, or a shape that the schedule cannot have.
    """
    if name not in MAKERS:
        near = difflib.get_close_matches(name, MAKERS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"schedule {name!r}: legal are {', '.join(MAKERS)}{hint}")
    maker = MAKERS[name]
    for field, legal in (("unit", maker.takes_unit), ("split", maker.takes_split)):
        if getattr(shape, field) not in (None, False) and not legal:
            takers = ", ".join(other for other in MAKERS if getattr(MAKERS[other], f"takes_{field}"))
            raise InputError(f"{name} with {field}={getattr(shape, field)}: only {takers} takes a {field}")
    schedule = maker.make(name, dataclasses.replace(shape, chunks=maker.check(name, shape)))
    if shape.max_activations is not None:
        _check_cap(schedule, shape)
    return schedule


def _check_cap(schedule: Schedule, shape: Shape) -> None:
    peaks = simulate(schedule, shape.costs).peak_activations
    for stage, (peak, cap) in enumerate(zip(peaks, shape.caps, strict=True)):
        if peak > cap + 1e-9:
            raise InfeasibleError(
                f"{schedule.name} with max_activations={cap:g}: stage {stage} holds {peak:g} micro-batches of a full stage; "
                f"legal are numbers from {max(peaks):g} on, or auto, which fits its table to the cap"
            )


@dataclasses.dataclass(frozen=True)
class Maker:
    """One kind of schedule.

    Attributes:
      make: (name, shape) -> Schedule, the shape checked and its chunks filled in.
      chunks: V where none is asked for.
      legal_chunks: says which V there may be: a test, and its words.
      check_shape: raises where P or M cannot be.
      takes_unit: whether U has a meaning.
      takes_split: whether the backward is fused unless `split`.
    """

    make: Callable[[str, Shape], Schedule]
    chunks: int | None = 1
    legal_chunks: tuple[Callable[[int], bool], str] = (lambda v: v == 1, "1")
    check_shape: Callable[[str, Shape], None] = lambda name, shape: None
    takes_unit: bool = False
    takes_split: bool = False

    def check(self, name: str, shape: Shape) -> int | None:
        """The chunks to use; raises InputError where the shape cannot be."""
        chunks = self.chunks if shape.chunks is None else shape.chunks
        test, words = self.legal_chunks
        if chunks is not None and not test(chunks):
            raise InputError(f"{name} with chunks={chunks}: legal chunks a stage are {words}")
        self.check_shape(name, shape)
        return chunks


ANY_CHUNKS = (lambda v: True, "whole numbers from 1 on")
EVEN_CHUNKS = (lambda v: v % 2 == 0, "even numbers: each pair runs there and back")


# ------------------------------------------------------------------------------------------------- one pipe, one chunk


def _gpipe(name: str, shape: Shape) -> Schedule:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards.

    F0 F1 F2 F3 ... B0 W0 B1 W1 B2 W2 B3 W3
    """
    each = range(shape.microbatches)
    row = [op_cell("F", m) for m in each] + [cell for m in each for cell in backward_cells(0, m, shape.split)]
    return finish(name, shape, Placement.loop(shape.stages), [row] * shape.stages)


def _one_f_one_b(name: str, shape: Shape) -> Schedule:
    """1F1B (PipeDream-flush, arXiv 2006.09503): stage r runs P - r forwards ahead, then a backward and a forward in turn.

    stage 0 of 3: F0 F1 F2 ...... B0 W0 F3 B1 W1 F4 ...
    """
    rows = []
    for r in range(shape.stages):
        row = [op_cell("F", m) for m in range(min(shape.microbatches, shape.stages - r))]
        ahead = len(row)
        for m in range(shape.microbatches):
            row += backward_cells(0, m, shape.split)
            row += [op_cell("F", m + ahead)] if m + ahead < shape.microbatches else []
        rows.append(row)
    return finish(name, shape, Placement.loop(shape.stages), rows)


def _zero_bubble(name: str, shape: Shape) -> Schedule:
    """ZB-H1 and ZB-H2 (arXiv 2401.10241): W waits, r or 2r of them on stage r, so that B goes on early and W fills the end.

    ZB-H1 holds what 1F1B does, P micro-batches; ZB-H2 runs 2(P - r) - 1 forwards ahead, and every stage works from its
    first op to its last without a break.

    ZB-H1, stage 1 of 3: F0 F1 ... B0 F2 B1 W0 F3 B2 W1 ... W2 W3
    """
    rows = []
    for r in range(shape.stages):
        ahead = shape.stages - r if name == "zb_h1" else 2 * (shape.stages - r) - 1
        wait = r if name == "zb_h1" else 2 * r
        row = [op_cell("F", m) for m in range(min(shape.microbatches, ahead))]
        for m in range(shape.microbatches):
            row.append(op_cell("B", m))
            row += [op_cell("W", m - wait)] if m >= wait else []
            row += [op_cell("F", m + ahead)] if m + ahead < shape.microbatches else []
        row += [op_cell("W", m) for m in range(max(0, shape.microbatches - wait), shape.microbatches)]
        rows.append(row)
    return finish(name, shape, Placement.loop(shape.stages), rows)


# ------------------------------------------------------------------------------------------------ one pipe, many chunks


def _interleaved(name: str, shape: Shape) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473): groups of P micro-batches, each through a stage's chunks in turn.

    stage 0 of 2, chunks a and b: Fa0 Fa1 Fb0 Fb1 Fa2 ... Bb0 Wb0 Fa3 Bb1 Wb1 Fb2 Ba0 Wa0 ...
    """
    chunks, stages = shape.chunks or 1, shape.stages
    groups = _groups(shape)
    rows = []
    for r in range(stages):
        forwards = [op_cell("F", m, c) for group in groups for c in range(chunks) for m in group]
        backwards = [backward_cells(c, m, shape.split) for group in groups for c in range(chunks - 1, -1, -1) for m in group]
        ahead = 2 * (stages - 1 - r) + (chunks - 1) * len(groups[0])
        row = forwards[:ahead]
        for k, backward in enumerate(backwards):
            row += [*forwards[ahead + k : ahead + k + 1], *backward]
        rows.append(row)
    return finish(name, shape, Placement.loop(stages, chunks), rows)


def _groups(shape: Shape) -> list[range]:
    """M // P groups of P micro-batches; where P does not divide M, the first ones get one more."""
    number = max(1, shape.microbatches // shape.stages)
    cuts = [-(-shape.microbatches * g // number) for g in range(number + 1)]
    return [range(first, end) for first, end in itertools.pairwise(cuts)]


def _zeropp(name: str, shape: Shape) -> Schedule:
    """ZeroPP (arXiv 2402.03791): U micro-batches through one chunk before the next, so that its parameters are gathered
    once for all of them: (2V - 2) * ceil(M/U) + 1 gathers a stage. Holds at most U micro-batches.

    stage 1 of 2, chunks a and b, U = 3: Fa0 Fa1 Fa2 Fb0 Bb0 Fb1 Bb1 Fb2 Bb2 Ba0 Wa0 Ba1 Wa1 Ba2 Wa2 Wb2 Wb1 Wb0
    """
    chunks, stages, m = shape.chunks or 1, shape.stages, shape.microbatches
    unit = min(m, 2 * stages if shape.unit is None else shape.unit)
    rows = []
    for r in range(stages):
        row: Row = []
        for first in range(0, m, unit):
            row += _zeropp_unit(r, stages, chunks, range(first, min(m, first + unit)))
        rows.append(row)
    return finish(name, shape, Placement.loop(stages, chunks), rows, unit)


def _zeropp_unit(r: int, stages: int, chunks: int, unit: range) -> Row:
    """One unit on stage r: forwards ahead, a forward and a backward in turn, the other backwards; W from a stack."""
    forwards = [(c, m) for c in range(chunks) for m in unit]
    backwards = [(c, m) for c in range(chunks - 1, -1, -1) for m in unit]
    after = 2 * (stages - r - 1)
    ahead = min(len(forwards), after + (chunks - 1) * len(unit))
    row = [op_cell("F", m, c) for c, m in forwards[:ahead]]
    stack: list[Cell] = []
    for k, (c, m) in enumerate(backwards):
        steady = ahead + k < len(forwards)
        row += [op_cell("F", f, d) for d, f in forwards[ahead + k : ahead + k + 1]]
        row.append(op_cell("B", m, c))
        stack.append(op_cell("W", m, c))
        pops = 1
        if steady and k < len(unit):  # of the last chunk: the W held back fill the pipeline while it drains
            pops = int(k > 2 * r) + (after if k == len(unit) - 1 else 0)
        row += [stack.pop() for _ in range(min(pops, len(stack)))]
    return row + stack[::-1]


# ------------------------------------------------------------------------------------- there and back, and both at once


def _dualpipe(name: str, shape: Shape) -> Schedule:
    """DualPipe (DeepSeek-V3, arXiv 2412.19437): two copies of the model, half of the micro-batches enter at either end.

    Stage r and its mirror P - 1 - r run the same steps, with the two directions exchanged: `_dual_row`.
    """
    half = shape.microbatches // 2
    rows = []
    for r in range(shape.stages):
        second = r >= shape.stages // 2
        steps = _dual_row(min(r, shape.stages - 1 - r), shape.stages // 2, half)
        side = lambda phase, second=second: phase ^ second
        rows.append([tuple(Op(k, side(c), m + half * side(c)) for k, c, m in cell) for cell in steps])
    return finish(name, shape, Placement.loop(shape.stages).both_ways(), rows)


def _dualpipe_v(name: str, shape: Shape) -> Schedule:
    """DualPipeV (Sea AI Lab's "cut in half" of DualPipe): the same steps, the second direction is the way back of a V."""
    rows = [_dual_row(r, shape.stages, shape.microbatches) for r in range(shape.stages)]
    return finish(name, shape, Placement.zigzag(shape.stages), rows)


def _dual_row(r: int, stages: int, count: int) -> Row:
    """What the stage r steps from its end does, of `stages` up to the turn, with `count` micro-batches a direction.

    Directions 0 and 1 stand where chunks do; F0&B1 is one overlapped cell (F, B, W).

      F0 ...         2 (s - r - 1)   fill direction 0
      F0 F1 ...      r + 1           and the other
      B1 W1 F1 ...   s - r - 1       backwards have begun
      F0&B1 F1&B0    until the forwards of direction 0 are done; at the turn the first is not overlapped
      B1 F1&B0       s - r - 1
      B1 B0 ...      r + 1           the second half keeps its W for
      W B0 ...       s - r - 1
      W ...          r + 1
    """
    rest = stages - r - 1
    dual = _DualRow()
    dual.run("F0", 2 * rest)
    dual.run("F0 F1", r + 1)
    dual.run("b1 w F1", rest)
    steady = count - 2 * stages + r + 1
    if r == stages - 1 and steady:
        dual.run("F0 B1 F1&B0", 1)
        steady -= 1
    dual.run("F0&B1 F1&B0", steady)
    dual.run("B1 F1&B0", rest)
    dual.run("B1 B0", (r + 1) // 2)
    dual.run("B1 b0", 1 - r % 2)
    dual.run("b1 b0", (r + 1) // 2)
    dual.run("w b0", rest)
    dual.run("w", r + 1)
    return dual.row


class _DualRow:
    """Writes a row from words: F0, B1 (with its W), b1 (without), w (the oldest W left out), & for one cell."""

    def __init__(self):
        self.row: Row = []
        self.next = {"F0": 0, "F1": 0, "B0": 0, "B1": 0}
        self.left_out: deque[Op] = deque()

    def run(self, words: str, times: int) -> None:
        """The words, so many times."""
        for word in words.split() * times:
            self.row.append(tuple(op for part in word.split("&") for op in self._ops(part)))

    def _ops(self, word: str) -> list[Op]:
        if word == "w":
            return [self.left_out.popleft()]
        kind, chunk, key = word[0].upper(), int(word[1]), word.upper()
        m = self.next[key]
        self.next[key] += 1
        if kind == "F":
            return [Op("F", chunk, m)]
        weight = Op("W", chunk, m)
        if word[0] == "b":
            self.left_out.append(weight)
            return [Op("B", chunk, m)]
        return [Op("B", chunk, m), weight]


def _check_dual(name: str, shape: Shape) -> None:
    both = name == "dualpipe"
    if both and shape.stages % 2:
        raise InputError(f"{name} with stages={shape.stages}: needs an even number, each stage has a mirror image")
    least, step = 2 * shape.stages, 2 if both else 1
    if shape.microbatches < least or shape.microbatches % step:
        kind = "even numbers" if both else "whole numbers"
        raise InputError(
            f"{name} with stages={shape.stages}, microbatches={shape.microbatches}: legal are {kind} from {least} on"
        )


def _check_bitpipe(name: str, shape: Shape) -> None:
    if shape.stages % 2 or shape.microbatches % 2:
        what, value = ("stages", shape.stages) if shape.stages % 2 else ("microbatches", shape.microbatches)
        raise InputError(f"{name} with {what}={value}: needs an even number, half of it a direction")


# -------------------------------------------------------------------------------------------------------- by list scheduling


def _zb_v(name: str, shape: Shape) -> Schedule:
    """ZB-V (arXiv 2401.10241): a V of two chunks a stage; B goes on early, W fills the gaps, and no more than 1F1B's P
    micro-batches are held. Here list scheduling puts F first as long as there is room, then B, then W.

    stage 0 of 2, chunks a and b: Fa0 Fa1 Fa2 Fb0 Bb0 Wb0 Fb1 Ba0 Bb1 Wa0 Fa3 ...
    """
    return _listed(name, shape, Placement.zigzag(shape.stages), [Policy(first="F")])


def _hanayo(name: str, shape: Shape) -> Schedule:
    """Hanayo (SC'23, arXiv 2308.15762): V / 2 waves: forwards run down and up the stages in waves, the backward is fused,
    at most P micro-batches are held.
    """
    return _listed(name, shape, Placement.zigzag(shape.stages, shape.chunks or 2), _WAVES)


def _bitpipe(name: str, shape: Shape) -> Schedule:
    """BitPipe (arXiv 2410.19367): a V-shaped interleaved pipeline and its mirror image, half of the micro-batches in each;
    the backward is fused, at most P micro-batches are held.
    """
    return _listed(name, shape, Placement.zigzag(shape.stages, shape.chunks or 2).both_ways(), _WAVES)


_WAVES = [Policy(first=first, fused=True) for first in ("B", "F", "turn")]


def _listed(name: str, shape: Shape, placement: Placement, policies: Sequence[Policy]) -> Schedule:
    """The shortest of the policies' tables at F = B = W, within the P micro-batches that 1F1B holds."""
    limits = Limits(placement, shape.microbatches, Costs(), (shape.stages,) * shape.stages)
    tables = [finish(name, shape, placement, list_schedule(limits, policy)) for policy in policies]
    return tables[0] if len(tables) == 1 else min(tables, key=lambda table: simulate(table).makespan)


def _auto(name: str, shape: Shape) -> Schedule:
    """The shortest table found for the costs and within the caps: `layouts.auto.search`."""
    known = []
    for other in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "zeropp"):
        maker = MAKERS[other]
        for chunks in chunk_counts(shape):
            if maker.legal_chunks[0](chunks):
                asked = dataclasses.replace(shape, chunks=chunks, split=maker.takes_split)
                known.append(maker.make(other, asked))
    return search(name, shape, known).schedule


MAKERS = {
    "gpipe": Maker(_gpipe, takes_split=True),
    "1f1b": Maker(_one_f_one_b, takes_split=True),
    "interleaved": Maker(_interleaved, 2, ANY_CHUNKS, takes_split=True),
    "zb_h1": Maker(_zero_bubble),
    "zb_h2": Maker(_zero_bubble),
    "zb_v": Maker(_zb_v, 2, (lambda v: v == 2, "2")),
    "dualpipe": Maker(_dualpipe, 1, (lambda v: v in (1, 2), "1, a part of the model a direction"), _check_dual),
    "dualpipe_v": Maker(_dualpipe_v, 2, (lambda v: v == 2, "2"), _check_dual),
    "bitpipe": Maker(_bitpipe, 2, EVEN_CHUNKS, _check_bitpipe),
    "hanayo": Maker(_hanayo, 2, EVEN_CHUNKS),
    "zeropp": Maker(_zeropp, 2, ANY_CHUNKS, takes_unit=True),
    "auto": Maker(_auto, None, ANY_CHUNKS),
}
