"""FLOPs of one instruction, from its shapes alone: 2 per multiply-add, only those that touch real elements."""

import json
import math
import re

from layouts.hlo.text import Computation, Instruction

# Library calls that are matrix products, and calls that run a kernel of the program's own.
PRODUCT_CALLS = re.compile(r"cublas|cudnn\$")
KERNEL_CALLS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")


def product_flops(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of a dot, a convolution or a library's matrix product; 0 for any other instruction."""
    if instruction.op == "dot":
        return _dot(instruction, computation, instruction.dims_attribute("lhs_contracting_dims"))
    if instruction.op == "convolution":
        return _convolution(instruction, computation)
    if PRODUCT_CALLS.search(call_target(instruction) or ""):
        return _dot(instruction, computation, _library_contraction(instruction, computation))
    return 0


def call_target(instruction: Instruction) -> str | None:
    """The target of a custom call; None for any other instruction."""
    if instruction.base_op != "custom-call":
        return None
    return instruction.attribute(r'custom_call_target="([^"]*)"') or "?"


def kernel_flops_bound(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of a kernel call taken for a grouped matrix product in which every row of its buffers counts; else 0.

    A kernel that skips rows does less, and one that does several products in one call does more: read
    `declared_kernel_flops` beside it.
    """
    if call_target(instruction) not in KERNEL_CALLS:
        return 0
    results = _float_shapes(instruction)[:1]
    shapes = [shape for operand in computation.operands(instruction) for shape in _float_shapes(operand)[:1]]
    stacks = [shape for shape in shapes if len(shape) == 3]
    rows = [shape for shape in shapes if len(shape) == 2]
    if not results:
        return 0
    (result,) = results
    if len(result) == 2 and stacks and rows and result[1] in stacks[0][1:]:
        return 2 * result[0] * stacks[0][1] * stacks[0][2]
    if len(result) == 3 and len(rows) >= 2:
        return _segment_sum(result, rows[:2])
    return 0


def declared_kernel_flops(instruction: Instruction) -> int:
    """The FLOPs that a kernel call states in its cost estimate; 0 where it states none."""
    if call_target(instruction) not in KERNEL_CALLS:
        return 0
    found = instruction.attribute(r'"cost_estimate":(\{[^}]*\})')
    return int(float(json.loads(found).get("flops", 0))) if found else 0


def _segment_sum(result: tuple[int, ...], rows: list[tuple[int, ...]]) -> int:
    """[groups, a, b] out of two operands with rows in common: every row goes into one a x b product."""
    for shape in rows:
        for axis in (0, 1):
            if shape[axis] in result[1:]:
                return 2 * shape[1 - axis] * result[1] * result[2]
    return 0


def _float_shapes(instruction: Instruction) -> list[tuple[int, ...]]:
    """Shapes of its floating-point arrays."""
    return [array.dims for array in instruction.arrays if array.dtype in ("bf16", "f16", "f32")]


def _dot(instruction: Instruction, computation: Computation, contracted: tuple[int, ...]) -> int:
    lhs = computation.operands(instruction)[0].arrays[0].dims
    return 2 * math.prod(instruction.arrays[0].dims) * math.prod(lhs[axis] for axis in contracted)


def _library_contraction(instruction: Instruction, computation: Computation) -> tuple[int, ...]:
    found = instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    if found is None:
        return (len(computation.operands(instruction)[0].arrays[0].dims) - 1,)
    return tuple(int(axis.strip('" ')) for axis in found.split(","))


def _convolution(instruction: Instruction, computation: Computation) -> int:
    """TPUs run products as convolutions, batch axes as spatial ones dilated so that only their diagonal is real."""
    lhs, rhs = (operand.arrays[0].dims for operand in computation.operands(instruction)[:2])
    out = instruction.arrays[0].dims
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, f"{instruction.name}: a convolution without dim_labels"
    of_lhs, of_rhs, of_out = labels.groups()
    spatial = sorted(label for label in of_lhs if label.isdigit())  # the order of the window's axes
    window = _window(instruction, len(spatial))
    taps = 1
    for axis, label in enumerate(spatial):
        sizes = (lhs[of_lhs.index(label)], rhs[of_rhs.index(label)], out[of_out.index(label)])
        taps *= _real_taps(*sizes, **{key: values[axis] for key, values in window.items()})
    features = lhs[of_lhs.index("f")] // int(instruction.attribute(r"feature_group_count=(\d+)") or 1)
    batch = lhs[of_lhs.index("b")] // int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    return 2 * taps * batch * features * rhs[of_rhs.index("o")]


def _window(instruction: Instruction, rank: int) -> dict[str, list[int]]:
    """Per spatial axis: stride, both dilations, and the padding before the first element."""
    written = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(part.split("=") for part in written.split())

    def numbers(key: str, default: int) -> list[int]:
        return [int(part.split("_")[0]) for part in fields[key].split("x")] if key in fields else [default] * rank

    dilations = {"lhs_dilation": numbers("lhs_dilate", 1), "rhs_dilation": numbers("rhs_dilate", 1)}
    return {"stride": numbers("stride", 1), "pad": numbers("pad", 0), **dilations}


def _real_taps(num_in, num_kernel, num_out, *, stride, lhs_dilation, rhs_dilation, pad) -> int:
    """How many (output, kernel) places of one axis meet a real input element, not padding or a dilation's hole."""
    count, last = 0, (num_in - 1) * lhs_dilation
    for kernel in range(num_kernel):
        first = kernel * rhs_dilation - pad  # where output 0 reads, in the dilated input
        outputs = range(max(0, -(first // stride)), min(num_out, (last - first) // stride + 1))  # those that read inside
        if lhs_dilation == 1:
            count += len(outputs)
        else:
            count += sum((first + output * stride) % lhs_dilation == 0 for output in outputs)
    return count
