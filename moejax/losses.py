"""Router losses: pure functions of a Routing's arrays, returned in the stats, never kept anywhere.

t: tokens on this shard, E: experts, G: groups that a loss counts over.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moejax.axes import sum_over
from moejax.router import Routing


def load_balance_loss(
    routing: Routing,
    valid: Bool[Array, "t"],
    *,
    scope: str = "microbatch",
    axes: tuple[str, ...] = (),
    sequence: tuple[Int[Array, "t"], int] | None = None,
) -> Float[Array, ""]:
    """E * sum_e f_e * P_e (Switch Transformer, eq. 4): 1 when balanced, up to E when one expert takes all.

    f_e is the share of the (token, choice) pairs that went to e (no gradient), P_e the mean probability of e, both over
    the valid tokens of a group; the loss is the mean over groups that have any.

    Args:
      routing: of this shard's tokens.
      valid: [t] which of them count.
      scope: the group: "microbatch" (all shards' tokens), "shard" (this shard's), or "sequence".
      axes: mesh axes that tokens are sharded over.
      sequence: for scope "sequence", each token's sequence over all shards [t], ascending, and the number of sequences.
    """
    pairs = jax.nn.one_hot(routing.expert, routing.probs.shape[-1]).sum(1)  # [t, E]
    add = functools.partial(_add_up, valid=valid, sequence=sequence if scope == "sequence" else None)
    sums = (add(pairs), add(routing.probs), add(jnp.ones_like(valid, jnp.float32)))  # [G, E], [G, E], [G]
    share, prob, tokens = sums if scope == "shard" else sum_over(sums, axes)
    some = jnp.maximum(tokens, 1)
    share = jax.lax.stop_gradient(share) / (some * routing.expert.shape[-1])[:, None]
    loss = routing.probs.shape[-1] * (share * prob / some[:, None]).sum(-1)  # [G]
    total, groups = jnp.where(tokens > 0, loss, 0).sum(), (tokens > 0).sum()
    if scope == "shard":
        total, groups = sum_over((total, groups), axes)
    return total / jnp.maximum(groups, 1)


def _add_up(values: Float[Array, "t *n"], valid: Bool[Array, "t"], sequence) -> Float[Array, "G *n"]:
    """Sums over each group's valid tokens. Additions, not a product with a 0/1 matrix: that would have G*t entries, and
    round the probabilities on backends whose default product does."""
    kept = jnp.where(valid.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    if sequence is None:
        return kept.sum(0)[None]
    index, count = sequence
    return jax.ops.segment_sum(kept, index, count, indices_are_sorted=True)


def router_z_loss(routing: Routing, valid: Bool[Array, "t"], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """Mean over valid tokens of logsumexp(logits)**2 (ST-MoE, eq. 5); keeps router logits small.

    Args:
      routing: of this shard's tokens.
      valid: [t] which of them count.
      axes: mesh axes that tokens are sharded over.
    """
    square = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    total, tokens = sum_over((jnp.where(valid, square, 0).sum(), valid.sum()), axes)
    return total / jnp.maximum(tokens, 1)
