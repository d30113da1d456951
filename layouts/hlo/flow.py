"""Dataflow of a compiled text: who depends on whom, and what is scheduled while a transfer is under way."""

import dataclasses
import re
from collections.abc import Iterable, Iterator

from layouts.hlo.flops import KERNEL_CALLS, PRODUCT_CALLS, call_target
from layouts.hlo.program import FREE, scope
from layouts.hlo.text import Computation, Instruction, Module

# How TPU programs name the fusions that begin and end a collective whose steps are fused with products.
FUSED = "async-collective"


@dataclasses.dataclass(frozen=True)
class Window:
    """An asynchronous operation and what runs while it is under way.

    Attributes:
      start: e.g. an all-to-all-start.
      done: the instruction that waits for it.
      between: what is scheduled after the start and before the done, without instructions that do no work.
    """

    start: Instruction
    done: Instruction
    between: tuple[Instruction, ...]

    @property
    def kind(self) -> str:
        """The operation, e.g. "all-to-all"; "async-collective" for the fusion that begins one on a TPU."""
        return FUSED if self.start.op == "fusion" else self.start.base_op


def carriers(
    module: Module, computation: Computation, *, op: str | None = None, within: str | None = None
) -> list[Instruction]:
    """The instructions of one computation that are, or contain in what they call, one that matches.

    A fusion, a loop or a conditional carries what happens inside it, so "does this exchange depend on those experts"
    can be asked at the level where both stand, wherever the compiler put the work itself.

    Args:
      module: the parsed text.
      computation: one of its computations.
      op: matches ops without their "-start" or "-done"; None: any.
      within: matches instructions whose scope has this run of names, e.g. "moe/experts"; None: any.
    """

    def matches(instruction: Instruction) -> bool:
        in_scope = within is None or f"/{within}/" in f"/{scope(instruction).removeprefix('~')}/"
        return in_scope and (op is None or instruction.base_op == op)

    return [found for found in computation if any(matches(inner) for inner in _with_called(module, found))]


def depends(computation: Computation, later: Instruction, earlier: Iterable[Instruction] | Instruction) -> bool:
    """Whether `later` needs, directly or through others, the result or the end of any of `earlier`.

    All are of this computation. Data and control dependences count; an instruction does not depend on itself. The
    answer is about whole instructions: whoever uses any part of a tuple depends on the one that returns it.

    Raises:
      ValueError: where an instruction is not of this computation.
    """
    wanted = [earlier] if isinstance(earlier, Instruction) else list(earlier)
    for instruction in (later, *wanted):
        if computation.instructions.get(instruction.name) is not instruction:
            raise ValueError(f"{instruction.name!r} is of computation {instruction.computation!r}, not {computation.name!r}")
    names = {instruction.name for instruction in wanted}
    return any(instruction.name in names for instruction in _ancestors(computation, later))


def windows(computation: Computation, op: str | None = None) -> list[Window]:
    """The start and done pairs of a scheduled computation, in the order of their starts.

    Args:
      computation: of a scheduled module.
      op: e.g. "all-to-all", or "async-collective" for those that TPUs fuse with products (`Window.kind`); None: every
        asynchronous operation, copies included.
    """
    found = []
    for done in computation:
        if _half(done) != "done":
            continue
        start = _start_of(computation, done)
        between = [i for i in computation if start.position < i.position < done.position and i.op not in FREE]
        found.append(Window(start, done, tuple(between)))
    wanted = [window for window in found if op in (None, window.kind)]
    return sorted(wanted, key=lambda window: window.start.position)


def _half(instruction: Instruction) -> str | None:
    """Whether it is the "start" or the "done" of an asynchronous operation, or neither."""
    fused = instruction.op == "fusion" and instruction.name.startswith(FUSED)
    name = re.sub(r"\.\d+$", "", instruction.name) if fused else instruction.op
    return next((half for half in ("start", "done") if name.endswith(f"-{half}")), None)


def works(module: Module, instruction: Instruction) -> bool:
    """Whether there is a matrix product, or a kernel, in the instruction or in what it calls."""
    target = call_target(instruction) or ""
    if instruction.op in ("dot", "convolution") or PRODUCT_CALLS.search(target) or target in KERNEL_CALLS:
        return True
    return any(works(module, found) for name in instruction.called for found in module.computations[name])


def _start_of(computation: Computation, done: Instruction) -> Instruction:
    """The start that a done waits for, past any "-update", or fused products, between them."""
    start = computation.operands(done)[0]
    while _half(start) != "start":
        start = computation.operands(start)[0]
    return start


def _ancestors(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """Everything that must come before the instruction, each once."""
    seen: set[str] = set()
    waiting = [*instruction.operands, *instruction.predecessors]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in computation.instructions:
            continue
        seen.add(name)
        found = computation.instructions[name]
        yield found
        waiting += [*found.operands, *found.predecessors]


def _with_called(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction and all that run inside it, at any depth."""
    yield instruction
    for name in instruction.called:
        for inner in module.computations.get(name, ()):
            yield from _with_called(module, inner)
