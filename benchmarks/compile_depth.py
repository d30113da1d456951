"""Compile time of the Transformer's forward and backward against its depth: layers are scanned, so it must not grow."""

import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx

import moejax

AIM = "48 layers compile in at most 1.3 times the seconds of 4"
DEPTHS = (4, 48)
ROUNDS = 5
MOE = moejax.MoEConfig(d_model=128, d_ff=256, num_experts=8, top_k=2, dtype="float32")
TOKENS = jax.ShapeDtypeStruct((2, 128), jnp.int32)


def run() -> list[dict]:
    """A row per depth. Tracing, lowering and compiling are counted; nothing is run, and no layer's memory is taken."""
    seconds = {depth: [] for depth in DEPTHS}
    for index in range(ROUNDS + 1):
        for depth in DEPTHS[:: -1 if index % 2 else 1]:
            seconds[depth].append(_compile_seconds(depth))
    medians = {depth: statistics.median(values[1:]) for depth, values in seconds.items()}  # the first imports things
    return [
        {"num_layers": depth, "compile_seconds": found, "ratio": found / medians[DEPTHS[0]]} for depth, found in medians.items()
    ]


def _compile_seconds(depth: int) -> float:
    cfg = moejax.TransformerConfig(
        vocab_size=256,
        num_layers=depth,
        d_model=MOE.d_model,
        num_heads=4,
        num_kv_heads=2,
        d_ff=512,
        moe=MOE,
        dtype="float32",
    )
    model = nnx.eval_shape(lambda: moejax.Transformer(cfg, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, tokens):
        logits, stats = nnx.merge(graph, params, rest)(tokens)
        assert stats is not None
        return jax.nn.logsumexp(logits, axis=-1).mean() + stats.loss(MOE)

    jax.clear_caches()
    start = time.perf_counter()
    jax.jit(jax.grad(loss)).lower(params, TOKENS).compile()
    return time.perf_counter() - start
