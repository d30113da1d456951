"""RoutingStats: what one layer says of its routing, and how that adds over layers and micro-batches."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.pytree import pytree


@pytree
class RebalanceStats:
    """What lending experts did in one step (`moejax.RebalanceConfig`), over all shards.

    Attributes:
      num_moved_rows: int32, rows sent to another device than their expert's owner.
      num_moved_experts: int32, weights of an expert that went to another device and were used there.
      moved_bytes: float32, of those weights, one way; in a forward and backward they travel twice and their gradients once.
      token_straggler_before: float32, what `RoutingStats.token_straggler` would have been.
      num_dropped_before: int32, what `RoutingStats.num_dropped` would have been.
    """

    num_moved_rows: Int[Array, "*layers"]
    num_moved_experts: Int[Array, "*layers"]
    moved_bytes: Float[Array, "*layers"]
    token_straggler_before: Float[Array, "*layers"]
    num_dropped_before: Int[Array, "*layers"]


@pytree
class RoutingStats:
    """One layer's losses and counts over all shards: the same values on every device.

    Stacked over layers, every field has a leading axis [layers].

    Attributes:
      aux_loss: float32, the load-balance loss, not yet weighted.
      z_loss: float32, the router z-loss, not yet weighted.
      tokens_per_expert: [E] int32, pairs of valid tokens that chose each expert, before drops.
      num_tokens: int32, valid tokens.
      num_assignments: int32, the sum of tokens_per_expert: valid tokens x top_k, for most routers.
      num_dropped: int32, those that found no room, at their sender or at the device that they were sent to, and the missing.
      num_dropped_at_receiver: int32, the latter (pools, and cells with a receive_factor).
      num_missing: int32, those of them whose expert has no live slot (see `moejax.placement`).
      token_straggler: float32, rows on the fullest expert device over the mean of all (max - mean, in rows worked on).
      entropy: float32, the mean entropy of a token's router scores, in nats: log(E) where they are all alike.
      extra: float32 by name, the losses that `MoEConfig.extra_losses` asks for, not yet weighted.
      measured: float32 by name, figures of the router's own: "switch_rate" of router "sticky".
      expert: [batch, seq, k] int32, the experts of each token, -1 where a choice is not used; with
        `RoutingContext(record=True)`, else None.
      rebalance: of experts lent within the step; None where there are none.
    """

    aux_loss: Float[Array, "*layers"]
    z_loss: Float[Array, "*layers"]
    tokens_per_expert: Int[Array, "*layers E"]
    num_tokens: Int[Array, "*layers"]
    num_assignments: Int[Array, "*layers"]
    num_dropped: Int[Array, "*layers"]
    num_dropped_at_receiver: Int[Array, "*layers"]
    num_missing: Int[Array, "*layers"]
    token_straggler: Float[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    extra: dict[str, Float[Array, "*layers"]] = dataclasses.field(default_factory=dict)
    measured: dict[str, Float[Array, "*layers"]] = dataclasses.field(default_factory=dict)
    expert: Int[Array, "*layers b s k"] | None = None
    rebalance: RebalanceStats | None = None

    @property
    def dropped_fraction(self) -> Float[Array, "*layers"]:
        """Dropped assignments over all; 0 where there were none."""
        return self.num_dropped / jnp.maximum(self.num_assignments, 1)

    def loss(self, cfg, reduce: str = "mean") -> Float[Array, ""]:
        """The weighted sum to add to the training loss: cfg.aux_loss * aux_loss + cfg.z_loss * z_loss + extra ones.

        Args:
          cfg: the layer's MoEConfig (its loss weights are read).
          reduce: "mean" or "sum" over layers, where the stats are stacked.

        Raises:
          ValueError: for another `reduce`.
        """
        if reduce not in ("mean", "sum"):
            raise ValueError(f"reduce={reduce!r}: legal values are 'mean', 'sum'")
        weighted = cfg.aux_loss * self.aux_loss + cfg.z_loss * self.z_loss
        for name, weight in cfg.extra_losses:
            weighted += weight * self.extra[name]
        return weighted.mean() if reduce == "mean" else weighted.sum()


def straggler(num_rows: Int[Array, ""], axes: tuple[str, ...]) -> Float[Array, ""]:
    """max - mean over the devices along these axes of what each one works on; 0 for none."""
    rows = num_rows.astype(jnp.float32)
    return lax.pmax(rows, axes) - lax.pmean(rows, axes) if axes else jnp.zeros_like(rows)


def add_microbatches(stats: RoutingStats) -> RoutingStats:
    """Stats stacked over micro-batches [n, ...] as those of one step: counts add, losses, stragglers and figures are averaged.

    Recorded experts are left out: they belong to one micro-batch's tokens.
    """

    def add(leaf):
        return leaf.sum(0) if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.mean(0)

    return jax.tree.map(add, dataclasses.replace(stats, expert=None))
