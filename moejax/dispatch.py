"""dispatch() and combine(): tokens to rows of the send buffer, and rows back to weighted sums. No collectives.

Each is one gather, and so is each backward: the plan knows the permutation in both directions.
t: tokens on this shard, k: experts per token, d: model width, R: rows of the send buffer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.permute import read, spread
from moejax.plan import DispatchPlan


def dispatch(x: Float[Array, "t d"], plan: DispatchPlan) -> Float[Array, "E r d"]:
    """The send buffer, [E, R/E, d]: each row its pair's token, zeros where the plan has none."""
    k = plan.slot.shape[1]
    rows = spread(x, plan.source // k, tuple(plan.slot[:, j] for j in range(k)))
    return rows.reshape(plan.num_experts, -1, x.shape[1])


def combine(rows: Float[Array, "E r d"], plan: DispatchPlan) -> Float[Array, "t d"]:
    """Each token's weighted sum over its rows, added up in float32; zeros where all its pairs were dropped."""
    return _weighted_sum(rows.reshape(-1, rows.shape[-1]), plan.weight, plan.slot, plan.source)


@jax.custom_vjp
def _weighted_sum(rows, weight, slot, source):
    total = 0.0
    for j in range(slot.shape[1]):  # one gather of [t, d] at a time: [t, k, d] is never held
        total += read(rows, slot[:, j]).astype(jnp.float32) * weight[:, j, None]
    return jnp.asarray(total, rows.dtype)


def _weighted_sum_bwd(residuals, cotangent):
    rows, weight, slot, source = residuals
    wide = cotangent.astype(jnp.float32)
    d_rows = read(wide, source // slot.shape[1]) * read(weight.reshape(-1), source)[:, None]
    d_weight = [(read(rows, slot[:, j]).astype(jnp.float32) * wide).sum(-1) for j in range(slot.shape[1])]
    return d_rows.astype(rows.dtype), jnp.stack(d_weight, 1), None, None


_weighted_sum.defvjp(
    lambda rows, weight, slot, source: (_weighted_sum(rows, weight, slot, source), (rows, weight, slot, source)),
    _weighted_sum_bwd,
)
