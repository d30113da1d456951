"""Scratch memory of one layer's forward and backward against its tokens: linear, so nothing of tokens x experts x capacity."""

import jax
import jax.numpy as jnp
import moejax
from flax import nnx

AIM = "temp bytes per token constant: 16k tokens within 10% of 1k"
NUM_TOKENS = (1024, 4096, 16384)
CFG = moejax.MoEConfig(d_model=256, d_ff=512, num_experts=64, top_k=2, dtype="float32")


def run() -> list[dict]:
    """A row per number of tokens."""
    temp_bytes = {num_tokens: _temp_bytes(num_tokens) for num_tokens in NUM_TOKENS}
    return [
        {"num_tokens": n, "temp_bytes": found, "temp_bytes_per_token": found / n} for n, found in temp_bytes.items()
    ]


def _temp_bytes(num_tokens: int) -> int:
    """Of the compiled program; nothing is run."""
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: moejax.MoELayer(CFG, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def loss(params, x):
        y, stats = nnx.merge(graph, params, rest)(x)
        return jnp.square(y).mean() + stats.loss(CFG)

    x = jax.ShapeDtypeStruct((1, num_tokens, CFG.d_model), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes
