"""What a scheduled text holds in memory, instruction by instruction: which buffers make the peak.

The compiler's `memory_analysis` is the truth about the total; this says what it is made of. It estimates temporaries and
results together, because the compiler keeps temporaries in the room of results that are not written yet, and leaves out
padding and packing: on 28 layers for v5p and H100 it came to 0.75 to 1.02 of the compiler's. Only main memory counts.
"""

import dataclasses
import re

from layouts.hlo.text import ARRAY, ArrayType, Computation, Instruction, Module

# Results that are another's buffer under a new name.
ALIASES = ("bitcast", "while", "optimization-barrier", "opt-barrier", "after-all")
NAMES = ("tuple", "get-tuple-element", "bitcast")
# Written over their first operand.
UPDATES = ("dynamic-update-slice", "scatter")
# Not elementwise, though operand and result may have one shape.
MOVES = (
    "transpose",
    "reverse",
    "copy",
    "gather",
    "dynamic-slice",
    "sort",
    "dot",
    "convolution",
    "custom-call",
    "all-to-all",
)
# Arrays elsewhere than in a device's main memory: TPU vector and scalar memory, the host's.
ELSEWHERE = re.compile(r"S\([1-9]\d*\)")
LAID_OUT = re.compile(ARRAY.pattern + r"(\{[^{}]*\})?")

Buffer = tuple[str, int]  # the instruction that made it, and which array of its result
Value = tuple[frozenset[Buffer], ...]  # for each array (of a tuple: each element), the buffers that it may lie in


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment of a computation at which the most bytes are alive.

    Attributes:
      nbytes: alive then, the computation's results included, its arguments not.
      at: the instruction that runs then.
      buffers: the instructions that made what is alive, largest first, with the bytes of each.
    """

    nbytes: int
    at: Instruction
    buffers: tuple[tuple[Instruction, int], ...]


def peak(module: Module, computation: Computation | None = None) -> Peak:
    """The peak of a computation, by default the entry; loops, branches and calls add their own peaks while they run."""
    computation = computation or module.computations[module.entry]
    values = _values(computation)
    last_use = _last_uses(computation, values)
    best = Peak(-1, next(iter(computation)), ())
    alive: dict[Buffer, int] = {}
    for instruction in computation:
        dying = [buffer for buffer in alive if last_use[buffer] == instruction.position]
        reused = _reused(module, computation, instruction, {buffer: alive[buffer] for buffer in dying}, values)
        inner = (peak(module, called) for called in _run_by(module, instruction))
        inside = max(inner, key=lambda found: found.nbytes, default=None)
        alive |= {buffer: size for buffer, size in _made(instruction).items() if buffer in last_use}
        total = sum(alive.values()) - reused + (inside.nbytes if inside else 0)
        if total > best.nbytes:
            best = Peak(total, instruction, _ranked(computation, alive, inside))
        alive = {buffer: size for buffer, size in alive.items() if last_use[buffer] > instruction.position}
    return best


def _values(computation: Computation) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for instruction in computation:
        values[instruction.name] = _value(instruction, [values[name] for name in instruction.operands if name in values])
    return values


def _value(instruction: Instruction, taken: list[Value]) -> Value:
    """Where an instruction's arrays lie, given where those of its operands do."""
    whole = [frozenset().union(*value) for value in taken]
    if instruction.op in ("parameter", "constant"):
        return (frozenset(),)
    if instruction.op == "tuple":
        return tuple(whole)
    if instruction.op == "get-tuple-element":
        index = int(instruction.attribute(r"index=(\d+)") or 0)
        return (taken[0][index] if index < len(taken[0]) else whole[0],)
    if instruction.op in ALIASES:
        return taken[0] if taken else (frozenset(),)
    if instruction.op.endswith(("-done", "-update")) or (_in_place(instruction) and whole and whole[0]):
        return (whole[0],)
    return tuple(frozenset([buffer]) for buffer in _made(instruction)) or (frozenset(),)


def _in_place(instruction: Instruction) -> bool:
    named_so = instruction.op == "fusion" and re.search("dynamic[-_]update[-_]slice", instruction.name)
    return instruction.op in UPDATES or bool(named_so)


def _made(instruction: Instruction) -> dict[Buffer, int]:
    """The buffers that an instruction fills, with their bytes in the main memory."""
    if instruction.op in (*ALIASES, "parameter", "constant", "tuple", "get-tuple-element"):
        return {}
    if instruction.op.endswith(("-done", "-update")):
        return {}
    arrays = LAID_OUT.findall(instruction.type_text)
    if instruction.op == "copy-start":  # (result, operand, context)
        arrays = arrays[:1]
    elif instruction.op.endswith("-start") and instruction.op != "all-reduce-start":  # ((operands), results, ...)
        arrays = arrays[len(instruction.operands) : 2 * len(instruction.operands)]
    sizes = [0 if ELSEWHERE.search(layout) else _array_bytes(dtype, dims) for dtype, dims, layout in arrays]
    return {(instruction.name, place): size for place, size in enumerate(sizes)}


def _array_bytes(dtype: str, dims: str) -> int:
    return ArrayType(dtype, tuple(int(dim) for dim in dims.split(",") if dim)).nbytes


def _last_uses(computation: Computation, values: dict[str, Value]) -> dict[Buffer, int]:
    """Where each buffer is last read; past the end for the computation's results."""
    last: dict[Buffer, int] = {}
    results: frozenset[Buffer] = frozenset()
    for instruction in computation:
        own = frozenset().union(*values[instruction.name])
        results = own if instruction.is_root else results
        if instruction.op in NAMES:
            continue  # it names buffers and reads none; who takes it does
        read = [frozenset().union(*values[name]) for name in instruction.operands if name in values]
        last |= dict.fromkeys(own.union(*read), instruction.position)
    return last | dict.fromkeys(results, len(computation.instructions))


def _reused(module, computation, instruction: Instruction, dying: dict[Buffer, int], values: dict[str, Value]) -> int:
    """Bytes of the result that are written over operands read for the last time, element by element."""
    free = [
        dying[buffer]
        for place, name in enumerate(instruction.operands)
        if name in values and place in _elementwise_operands(module, computation, instruction)
        for buffer in frozenset().union(*values[name])
        if buffer in dying
    ]
    saved = 0
    for size in _made(instruction).values():
        if size in free:
            free.remove(size)
            saved += size
    return saved


def _elementwise_operands(module: Module, computation: Computation, instruction: Instruction) -> set[int]:
    """Places of the operands of which result element i needs element i alone, as far as shapes and ops tell."""
    if instruction.op != "fusion":
        if instruction.op in MOVES or instruction.base_op != instruction.op:
            return set()
        operands = computation.operands(instruction)
        return {place for place, operand in enumerate(operands) if _same_shape(operand, instruction)}
    inner = module.computations[instruction.called[0]]
    if any(each.op == "reduce" for each in inner):
        return set()  # a reduction's kernel visits elements in an order of its own: XLA shares no buffer with it
    (root,) = (each for each in inner if each.is_root)
    waiting, seen, found = [root], {root.name}, set()
    while waiting:
        current = waiting.pop()
        if current.op == "parameter":
            found.add(int(current.argument_text))
            continue
        through = inner.operands(current)
        if current.op not in ("tuple", "bitcast", "get-tuple-element"):
            places = _elementwise_operands(module, inner, current)
            through = [operand for place, operand in enumerate(through) if place in places]
        waiting += [operand for operand in through if operand.name not in seen]
        seen |= {operand.name for operand in through}
    return found


def _same_shape(one: Instruction, other: Instruction) -> bool:
    dims = {array.dims for array in (*one.arrays, *other.arrays)}
    return len(dims) == 1 and len(one.arrays) == 1


def _run_by(module: Module, instruction: Instruction) -> list[Computation]:
    """The computations that run, with buffers of their own, while the instruction does."""
    if instruction.op not in ("while", "conditional", "call"):
        return []
    return [module.computations[name] for name in instruction.called if name in module.computations]


def _ranked(computation: Computation, alive: dict[Buffer, int], inside: Peak | None):
    sizes: dict[str, int] = {}
    for (name, _), size in alive.items():
        sizes[name] = sizes.get(name, 0) + size
    own = [(computation.instructions[name], size) for name, size in sizes.items()]
    return tuple(sorted([*own, *(inside.buffers if inside else ())], key=lambda pair: -pair[1]))
