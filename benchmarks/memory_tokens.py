"""Scratch memory of one layer's forward and backward against its tokens: nothing of tokens x experts x capacity."""

import jax
import jax.numpy as jnp
from flax import nnx

import moejax

AIM = "linear: 16 times the tokens, 16 times the bytes, give or take a fifth (tokens x experts x capacity: 256 times)"
NUM_TOKENS = (1024, 4096, 16384)
# Few experts: XLA uses the buffers of the weights' gradients as scratch while they are empty, so with many weights the
# temp bytes start low and then seem to grow faster than the tokens.
CFG = moejax.MoEConfig(d_model=256, d_ff=512, num_experts=8, top_k=2, dtype="float32")


def run() -> list[dict]:
    """A row per number of tokens."""
    temp_bytes = {num_tokens: _temp_bytes(num_tokens) for num_tokens in NUM_TOKENS}
    first = temp_bytes[NUM_TOKENS[0]]
    return [
        {
            "num_tokens": num_tokens,
            "temp_bytes": found,
            "temp_bytes_per_token": round(found / num_tokens),
            "tokens_over_first": num_tokens // NUM_TOKENS[0],
            "bytes_over_first": found / first,
        }
        for num_tokens, found in temp_bytes.items()
    ]


def _temp_bytes(num_tokens: int) -> int:
    """Of the compiled program; nothing is run."""
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: moejax.MoELayer(CFG, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def loss(params, x):
        y, stats = nnx.merge(graph, params, rest)(x)
        return jnp.square(y).mean() + stats.loss(CFG)

    x = jax.ShapeDtypeStruct((1, num_tokens, CFG.d_model), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    memory = compiled.memory_analysis()
    if memory is None or not memory.temp_size_in_bytes:
        raise RuntimeError(f"memory_analysis on {jax.default_backend()} is {memory}: this backend does not say")
    return memory.temp_size_in_bytes
