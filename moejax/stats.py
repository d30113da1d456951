"""RoutingStats: what one layer says of its routing, and how that adds over layers and micro-batches."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.pytree import pytree


@pytree
class RoutingStats:
    """One layer's losses and counts over all shards: the same values on every device.

    Stacked over layers, every field has a leading axis [layers].

    Attributes:
      aux_loss: float32, the load-balance loss, not yet weighted.
      z_loss: float32, the router z-loss, not yet weighted.
      tokens_per_expert: [E] int32, pairs of valid tokens that chose each expert, before drops.
      num_assignments: int32, their sum: valid tokens x top_k.
      num_dropped: int32, those that found no room, at their sender or at the device that they were sent to.
      num_dropped_at_receiver: int32, the latter (pools, and cells with a receive_factor).
      token_straggler: float32, rows on the fullest expert device over the mean of all (max - mean, in rows worked on).
      extra: float32 by name, the losses that `MoEConfig.extra_losses` asks for, not yet weighted.
    """

    aux_loss: Float[Array, "*layers"]
    z_loss: Float[Array, "*layers"]
    tokens_per_expert: Int[Array, "*layers E"]
    num_assignments: Int[Array, "*layers"]
    num_dropped: Int[Array, "*layers"]
    num_dropped_at_receiver: Int[Array, "*layers"]
    token_straggler: Float[Array, "*layers"]
    extra: dict[str, Float[Array, "*layers"]] = dataclasses.field(default_factory=dict)

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


def add_microbatches(stats: RoutingStats) -> RoutingStats:
    """Stats stacked over micro-batches [n, ...] as those of one step: counts add, losses and stragglers are averaged."""

    def add(leaf):
        return leaf.sum(0) if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.mean(0)

    return jax.tree.map(add, stats)
