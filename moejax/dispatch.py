"""dispatch() and combine(): tokens to rows of the send buffer, and rows back to weighted sums. No collectives.

Each is one gather, and so is each backward: the plan knows the permutation in both directions.
t: tokens on this shard, k: experts per token, d: model width, R: rows of the send buffer.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.permute import gather_sum, read, spread
from moejax.plan import DispatchPlan


def dispatch(x: Float[Array, "t d"], plan: DispatchPlan) -> Float[Array, "E r d"]:
    """The send buffer, [E, R/E, d]: each row its pair's token, zeros where the plan has none."""
    rows = spread(x, plan.source // plan.slot.shape[1], _columns(plan))
    return rows.reshape(plan.num_experts, -1, x.shape[1])


def dispatch_parts(
    x: Float[Array, "t d"], plan: DispatchPlan, sources: tuple[Int[Array, "_"], ...], *, clip: bool
) -> tuple[Float[Array, "_ d"], ...]:
    """The send buffer in parts, each gathered by itself.

    Args:
      x: [t, d].
      plan: where the pairs are.
      sources: plan.source in parts, in order.
      clip: an empty row holds any token, instead of zeros: for one who gives it weight zero.
    """
    k = plan.slot.shape[1]
    return spread(x, tuple(source // k for source in sources), _columns(plan), clip)


def combine(rows: Float[Array, "E r d"], plan: DispatchPlan) -> Float[Array, "t d"]:
    """Each token's weighted sum over its rows, added up in float32; zeros where all its pairs were dropped."""
    return _weighted_sum(rows.reshape(-1, rows.shape[-1]), plan.weight, plan.slot, plan.source)


def collect(
    parts: tuple[Float[Array, "_ d"], ...], plan: DispatchPlan, sources: tuple[Int[Array, "_"], ...]
) -> Float[Array, "t d"]:
    """Each token's plain sum over rows that have been weighed already: the transpose of `dispatch_parts` under `clip`."""
    k = plan.slot.shape[1]
    return gather_sum(parts, tuple(source // k for source in sources), _columns(plan), True)


def row_weights(plan: DispatchPlan) -> Float[Array, "R"]:
    """The combine weight of each row of the send buffer; exactly zero where a row is empty."""
    return spread(plan.weight.reshape(-1), plan.source, (plan.slot.reshape(-1),))


def _columns(plan):
    return tuple(plan.slot[:, j] for j in range(plan.slot.shape[1]))


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
