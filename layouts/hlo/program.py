"""Program: what one device does in one run of a compiled text, counted."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from layouts.hlo import flops
from layouts.hlo.text import Computation, Instruction, Module, parse

COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "collective-broadcast",
)
# No work of their own: names for buffers, and calls whose bodies are counted instead.
NAMES = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all")
FREE = frozenset([*NAMES, "while", "call", "conditional", "async-start"])
# Calls through which the compiler only speaks to itself.
BOOKKEEPING = ("AllocateBuffer", "Sharding", "ConcatBitcast", "SPMDFullToShardShape", "SPMDShardToFullShape")
# The keys under which an op calls the computations that are its work.
ENTERED = {
    "while": "body",
    "conditional": "branch_computations|true_computation|false_computation",
    "fusion": "calls",
    "call": "to_apply|calls",
    "async-start": "calls",
    "custom-call": "called_computations|calls",
}
# A few TPU instructions carry a nonsense estimate, above 1e14.
MAX_CYCLES = 10**13
# Parts of an op_name that JAX adds to a program's own scopes: transformations, control flow, an einsum's letters.
WRAPPERS = re.compile(
    r"(jit|pjit|jvp|transpose|vmap|shard_map|while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|remat\w*)(\(.*\))?|.*->.*"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size.

    Attributes:
      kind: e.g. "all-to-all". An all-reduce inside a fused reduce-scatter counts as a reduce-scatter.
      group_size: devices that exchange with each other.
      count: instructions in the text.
      executed: runs, loops multiplied out.
      payload_bytes: bytes of the buffers that it works on in all runs (gathered size for an all-gather).
      wire_bytes: bytes that one device sends in all runs: payload * (n-1)/n, twice that for an all-reduce, the payload
        for a permute.
    """

    kind: str
    group_size: int
    count: int
    executed: int
    payload_bytes: int
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """Figures of one device over one run; loop bodies times their trip counts, every branch of a conditional counted.

    Where `loops` has a None, the figures hold for the number of turns that `read` was told, by default one.

    Attributes:
      collectives: one entry a kind and group size.
      dot_flops: of matrix products: dots, convolutions, library calls.
      kernel_flops: what kernel calls state in their cost estimates.
      kernel_flops_bound: kernel calls taken for grouped products over all their rows.
      cycles: the TPU compiler's estimates, collectives and kernel calls not included; 0 on other targets.
      cycles_async: estimates of asynchronous starts, not part of `cycles`.
      cycles_in_loops: the part of `cycles` inside loops of more than one turn.
      cycles_by_scope: `cycles` by JAX scope, "~" before those of a backward pass; largest first.
      moved_bytes: operands and results of every scheduled instruction but collectives and in-place slice updates; on
        TPU those in vector memory too. An operand of which a fusion reads a slice counts whole, in every turn of a loop.
      uncosted_gather_bytes: twice the results of gather fusions that have no cycle estimate.
      uncosted_scatter_bytes: the same of scatter fusions.
      sorts, scatters, gathers, top_ks: instructions in the text, fusions entered.
      sort_keys: elements sorted in all runs.
      loops: each loop's trip count, None where the text does not tell.
      conditionals: how many there are.
      custom_calls: instructions by target.
    """

    collectives: tuple[Collective, ...]
    dot_flops: int
    kernel_flops: int
    kernel_flops_bound: int
    cycles: int
    cycles_async: int
    cycles_in_loops: int
    cycles_by_scope: Mapping[str, int]
    moved_bytes: int
    uncosted_gather_bytes: int
    uncosted_scatter_bytes: int
    sorts: int
    scatters: int
    gathers: int
    top_ks: int
    sort_keys: int
    loops: tuple[int | None, ...]
    conditionals: int
    custom_calls: Mapping[str, int]

    def of_kind(self, kind: str) -> Collective:
        """All collectives of one kind, added up; group_size is the largest, 0 where there are none.

        Raises:
          ValueError: for an unknown kind.
        """
        if kind not in COLLECTIVES:
            raise ValueError(f"collective {kind!r}: legal kinds are {', '.join(COLLECTIVES)}")
        found = [collective for collective in self.collectives if collective.kind == kind]
        fields = ("count", "executed", "payload_bytes", "wire_bytes")
        sums = {field: sum(getattr(collective, field) for collective in found) for field in fields}
        return Collective(kind, max((collective.group_size for collective in found), default=0), **sums)

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in all collectives."""
        return sum(collective.wire_bytes for collective in self.collectives)


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction as the walk meets it: how often it runs, whether in a fusion, whether in a reduce-scatter's."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool
    in_reduce_scatter: bool


def read(text: str, unknown_turns: int = 1) -> Program:
    """The figures of a compiled text.

    Args:
      text: what `Compiled.as_text()` returns.
      unknown_turns: turns to count for loops whose trip count the text does not tell (`Program.loops`), such as those
        that end when the data say so.

    Raises:
      ValueError: where the text is not a compiled module.
    """
    return count(parse(text), unknown_turns)


def walk(module: Module, unknown_turns: int = 1) -> Iterator[Visit]:
    """Every instruction that runs, from the entry through loops, branches, calls and fusions; no "-done" halves."""

    def enter(name: str, times: int, fused: bool, scattered: bool) -> Iterator[Visit]:
        computation = module.computations[name]
        for instruction in computation:
            if instruction.op.endswith(("-done", "-update")):
                continue
            yield Visit(instruction, computation, times, fused, scattered)
            turns = (trip_count(instruction, module) or unknown_turns) if instruction.op == "while" else 1
            within = fused or instruction.op == "fusion"
            for called in _entered(instruction, module):
                named_so = "reduce-scatter" in called or "reduce-scatter" in instruction.name
                yield from enter(called, times * turns, within, scattered or named_so)

    return enter(module.entry, 1, False, False)


def _entered(instruction: Instruction, module: Module) -> list[str]:
    """The computations whose instructions are work of their own: not reducers, comparators, loop conditions."""
    keys = ENTERED.get(instruction.op)
    if keys is None:
        return []
    groups = re.findall(rf"\b(?:{keys})=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    names = [name for group in groups for name in re.findall(r"%([\w.\-]+)", group)]
    return [name for name in names if name in module.computations]


def trip_count(loop: Instruction, module: Module) -> int | None:
    """Turns of a while loop: what the compiler recorded, or the one bound in its condition (from 0 up), or None."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"?(\d+)'):
        return int(known)
    condition = module.computations.get(loop.attribute(r"\bcondition=%([\w.\-]+)") or "")
    if condition is None:
        return None
    bounds = [i for i in condition if i.op == "constant" and i.type_text.startswith("s32[]")]
    if len(bounds) != 1 or not bounds[0].argument_text.isdigit():
        return None
    return int(bounds[0].argument_text) or None


def count(module: Module, unknown_turns: int = 1) -> Program:
    """The figures of a parsed module; see `read`."""
    visits = list(walk(module, unknown_turns))
    scheduled = [visit for visit in visits if not visit.fused]
    plain = [(visit, cycles) for visit in scheduled if (cycles := _cycles(visit)) and not _is_start(visit)]
    loops = [visit.instruction for visit in visits if visit.instruction.op == "while"]
    targets = [target for visit in visits if (target := flops.call_target(visit.instruction))]
    return Program(
        collectives=_collectives(visits, module.num_devices),
        dot_flops=_total(visits, lambda v: flops.product_flops(v.instruction, v.computation)),
        kernel_flops=_total(visits, lambda v: flops.declared_kernel_flops(v.instruction)),
        kernel_flops_bound=_total(visits, lambda v: flops.kernel_flops_bound(v.instruction, v.computation)),
        cycles=sum(cycles for _, cycles in plain),
        cycles_async=sum(_cycles(visit) for visit in scheduled if _is_start(visit)),
        cycles_in_loops=sum(cycles for visit, cycles in plain if visit.times > 1),
        cycles_by_scope=_by_scope(plain),
        moved_bytes=_total(scheduled, _moved_bytes),
        uncosted_gather_bytes=_total(scheduled, lambda v: _uncosted_bytes(v.instruction, "gather", "all-gather")),
        uncosted_scatter_bytes=_total(scheduled, lambda v: _uncosted_bytes(v.instruction, "scatter", "reduce-scatter")),
        **_row_moves(visits),
        sort_keys=_total(visits, _sort_keys),
        loops=tuple(trip_count(loop, module) for loop in loops),
        conditionals=sum(visit.instruction.op == "conditional" for visit in visits),
        custom_calls=collections.Counter(target for target in targets if target not in BOOKKEEPING),
    )


def _total(visits: Iterable[Visit], figure: Callable[[Visit], int]) -> int:
    return sum(figure(visit) * visit.times for visit in visits)


def _is_start(visit: Visit) -> bool:
    return visit.instruction.op.endswith("-start")


def _cycles(visit: Visit) -> int:
    """Estimated cycles over all runs; 0 where there is no estimate, or a loop whose body is counted instead."""
    found = visit.instruction.attribute(r'"estimated_cycles":"(\d+)"')
    if not found or int(found) >= MAX_CYCLES or visit.instruction.op == "while":
        return 0
    return int(found) * visit.times


def _by_scope(plain: Iterable[tuple[Visit, int]]) -> dict[str, int]:
    cycles: collections.Counter[str] = collections.Counter()
    for visit, figure in plain:
        cycles[scope(visit.instruction)] += figure
    return dict(cycles.most_common())


def scope(instruction: Instruction) -> str:
    """The program's own named scopes around an instruction, "~" before those of a backward pass: "~moe/experts", ""."""
    *path, _ = instruction.op_name.split("/")
    own = "/".join(part for part in path if not WRAPPERS.fullmatch(part))
    return f"~{own}" if "transpose(" in instruction.op_name else own


def _moved_bytes(visit: Visit) -> int:
    """Operands and results of one run. A slice update in place is left out: its operand is the whole buffer."""
    instruction = visit.instruction
    in_place = instruction.op == "fusion" and re.search("dynamic[-_]update[-_]slice", instruction.name)
    if instruction.op in FREE or instruction.base_op in COLLECTIVES or in_place:
        return 0
    return instruction.nbytes + sum(operand.nbytes for operand in visit.computation.operands(instruction))


def _uncosted_bytes(instruction: Instruction, kind: str, unlike: str) -> int:
    costed = instruction.op != "fusion" or '"estimated_cycles"' in instruction.attributes
    return 0 if costed or kind not in instruction.name or unlike in instruction.name else 2 * instruction.nbytes


def _row_moves(visits: Iterable[Visit]) -> dict[str, int]:
    ops = collections.Counter(visit.instruction.base_op for visit in visits)
    gathers = ops["gather"] + ops["dynamic-gather"]
    return {"sorts": ops["sort"], "scatters": ops["scatter"], "gathers": gathers, "top_ks": ops["topk"]}


def _sort_keys(visit: Visit) -> int:
    return math.prod(visit.instruction.arrays[0].dims) if visit.instruction.base_op == "sort" else 0


def _collectives(visits: Iterable[Visit], num_devices: int) -> tuple[Collective, ...]:
    sums: dict[tuple[str, int], list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    for visit in visits:
        kind = visit.instruction.base_op
        if kind not in COLLECTIVES or continues(visit.instruction):
            continue
        if visit.in_reduce_scatter and kind == "all-reduce":
            kind = "reduce-scatter"
        size = group_size(visit.instruction, num_devices)
        operand_bytes = [operand.nbytes for operand in visit.computation.operands(visit.instruction)]
        if "slice_sizes=" in visit.instruction.attributes:  # a permute into a buffer that comes as an operand, as offsets do
            operand_bytes = operand_bytes[:1]
        payload, wire = _traffic(kind, operand_bytes, size)
        for place, figure in enumerate((1, visit.times, payload * visit.times, wire * visit.times)):
            sums[kind, size][place] += figure
    return tuple(Collective(kind, size, *figures) for (kind, size), figures in sorted(sums.items()))


def continues(collective: Instruction) -> bool:
    """Whether it stands for a further step of one that has begun: TPUs fuse one collective's steps with several products."""
    started = collective.attribute(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"')
    return started not in (None, "-1")


def _traffic(kind: str, operand_bytes: list[int], size: int) -> tuple[int, int]:
    """(payload, wire) bytes of one run on one device."""
    payload = sum(operand_bytes)
    if kind == "collective-permute":
        return payload, payload
    if kind == "ragged-all-to-all":  # the result's buffer comes as an operand too; no more than the smaller can move
        payload = min(operand_bytes[:2])
    if kind == "all-gather":
        payload *= size
    passes = 2 if kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
    return payload, passes * payload * (size - 1) // size


def group_size(collective: Instruction, num_devices: int) -> int:
    """Devices in one replica group; all of them where no groups are stated.

    Groups are written {{0,1},{2,3}}, [groups,size]<=[n], or by mesh axes: mesh['a'=4,'b'=2] {'a'}, where 'b':(1)2 is a
    part of an axis, of size 2.
    """
    if listed := collective.attribute(r"replica_groups=\{\{([\d,]+)\}"):
        return len(listed.split(","))
    if iota := collective.attribute(r"replica_groups=\[\d+,(\d+)\]"):
        return int(iota)
    over_axes = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", collective.attributes)
    if over_axes is None:
        return num_devices
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", over_axes[1]))
    named = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", over_axes[2])
    return math.prod(int(part or sizes[axis]) for axis, part in named)
