"""The reader of compiled text: on small texts written by hand, whose figures are known, and on real compiled ones."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import moejax
from layouts import hlo
from layouts.hlo import flops, text


def block(name: str, *lines: str) -> str:
    """A computation of these lines; its signature is of no interest to the reader."""
    return "\n".join([f"%{name} (x: f32[]) -> f32[] {{", *(f"  {line}" for line in lines), "}"])


def entry(*lines: str) -> str:
    """The computation that a run starts with."""
    return f"ENTRY {block('main', *lines)}"


def module(*blocks: str) -> str:
    """A module for eight devices."""
    return "\n\n".join(["HloModule tested, is_scheduled=true, num_partitions=8", *blocks]) + "\n"


# Parsing


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        ("bf16[3,5]{1,0:T(8,128)(2,1)}", 30),
        ("f32[]", 4),
        ("pred[7]", 7),
        ("s4[3]", 2),
        ("f8e4m3fn[4]", 4),
        ("c64[2]", 16),
        ("f32[0,4]", 0),
        ("token[]", 0),
        ("(f32[2]{0}, (bf16[2]{0}, s32[]), u32[]{:S(2)})", 20),
    ],
)
def test_bytes_of_a_type(written, nbytes):
    parsed = hlo.parse(module(entry(f"ROOT %a = {written} parameter(0)")))
    assert parsed.computations["main"].instructions["a"].nbytes == nbytes


def test_parts_of_an_instruction():
    scopes = "jit(f)/transpose(jvp())/moe/experts/erd,edf->erf/dot(a)"
    parsed = hlo.parse(
        module(
            block("inner.1", "ROOT %p = f32[2]{0} parameter(0)"),
            entry(
                "%x.1 = f32[2]{0:T(128)} parameter(0)",
                "%y-z = (f32[2]{0}, f32[2]{0}) fusion(%x.1, /*index=1*/%x.1), kind=kLoop, calls=%inner.1, "
                f'control-predecessors={{%x.1}}, metadata={{op_name="{scopes}"}}',
                "ROOT %r = f32[2]{0} all-to-all-done(%y-z)",
            ),
        )
    )
    main = parsed.computations[parsed.entry]
    _, fusion, root = main
    assert (fusion.name, fusion.op, fusion.position, fusion.is_root) == ("y-z", "fusion", 1, False)
    assert fusion.operands == ("x.1", "x.1")
    assert fusion.predecessors == ("x.1",)
    assert fusion.called == ("inner.1",)
    assert fusion.op_name == scopes
    assert [array.dims for array in fusion.arrays] == [(2,), (2,)]
    assert (root.base_op, root.is_root) == ("all-to-all", True)
    assert main.operands(root) == [fusion]
    assert parsed.num_devices == 8


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="text of 5 characters: no ENTRY computation"):
        hlo.read("hello")


# Collectives

KINDS = {  # the line, payload and wire bytes, over groups of 4 of 8 devices
    "all-to-all": ("%c = f32[8,16]{1,0} all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}", 512, 384),
    "all-gather": ("%c = f32[32,16]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", 2048, 1536),
    "reduce-scatter": ("%c = f32[2,16]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], to_apply=%add", 512, 384),
    "all-reduce": ("%c = f32[8,16]{1,0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", 512, 768),
    "collective-permute": ("%c = f32[8,16]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}", 512, 512),
    "ragged-all-to-all": ("%c = f32[4,16]{1,0} ragged-all-to-all(%x, %y), replica_groups=[2,4]<=[8]", 256, 192),
}
ADD = block("add", "%a = f32[] parameter(0)", "%b = f32[] parameter(1)", "ROOT %s = f32[] add(%a, %b)")
INPUTS = ("%x = f32[8,16]{1,0} parameter(0)", "%y = f32[4,16]{1,0} parameter(1)", "%s = s32[4]{0} parameter(2)")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_each_collective(kind):
    line, payload, wire = KINDS[kind]
    program = hlo.read(module(ADD, entry(*INPUTS, line)))
    (found,) = program.collectives
    size = 8 if kind == "collective-permute" else 4
    assert found == hlo.Collective(kind, size, count=1, executed=1, payload_bytes=payload, wire_bytes=wire)
    assert program.of_kind(kind) == found
    assert program.wire_bytes == wire


@pytest.mark.parametrize(
    ("operands", "attributes", "payload"),
    [("%x, %y", "", 512 + 256), ("%x, %y, %s, %s", ", slice_sizes={{4,16}}", 512)],
)
def test_permutes_of_several_arrays(operands, attributes, payload):
    """Joined by the compiler; or one, with the buffer that it goes into and where."""
    line = f"%c = f32[8,16]{{1,0}} collective-permute({operands}), source_target_pairs={{{{0,1}},{{1,0}}}}{attributes}"
    found = hlo.read(module(entry(*INPUTS, line))).of_kind("collective-permute")
    assert (found.payload_bytes, found.wire_bytes) == (payload, payload)


def _step(first: str) -> str:
    config = f'"async_collective_fusion_config":{{"flag_start":"{first}","flag_end":"8"}}'
    return f"%g = f32[64,16]{{1,0}} all-gather(%x), dimensions={{0}}, backend_config={{{config}}}"


# A gather that begins, goes on beside a product, and ends, as TPUs write it; and a copy besides.
STEPS = module(
    block("begin", INPUTS[0], _step("-1"), "ROOT %c = f32[64,16]{1,0} custom-call(%g)"),
    block("beside", INPUTS[0], _step("2"), "ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}"),
    block("end", INPUTS[0], _step("2"), "ROOT %c = f32[64,16]{1,0} custom-call(%g)"),
    entry(
        INPUTS[0],
        "%async-collective-start.1 = f32[64,16]{1,0} fusion(%x), calls=%begin",
        "%fusion.7 = (f32[64,16]{1,0}, f32[8,8]{1,0}) fusion(%async-collective-start.1), calls=%beside",
        "%copy.1 = f32[8,16]{1,0} copy(%x)",
        "%part = f32[64,16]{1,0} get-tuple-element(%fusion.7), index=0",
        "ROOT %async-collective-done.1 = f32[64,16]{1,0} fusion(%part), calls=%end",
    ),
)


def test_a_collective_in_steps_is_one():
    assert hlo.read(STEPS).collectives == (hlo.Collective("all-gather", 8, 1, 1, 8 * 512, 7 * 512),)


def test_products_beside_a_collective_in_steps():
    parsed = hlo.parse(STEPS)
    (window,) = hlo.windows(parsed.computations["main"])
    assert window.kind == "async-collective"
    assert (window.start.name, window.done.name) == ("async-collective-start.1", "async-collective-done.1")
    assert [(i.name, hlo.works(parsed, i)) for i in window.between] == [("fusion.7", True), ("copy.1", False)]
    assert hlo.windows(parsed.computations["main"], "all-gather") == []


def test_asynchronous_collectives_count_once():
    wrapped = block("wrapped", INPUTS[0], "ROOT %a = f32[8,16]{1,0} all-to-all(%x)")
    program = hlo.read(
        module(
            wrapped,
            entry(
                *INPUTS,
                "%s1 = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-to-all-start(%x)",
                "%d1 = f32[8,16]{1,0} all-to-all-done(%s1)",
                "%s2 = ((f32[8,16]{1,0}), f32[8,16]{1,0}) async-start(%d1), calls=%wrapped",
                "%u2 = ((f32[8,16]{1,0}), f32[8,16]{1,0}) async-update(%s2), calls=%wrapped",
                "ROOT %d2 = f32[8,16]{1,0} async-done(%u2), calls=%wrapped",
            ),
        )
    )
    assert program.of_kind("all-to-all") == hlo.Collective("all-to-all", 8, 2, 2, 1024, 896)


def test_an_all_reduce_in_a_fused_reduce_scatter_is_one():
    fused = block("all-reduce-scatter.1", INPUTS[0], "ROOT %a = f32[8,16]{1,0} all-reduce(%x), to_apply=%add")
    call = "ROOT %f = f32[8,16]{1,0} fusion(%x), calls=%all-reduce-scatter.1"
    program = hlo.read(module(ADD, fused, entry(*INPUTS, call)))
    assert program.of_kind("reduce-scatter").wire_bytes == 512 * 7 // 8
    assert program.of_kind("all-reduce").count == 0


def test_group_sizes_are_kept_apart():
    lines = (KINDS["all-to-all"][0], "%e = f32[8,16]{1,0} all-to-all(%c), replica_groups={{0,1},{2,3},{4,5},{6,7}}")
    program = hlo.read(module(entry(*INPUTS, *lines)))
    assert [(found.group_size, found.wire_bytes) for found in program.collectives] == [(2, 256), (4, 384)]
    assert program.of_kind("all-to-all") == hlo.Collective("all-to-all", 4, 2, 2, 1024, 640)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['a'=4,'b'=2] {'a'}", 4),
        ("mesh['a'=4,'b'=2] {'a','b'}", 8),
        ("mesh['a'=4,'b'=2] {'b','a':(1)2}", 4),
        ("{}", 8),
    ],
)
def test_group_sizes(groups, size):
    line = f"%c = f32[8,16]{{1,0}} all-to-all(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert hlo.read(module(entry(*INPUTS, line))).of_kind("all-to-all").group_size == size


def test_unknown_kind_of_collective():
    with pytest.raises(ValueError, match="collective 'alltoall': legal kinds are all-to-all, "):
        hlo.read(module(entry(*INPUTS))).of_kind("alltoall")


# Loops

STATE = "(s32[], f32[8,16]{1,0})"
CARRY = (
    f"%s = {STATE} parameter(0)",
    "%i = s32[] get-tuple-element(%s), index=0",
    "%x = f32[8,16]{1,0} get-tuple-element(%s), index=1",
)
TURN = "%c = f32[8,16]{1,0} all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}"
BODY = block("body", *CARRY, TURN, f"ROOT %t = {STATE} tuple(%i, %c)")


def condition(bound: str) -> str:
    return block("condition", *CARRY, bound, "ROOT %less = pred[] compare(%i, %n), direction=LT")


def loop(body: str = "body", trips: int | None = None) -> str:
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}},"estimated_cycles":"999"}}' if trips else ""
    return f"ROOT %w = {STATE} while(%s), condition=%condition, body=%{body}{known}"


@pytest.mark.parametrize(
    ("bound", "recorded", "trips"),
    [
        ("%n = s32[] constant(5)", 6, 6),
        ("%n = s32[] constant(5)", None, 5),
        ("%n = s32[] get-tuple-element(%s), index=0", None, None),
        ("%n = s32[] constant(-1)", None, None),
    ],
)
def test_trip_counts(bound, recorded, trips):
    program = hlo.read(module(BODY, condition(bound), entry(*CARRY, loop(trips=recorded))))
    assert program.loops == (trips,)
    found = program.of_kind("all-to-all")
    assert (found.count, found.executed, found.wire_bytes) == (1, trips or 1, 384 * (trips or 1))
    told = hlo.read(module(BODY, condition(bound), entry(*CARRY, loop(trips=recorded))), unknown_turns=7)
    assert told.of_kind("all-to-all").executed == (trips or 7)


def test_loops_in_loops_multiply():
    outer = block("outer", *CARRY, loop(trips=3))
    top = entry(*CARRY, loop("outer", trips=4))
    program = hlo.read(module(BODY, condition("%n = s32[] constant(5)"), outer, top))
    assert program.loops == (4, 3)
    assert program.of_kind("all-to-all").executed == 12


def test_every_branch_counts():
    branches = [
        block(f"branch{n}", INPUTS[0], f"ROOT %a = f32[8,16]{{1,0}} {op}(%x)")
        for n, op in enumerate(("all-to-all", "collective-permute"))
    ]
    line = "ROOT %r = f32[8,16]{1,0} conditional(%s, %x, %x), branch_computations={%branch0, %branch1}"
    program = hlo.read(module(*branches, entry(*INPUTS, line)))
    assert [found.kind for found in program.collectives] == ["all-to-all", "collective-permute"]
    assert program.conditionals == 1


# Products


def test_dots_in_fusions_in_loops():
    dot = (
        "ROOT %d = f32[4,8,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    operands = ("%a = bf16[4,8,16]{2,1,0} parameter(0)", "%b = bf16[4,16,32]{2,1,0} parameter(1)")
    fusion = "%f = f32[4,8,32]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%fused"
    body = block("body", *operands, fusion, f"ROOT %t = {STATE} tuple(%a, %b)")
    program = hlo.read(module(block("fused", *operands, dot), body, entry(*CARRY, loop(trips=3))))
    assert program.dot_flops == 3 * 2 * 4 * 8 * 16 * 32


def test_library_products():
    line = (
        '%c = (bf16[8,32]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    program = hlo.read(module(entry("%x = bf16[8,16]{1,0} parameter(0)", "%w = bf16[16,32]{1,0} parameter(1)", line)))
    assert program.dot_flops == 2 * 8 * 16 * 32
    assert program.custom_calls == {"__cublas$gemm": 1}


def reads(num_in, num_kernel, num_out, stride, lhs_dilate, rhs_dilate, pad):
    """By definition: the (output, kernel) places that read one of the input's own elements, once dilated and padded."""
    dilated = [index % lhs_dilate == 0 for index in range((num_in - 1) * lhs_dilate + 1)]
    padded = [False] * 64 + dilated + [False] * 64
    return sum(padded[64 + o * stride + k * rhs_dilate - pad] for o in range(num_out) for k in range(num_kernel))


def convolution(num_in, num_kernel, num_out, stride, lhs_dilate, rhs_dilate, pad):
    size = f"size={num_kernel} stride={stride} pad={pad}_0 lhs_dilate={lhs_dilate} rhs_dilate={rhs_dilate}"
    window = f"window={{{size}}}, dim_labels=0bf_0io->0bf"
    return module(
        entry(
            f"%x = bf16[{num_in},10,20]{{2,1,0}} parameter(0)",
            f"%w = bf16[{num_kernel},20,30]{{2,1,0}} parameter(1)",
            f"ROOT %c = f32[{num_out},10,30]{{2,1,0}} convolution(%x, %w), {window}",
        )
    )


def test_convolutions_count_real_elements_only():
    for axis in itertools.product((1, 5), (1, 3), (1, 4), (1, 2), (1, 3), (1, 2), (-1, 0, 2)):
        assert hlo.read(convolution(*axis)).dot_flops == 2 * 10 * 20 * 30 * reads(*axis), axis


def test_a_batched_product_as_tpus_write_it():
    line = "ROOT %c = f32[2,160,256]{2,1,0} convolution(%x, %w), window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf"
    inputs = ("%x = f32[2,160,128]{2,1,0} parameter(0)", "%w = f32[2,128,256]{2,1,0} parameter(1)")
    assert hlo.read(module(entry(*inputs, line))).dot_flops == 2 * 2 * 160 * 128 * 256


def test_axes_of_a_window_follow_their_labels():
    """A product summed over the second of two spatial axes, which the operands hold in the other order."""
    window = "window={size=8x4 stride=7x1 lhs_dilate=8x1}, dim_labels=10fb_0o1i->0bf1"
    inputs = ("%x = bf16[4,8,640,1024]{3,2,1,0} parameter(0)", "%g = bf16[8,2048,4,640]{3,2,1,0} parameter(1)")
    program = hlo.read(module(entry(*inputs, f"ROOT %c = bf16[8,1024,2048,1]{{3,2,1,0}} convolution(%x, %g), {window}")))
    assert program.dot_flops == 2 * 8 * (4 * 640) * 1024 * 2048


KERNEL = (
    '%k = bf16[64,32]{1,0} custom-call(%rows, %w, %sizes), custom_call_target="tpu_custom_call", '
    'backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"1000","bytes_accessed":"10"}}}'
)
KERNEL_INPUTS = (
    "%rows = bf16[64,16]{1,0} parameter(0)",
    "%w = bf16[4,16,32]{2,1,0} parameter(1)",
    "%sizes = s32[4]{0} parameter(2)",
)


def test_kernels_state_their_flops_and_have_a_bound():
    program = hlo.read(module(entry(*KERNEL_INPUTS, KERNEL)))
    assert (program.kernel_flops, program.kernel_flops_bound, program.dot_flops) == (1000, 2 * 64 * 16 * 32, 0)


def test_bound_of_a_weight_gradient_kernel():
    line = '%k = bf16[4,16,32]{2,1,0} custom-call(%rows, %g, %sizes), custom_call_target="tpu_custom_call"'
    program = hlo.read(module(entry(*KERNEL_INPUTS, "%g = bf16[64,32]{1,0} parameter(3)", line)))
    assert (program.kernel_flops, program.kernel_flops_bound) == (0, 2 * 64 * 16 * 32)


# Cycles and bytes


def costed(cycles: int) -> str:
    return f'backend_config={{"estimated_cycles":"{cycles}","iteration_bounds":["4"]}}'


def test_cycles():
    inner = block("inner", INPUTS[0], f"ROOT %r = f32[8]{{0}} copy(%x), {costed(10**6)}")
    in_loop = f"%b = f32[8,16]{{1,0}} copy(%x), {costed(10)}"
    scopes = 'metadata={op_name="jit(f)/transpose(jvp())/moe/experts/ef->e/dot"}'
    top = entry(
        *CARRY,
        f"%f = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%inner, {scopes}, {costed(7)}",
        f"%n = f32[8]{{0}} copy(%f), {costed(10**14 + 1)}",
        f"%s1 = (f32[8]{{0}}, f32[8]{{0}}, u32[]) copy-start(%f), {costed(100)}",
        "%d1 = f32[8]{0} copy-done(%s1)",
        loop(trips=5),
    )
    program = hlo.read(module(inner, block("body", *CARRY, in_loop, f"ROOT %t = {STATE} tuple(%i, %b)"), top))
    assert (program.cycles, program.cycles_in_loops, program.cycles_async) == (57, 50, 100)
    assert program.cycles_by_scope == {"": 50, "~moe/experts": 7}


def test_moved_bytes_leave_out_names_transfers_and_updates_in_place():
    program = hlo.read(
        module(
            entry(
                *INPUTS,
                "%b = f32[128]{0} bitcast(%x)",
                "%c = f32[128]{0} copy(%b)",
                "%a = f32[8,16]{1,0} all-to-all(%x)",
                "%u = f32[8,16]{1,0} fusion(%a, %y), kind=kLoop, calls=%none, backend_config={}",
                "%dynamic-update-slice_fusion.3 = f32[8,16]{1,0} fusion(%a, %y), kind=kLoop, calls=%none",
                "ROOT %t = (f32[8,16]{1,0}, f32[128]{0}) tuple(%u, %c)",
            )
        )
    )
    assert program.moved_bytes == (512 + 512) + (512 + 512 + 256)


def test_row_moves():
    program = hlo.read(
        module(
            entry(
                *INPUTS,
                "%o = (s32[32]{0}, s32[32]{0}) sort(%s, %s), dimensions={0}, to_apply=%less",
                "%g = f32[4,16]{1,0} gather(%x, %s), offset_dims={1}",
                "%gather_fusion = f32[4,16]{1,0} fusion(%x, %s), kind=kCustom, calls=%none",
                f"%gather_fusion.2 = f32[4,16]{{1,0}} fusion(%x, %s), kind=kCustom, calls=%none, {costed(5)}",
                "%c = f32[8,16]{1,0} scatter(%x, %s, %y), to_apply=%add",
                "%scatter_fusion = f32[8,16]{1,0} fusion(%x, %s), kind=kInput, calls=%none",
            )
        )
    )
    assert (program.sorts, program.sort_keys, program.gathers, program.scatters) == (1, 32, 1, 1)
    assert (program.uncosted_gather_bytes, program.uncosted_scatter_bytes) == (512, 1024)


# Flow

FLOW = module(
    block("body", *CARRY, TURN + ', metadata={op_name="jit(f)/moe/dispatch/a"}', f"ROOT %t = {STATE} tuple(%i, %c)"),
    condition("%n = s32[] constant(2)"),
    entry(
        *CARRY,
        "%start = ((f32[8,16]{1,0}), f32[8,16]{1,0}) all-to-all-start(%x)",
        '%work = f32[8,16]{1,0} copy(%x), metadata={op_name="jit(f)/moe/experts/silu/mul"}',
        "%name = f32[128]{0} bitcast(%work)",
        "%done = f32[8,16]{1,0} all-to-all-done(%start)",
        "%late = f32[8,16]{1,0} copy(%x), control-predecessors={%done}",
        loop(),
    ),
)


def test_what_depends_on_what():
    main = hlo.parse(FLOW).computations["main"]
    at = main.instructions
    assert hlo.depends(main, at["done"], at["x"])
    assert not hlo.depends(main, at["done"], at["work"])
    assert hlo.depends(main, at["late"], at["start"])  # through control alone
    assert not hlo.depends(main, at["x"], at["x"])
    assert hlo.depends(main, at["name"], [at["done"], at["work"]])
    assert not hlo.depends(main, at["name"], [])


def test_dependence_across_computations_is_refused():
    parsed = hlo.parse(FLOW)
    inner = parsed.computations["body"].instructions["c"]
    with pytest.raises(ValueError, match="'c' is of computation 'body', not 'main'"):
        hlo.depends(parsed.computations["main"], inner, [])


def test_carriers_look_inside():
    parsed = hlo.parse(FLOW)
    main = parsed.computations["main"]
    assert [found.name for found in hlo.carriers(parsed, main, op="all-to-all")] == ["start", "done", "w"]
    assert [found.name for found in hlo.carriers(parsed, main, within="moe/dispatch")] == ["w"]
    assert [found.name for found in hlo.carriers(parsed, main, within="moe/experts")] == ["work"]
    assert hlo.carriers(parsed, main, within="moe/exp") == []
    assert hlo.carriers(parsed, main, within="moe/experts", op="all-to-all") == []


def test_windows():
    (found,) = hlo.windows(hlo.parse(FLOW).computations["main"], "all-to-all")
    assert (found.start.name, found.done.name, [i.name for i in found.between]) == ("start", "done", ["work"])
    assert hlo.windows(hlo.parse(FLOW).computations["main"], "copy") == []


# Memory


def names(found: hlo.Peak) -> list[str]:
    return [instruction.name for instruction, _ in found.buffers]


def test_peak_of_a_chain():
    parsed = hlo.parse(
        module(
            entry(
                "%x = f32[256]{0} parameter(0)",
                "%a = f32[128]{0} slice(%x), slice={[0:128]}",
                "%name = f32[2,64]{1,0} bitcast(%a)",
                "%b = f32[64,2]{1,0} transpose(%name), dimensions={1,0}",
                "%c = f32[512]{0} broadcast(%b), dimensions={0,1}",
                "ROOT %r = f32[4]{0} slice(%c), slice={[0:4]}",
            )
        )
    )
    found = hlo.peak(parsed)
    assert (found.nbytes, found.at.name, names(found)) == (2048 + 512, "c", ["c", "b"])


@pytest.mark.parametrize(("op", "nbytes"), [("exponential(%a)", 512), ("reverse(%a), dimensions={0}", 1024)])
def test_what_works_element_by_element_writes_over_its_operand(op, nbytes):
    fused = block("fused", "%a = f32[128]{0} parameter(0)", f"%b = f32[128]{{0}} {op}", "ROOT %c = f32[128]{0} negate(%b)")
    lines = ("%x = f32[] parameter(0)", "%a = f32[128]{0} broadcast(%x), dimensions={}")
    fusion = "%f = f32[128]{0} fusion(%a), kind=kLoop, calls=%fused"
    assert hlo.peak(hlo.parse(module(fused, entry(*lines, f"ROOT {fusion}")))).nbytes == nbytes
    used_again = "ROOT %r = f32[128]{0} add(%f, %a)"
    assert hlo.peak(hlo.parse(module(fused, entry(*lines, fusion, used_again)))).nbytes == 1024


def test_peak_leaves_out_vector_memory_and_repeated_operands():
    parsed = hlo.parse(
        module(
            entry(
                "%x = f32[128]{0} parameter(0)",
                "%s = (f32[128]{0:T(128)S(1)}, f32[128]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)",
                "%d = f32[128]{0:T(128)S(1)} copy-done(%s)",
                "%t = ((f32[128]{0}), f32[128]{0}) all-to-all-start(%d)",
                "%e = f32[128]{0} all-to-all-done(%t)",
                "%u = f32[128]{0} all-reduce-start(%e), to_apply=%add",
                "ROOT %v = f32[128]{0} all-reduce-done(%u)",
            )
        )
    )
    found = hlo.peak(parsed)
    assert (found.nbytes, names(found)) == (1024, ["t", "u"])


def test_a_part_of_a_tuple_keeps_no_other_part_alive():
    parsed = hlo.parse(
        module(
            entry(
                "%x = f32[] parameter(0)",
                '%f = (f32[256]{0}, f32[8]{0}) custom-call(%x), custom_call_target="two"',
                "%big = f32[256]{0} get-tuple-element(%f), index=0",
                "%small = f32[8]{0} get-tuple-element(%f), index=1",
                "%both = (f32[256]{0}, f32[8]{0}) tuple(%big, %small)",
                "%r = f32[] slice(%big), slice={[0:1]}",
                "%late = f32[8]{0} get-tuple-element(%both), index=1",
                "%other = f32[128]{0} broadcast(%r), dimensions={}",
                "ROOT %end = f32[] add(%late, %other)",
            )
        )
    )
    assert hlo.peak(parsed).at.name == "r"
    assert hlo.peak(parsed).nbytes == 1024 + 32 + 4


def test_peak_of_a_loop_stands_on_what_surrounds_it():
    turn = ("%big = f32[1024]{0} broadcast(%i), dimensions={}", "%c = f32[8,16]{1,0} negate(%x)")
    body = block("body", *CARRY, *turn, f"ROOT %t = {STATE} tuple(%i, %c)")
    around = ("%k = f32[256]{0} broadcast(%i), dimensions={}", loop(trips=2).removeprefix("ROOT "))
    parsed = hlo.parse(module(body, condition("%n = s32[] constant(2)"), entry(*CARRY, *around, "ROOT %r = f32[] add(%k, %w)")))
    found = hlo.peak(parsed)
    assert (found.nbytes, names(found)[:2]) == (4096 + 1024, ["big", "k"])


# Real texts, from this machine's compiler

TRIPS, ROWS, WIDTH = 6, 16, 32


def compiled_scan():
    """A scan of TRIPS turns, each an all-to-all of [ROWS, WIDTH] float32 a device and a product by [WIDTH, WIDTH]."""
    mesh = moejax.make_mesh(expert=8)

    def turn(x, w):
        with jax.named_scope("moe/dispatch"):
            x = lax.all_to_all(x, "expert", 0, 0, tiled=True)
        with jax.named_scope("moe/experts"):
            return jnp.tanh(x @ w), None

    def run(x, ws):
        return lax.scan(turn, x, ws)[0]

    with jax.set_mesh(mesh):
        fn = jax.jit(jax.shard_map(run, in_specs=(P("expert"), P()), out_specs=P("expert")))
        shapes = (jnp.zeros((8 * ROWS, WIDTH)), jnp.zeros((TRIPS, WIDTH, WIDTH)))
        return fn.lower(*shapes).compile().as_text()


def test_a_compiled_scan():
    compiled = compiled_scan()
    program = hlo.read(compiled)
    payload = TRIPS * ROWS * WIDTH * 4
    assert program.of_kind("all-to-all") == hlo.Collective("all-to-all", 8, 1, TRIPS, payload, payload * 7 // 8)
    assert program.dot_flops == TRIPS * 2 * ROWS * WIDTH * WIDTH
    assert program.loops == (TRIPS,)
    parsed = hlo.parse(compiled)
    (exchange,) = [i for c in parsed.computations.values() for i in c if i.op == "all-to-all"]
    body = parsed.computations[exchange.computation]
    experts = hlo.carriers(parsed, body, op="dot")
    assert all(hlo.depends(body, product, exchange) for product in experts)
    assert not hlo.depends(body, exchange, experts)


def test_a_compiled_layer():
    cfg = moejax.MoEConfig(d_model=16, d_ff=32, num_experts=8, top_k=2, dtype="float32")
    mesh = moejax.make_mesh(expert=8)
    shapes = {name: shape for name, (shape, _) in moejax.layer.param_shapes(cfg).items()}
    x = jax.ShapeDtypeStruct((8, 32, 16), jnp.float32)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def run(params, x):
        return moejax.layer.moe(params, x, None, None, cfg=cfg)[0]

    with jax.set_mesh(mesh):
        program = hlo.read(jax.jit(run).lower(params, x).compile().as_text())
    rows = cfg.cell_rows(32) * 8  # sent by one device: a cell for each of 8 experts
    assert program.of_kind("all-to-all") == hlo.Collective("all-to-all", 8, 2, 2, 2 * rows * 64, 2 * rows * 64 * 7 // 8)
    assert program.dot_flops == 3 * 2 * rows * 16 * 32 + 2 * 32 * 16 * 8  # experts; router
    assert (program.sorts, program.scatters) == (2, 0)  # those of the plan


def test_peak_against_the_compiler():
    """Not far off: what is alive at once, against the room that the compiler laid out."""
    for size in (1, 4):
        mesh = moejax.make_mesh(data=1)
        x = jax.ShapeDtypeStruct((size * 64, 128), jnp.float32)

        def loss(w, x):
            return jnp.square(jnp.tanh(jnp.tanh(x @ w) @ w.T)).sum()

        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss)).lower(jax.ShapeDtypeStruct((128, 512), jnp.float32), x).compile()
        memory = compiled.memory_analysis()
        room = memory.temp_size_in_bytes + memory.output_size_in_bytes
        assert 0.75 * room <= hlo.peak(hlo.parse(compiled.as_text())).nbytes <= 1.05 * room


def test_module_walks_reach_the_same_instructions_as_the_text():
    """Each all-to-all that stands in the text is counted, and no other."""
    compiled = compiled_scan()
    standing = [i for c in text.parse(compiled).computations.values() for i in c if i.base_op in hlo.COLLECTIVES]
    assert sum(found.count for found in hlo.read(compiled).collectives) == len(standing)
    assert flops.call_target(standing[0]) is None
