"""The layer that drops nothing against sort and `jax.lax.ragged_dot`: what one writes in JAX without a library.

One device, float32. On XLA:CPU `ragged_dot` multiplies all rows with all experts, E times the work. At d=512, f=1024,
k=8, E=64 that would be 7 TFLOP a forward pass, minutes a run: that shape is left out.
"""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import cases, harness
from benchmarks.cases import Shape

AIM = "over sort + ragged_dot <= 0.25 with 8 experts, <= 0.1 with 64"
SHAPES = cases.SHAPES[:2]
ROUNDS = 5
TOLERANCE = 1e-4


def run() -> list[dict]:
    """A row per shape and direction."""
    return [_row(shape, direction) for shape in SHAPES for direction in cases.DIRECTIONS]


def _row(shape: Shape, direction: str) -> dict:
    wrap, arguments = cases.DIRECTIONS[direction], (cases.weights(shape), cases.tokens(shape, cases.uniform))
    layers = {"layer": cases.layer(shape.config(**cases.DROPLESS, aux_loss=0.0, z_loss=0.0)), "ragged": ragged(shape.top_k)}
    runs = {name: cases.bound(wrap(layer), *arguments) for name, layer in layers.items()}
    harness.check_equal(runs["layer"](), runs["ragged"](), TOLERANCE)
    seconds = harness.interleaved_seconds(runs, ROUNDS)
    figures = harness.median_seconds(seconds) | harness.ratio(seconds, "layer", "ragged")
    return {**shape.columns(), "direction": direction, **figures}


def ragged(top_k: int):
    """(weights, x [1, T, d]) -> (y, 0): softmax over the chosen experts, rows sorted by expert, summed by a scatter."""

    def forward(params, x):
        tokens = x[0]
        logits, expert = lax.top_k(tokens @ params["router"], top_k)
        weight = jax.nn.softmax(logits).reshape(-1)
        expert = expert.reshape(-1)
        order = jnp.argsort(expert)
        rows = tokens[order // top_k]
        sizes = jnp.bincount(expert, length=params["router"].shape[1])
        hidden = jax.nn.silu(lax.ragged_dot(rows, params["expert_gate"], sizes))
        hidden *= lax.ragged_dot(rows, params["expert_up"], sizes)
        out = lax.ragged_dot(hidden, params["expert_down"], sizes) * weight[order, None]
        return jnp.zeros_like(tokens).at[order // top_k].add(out)[None], jnp.zeros(())

    return forward
