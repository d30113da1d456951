"""Compiled text (scheduled, partitioned HLO as `Compiled.as_text()` prints it) to a Module of Instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
# A dtype's bits are the first number in its name: bf16, s4, f8e4m3fn, c64.
DTYPE = re.compile(r"(?:bf|f|s|u|c)(\d+)\w*")
NAME = re.compile(r"%([\w.\-]+)")
# The keys under which an instruction calls another computation.
CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """One array of an instruction's type. Layouts and memory spaces are not kept."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements without padding; 0 for a token."""
        if self.dtype == "pred":
            return math.prod(self.dims)
        bits = DTYPE.fullmatch(self.dtype)
        return -(-math.prod(self.dims) * int(bits[1]) // 8) if bits else 0


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique within the computation.
      op: e.g. "fusion", "all-to-all-start".
      type_text: its type as written; a tuple in parentheses.
      argument_text: what stands between the op's parentheses.
      attributes: what follows them.
      computation: the name of the computation that it stands in.
      position: its place in that computation, which is the order of execution where the module is scheduled.
      is_root: whether it is the computation's result.
    """

    name: str
    op: str
    type_text: str
    argument_text: str
    attributes: str
    computation: str
    position: int
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of its type, tuples flattened."""
        found = (ArrayType(dtype, _ints(dims)) for dtype, dims in ARRAY.findall(self.type_text))
        return tuple(array for array in found if array.dtype == "pred" or DTYPE.fullmatch(array.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in self.arrays)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it takes."""
        return tuple(NAME.findall(self.argument_text))

    @functools.cached_property
    def predecessors(self) -> tuple[str, ...]:
        """Names of instructions that must have run before it for another reason than data."""
        found = re.search(r"control-predecessors=\{([^}]*)\}", self.attributes)
        return tuple(NAME.findall(found[1])) if found else ()

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls, loops' bodies and conditions included."""
        return tuple(name for group in CALLS.findall(self.attributes) for name in NAME.findall(group))

    @property
    def base_op(self) -> str:
        """The op without "-start", "-update" or "-done"."""
        return re.sub(r"-(start|update|done)$", "", self.op)

    @property
    def op_name(self) -> str:
        """The path of JAX scopes that it came from; "" where the compiler kept none."""
        return self.attribute(r'\bop_name="([^"]*)"') or ""

    def attribute(self, pattern: str) -> str | None:
        """The first group of the first match of `pattern` in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    def dims_attribute(self, key: str) -> tuple[int, ...]:
        """The integers of `key={1,2}`; none where the key is absent."""
        return _ints(self.attribute(rf"\b{key}=\{{([\d,]*)\}}") or "")


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A name and its instructions by name, in the text's order."""

    name: str
    instructions: dict[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that `instruction`, one of this computation's, takes."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A parsed text: its computations by name, the entry's name, and the devices that one program runs over."""

    computations: dict[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """The module of a compiled text.

    Raises:
      ValueError: where the text has no ENTRY computation.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is not None and line.startswith(" "):
            if instruction := _instruction(line.strip(), current):
                current.instructions[instruction.name] = instruction
        elif opened := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line.rstrip()):
            current = computations[opened[2]] = Computation(opened[2], {})
            entry = opened[2] if opened[1] else entry
        elif line.startswith("}"):
            current = None
    if entry is None:
        raise ValueError(f"text of {len(text)} characters: no ENTRY computation; needs what Compiled.as_text() returns")
    header = text.partition("\n\n")[0]
    return Module(computations, entry, _count(header, "num_partitions") * _count(header, "replica_count"))


def _count(header: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", header)
    return int(found[1]) if found else 1


def _instruction(line: str, computation: Computation) -> Instruction | None:
    """The instruction of a line `[ROOT ]%name = type op(arguments), attributes`; None for any other line."""
    is_root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end_of_type = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    type_text, rest = rest[:end_of_type], rest[end_of_type:].strip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _closing(rest, opening)
    return Instruction(
        name=name.lstrip("%"),
        op=rest[:opening],
        type_text=type_text,
        argument_text=rest[opening + 1 : closing],
        attributes=rest[closing + 1 :],
        computation=computation.name,
        position=len(computation.instructions),
        is_root=is_root,
    )


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text) - 1


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
