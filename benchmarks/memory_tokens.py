"""Scratch memory of one layer's forward and backward against its tokens: nothing of tokens x experts x capacity.

In units of what one pass of rows through the experts holds, T * (k * d + k * f) numbers. T: tokens, d: model width, f:
expert width, k: experts per token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks import cases
from benchmarks.cases import Shape

AIM = "at most 4 x T(kd + kf) x 4 bytes, and linear in T"
# Few experts: XLA uses the buffers of the weights' gradients as scratch while they are empty, so with many weights the
# temp bytes start low and then seem to grow faster than the tokens.
SHAPE = Shape(1024, 256, 512, 2, 8)
NUM_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
LAYERS = {"capacity": {"capacity_factor": 1.25}, "dropless": cases.DROPLESS}


def run() -> list[dict]:
    """A row per layer and number of tokens."""
    return [row for name in LAYERS for row in _rows(name)]


def _rows(name: str) -> list[dict]:
    temp_bytes = {num_tokens: _temp_bytes(name, dataclasses.replace(SHAPE, num_tokens=num_tokens)) for num_tokens in NUM_TOKENS}
    least = min(found / num_tokens for num_tokens, found in temp_bytes.items())
    row_bytes = 4 * SHAPE.top_k * (SHAPE.d_model + SHAPE.d_ff)
    return [
        {
            "layer": name,
            "num_tokens": num_tokens,
            "temp_bytes": found,
            "over_rows": found / (num_tokens * row_bytes),
            "a_token_over_least": found / num_tokens / least,
        }
        for num_tokens, found in temp_bytes.items()
    ]


def _temp_bytes(name: str, shape: Shape) -> int:
    """Of the compiled program; nothing is run."""
    params = jax.eval_shape(lambda: cases.weights(shape))
    x = jax.ShapeDtypeStruct((1, shape.num_tokens, shape.d_model), jnp.float32)
    compiled = cases.with_gradients(cases.layer(shape.config(**LAYERS[name]))).lower(params, x).compile()
    memory = compiled.memory_analysis()
    if memory is None or not memory.temp_size_in_bytes:
        raise RuntimeError(f"memory_analysis on {jax.default_backend()} is {memory}: this backend does not say")
    return memory.temp_size_in_bytes
