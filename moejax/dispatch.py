"""dispatch() and combine(): tokens to rows of the send buffer, and rows back to weighted sums. No collectives.

Each is one gather, and so is each backward: the plan knows the permutation in both directions.
t: tokens on this shard, k: experts per token, d: model width, R: rows of the send buffer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.plan import DispatchPlan


def dispatch(x: Float[Array, "t d"], plan: DispatchPlan) -> Float[Array, "E r d"]:
    """The send buffer, [E, R/E, d]: each row its pair's token, zeros where the plan has none."""
    rows = _spread(x, plan.slot, plan.source // plan.slot.shape[1])
    return rows.reshape(plan.num_experts, -1, x.shape[1])


def combine(rows: Float[Array, "E r d"], plan: DispatchPlan) -> Float[Array, "t d"]:
    """Each token's weighted sum over its rows, added up in float32; zeros where all its pairs were dropped."""
    return _weighted_sum(rows.reshape(-1, rows.shape[-1]), plan.weight, plan.slot, plan.source)


def _rows(x, index):
    """Rows of x; an index past the end reads zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


def _sum_rows(rows, slot, weight=None):
    """sum_j weight[:, j] * rows[slot[:, j]] in float32, one gather of [t, d] at a time."""
    total = 0.0
    for j in range(slot.shape[1]):
        row = _rows(rows, slot[:, j]).astype(jnp.float32)
        total += row if weight is None else row * weight[:, j, None]
    return total.astype(rows.dtype)


@jax.custom_vjp
def _spread(x, slot, token):
    return _rows(x, token)


_spread.defvjp(
    lambda x, slot, token: (_rows(x, token), slot),
    lambda slot, cotangent: (_sum_rows(cotangent, slot), None, None),
)


@jax.custom_vjp
def _weighted_sum(rows, weight, slot, source):
    return _sum_rows(rows, slot, weight)


def _weighted_sum_bwd(residuals, cotangent):
    rows, weight, slot, source = residuals
    wide = cotangent.astype(jnp.float32)
    d_rows = _rows(wide, source // slot.shape[1]) * _rows(weight.reshape(-1), source)[:, None]
    d_weight = [(_rows(rows, slot[:, j]).astype(jnp.float32) * wide).sum(-1) for j in range(slot.shape[1])]
    return d_rows.astype(rows.dtype), jnp.stack(d_weight, 1), None, None


_weighted_sum.defvjp(
    lambda rows, weight, slot, source: (_sum_rows(rows, slot, weight), (rows, weight, slot, source)),
    _weighted_sum_bwd,
)
