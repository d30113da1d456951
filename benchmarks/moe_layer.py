"""The whole layer against the bare expert products that it cannot do without, at equal FLOPs.

The plain product gets the layer's rows (padding included) already grouped: what the ratio says above 1 is routing,
moving rows and adding them up. One device, float32. d: model width, f: expert width, k: experts per token.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import moejax
from benchmarks import harness

AIM = "ratio <= 1.3, forward and forward+backward, for 8 and for 64 experts"
NUM_TOKENS, D_MODEL, D_FF, TOP_K = 2048, 256, 512, 2
ROUNDS = 21


def run() -> list[dict]:
    """A row per number of experts, capacity factor and direction."""
    cases = [(num_experts, factor) for num_experts in (8, 64) for factor in (1.0, 1.25)]
    return [row for case in cases for row in _case(*case)]


def _case(num_experts: int, capacity_factor: float) -> list[dict]:
    cfg = moejax.MoEConfig(
        d_model=D_MODEL,
        d_ff=D_FF,
        num_experts=num_experts,
        top_k=TOP_K,
        capacity_factor=capacity_factor,
        dtype="float32",
    )
    layer, plain = _layer(cfg), _plain(cfg)
    rows = {}
    for direction, wrap in (("forward", jax.jit), ("forward+backward", _with_gradients)):
        runs = {name: _bound(wrap(fn), args) for name, (fn, args) in {"layer": layer, "plain": plain}.items()}
        seconds = harness.interleaved_seconds(runs, ROUNDS)
        rows[direction] = harness.median_seconds(seconds) | harness.ratio(seconds, "layer", "plain")
    shape = {"num_experts": num_experts, "capacity_factor": capacity_factor}
    return [{**shape, "direction": direction, **figures} for direction, figures in rows.items()]


def _layer(cfg: moejax.MoEConfig):
    graph, params, rest = nnx.split(moejax.MoELayer(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (1, NUM_TOKENS, cfg.d_model))

    def forward(params, x):
        y, stats = nnx.merge(graph, params, rest)(x)
        return y, stats.loss(cfg)

    return forward, (params, x)


def _plain(cfg: moejax.MoEConfig):
    """SwiGLU over rows that are grouped already: as many rows an expert as the layer's capacity."""
    num_rows = cfg.cell_rows(NUM_TOKENS)
    keys = jax.random.split(jax.random.key(2), 4)
    rows = jax.random.normal(keys[0], (cfg.num_experts, num_rows, cfg.d_model))
    up, gate = (jax.random.normal(key, (cfg.num_experts, cfg.d_model, cfg.d_ff)) for key in keys[1:3])
    down = jax.random.normal(keys[3], (cfg.num_experts, cfg.d_ff, cfg.d_model))

    def forward(weights, rows):
        hidden = jax.nn.silu(jnp.einsum("erd,edf->erf", rows, weights["gate"]))
        hidden *= jnp.einsum("erd,edf->erf", rows, weights["up"])
        return jnp.einsum("erf,efd->erd", hidden, weights["down"]), jnp.zeros(())

    return forward, ({"up": up, "gate": gate, "down": down}, rows)


def _with_gradients(forward):
    """Outputs and the gradients of every argument, from a cotangent that depends on the output."""

    def loss(params, x):
        y, extra = forward(params, x)
        return jnp.square(y).mean() + extra, y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _bound(fn, args):
    return lambda: fn(*args)
