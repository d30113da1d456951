"""The kernels compiled by the compilers of the hardware they are for, which need not be there."""

import pytest

from layouts import aot

# Sizes that no tile divides, and the experts of an OLMoE-like layer on one of 8 devices.
ODD = {"num_tokens": 300, "num_rows": 1000, "d": 200, "f": 300, "num_groups": 7}
OLMOE = {"num_tokens": 4096, "num_rows": 32768, "d": 2048, "f": 1024, "num_groups": 8}
KERNEL = {"pallas_tpu": '"tpu_custom_call"', "pallas_gpu": '"__gpu$xla.gpu.triton"'}
# Gated half, second half; for the gradients of both: rows in one, two for weights, and one of each.
NUM_KERNELS = 7


def _compile(target, implementation, dtype, shape):
    try:
        aot.interpreter(aot.Target.parse(target))
    except aot.CompilersMissingError as error:
        pytest.skip(str(error))
    arguments = {"implementation": implementation, "dtype": dtype, **shape}
    return aot.compile_for(target, "tests.moejax.grouped_programs:feed_forward", arguments)


def _check(target, implementation, dtype, shape):
    """Every product is in one of our kernels: the compiler was left none to do, padded or masked."""
    text = _compile(target, implementation, dtype, shape).text
    assert text.count(KERNEL[implementation]) == NUM_KERNELS
    assert not any(op in text for op in (" dot(", " convolution(", "ragged"))


@pytest.mark.parametrize(("target", "implementation"), [("v5p:2x2x1", "pallas_tpu"), ("h100:1x1", "pallas_gpu")])
def test_kernels_compile(target, implementation):
    _check(target, implementation, "bfloat16", ODD)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [ODD, OLMOE], ids=["odd", "olmoe"])
@pytest.mark.parametrize(
    ("target", "implementation"),
    [("v5e:2x2", "pallas_tpu"), ("v5p:2x2x1", "pallas_tpu"), ("v6e:2x2", "pallas_tpu"), ("h100:1x1", "pallas_gpu")],
)
def test_kernels_compile_everywhere(target, implementation, shape, dtype):
    _check(target, implementation, dtype, shape)
