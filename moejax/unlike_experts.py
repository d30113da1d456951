"""Experts of several hidden widths in one layer (MoHGE): every shard holds as many of each width as every other.

E: experts in the layer, G: widths, e: experts on this shard, r: rows of an expert, d: model width, s: shards.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.experts import ApplyRows, GroupedExperts
from moejax.pytree import pytree


@pytree
class UnlikeExperts:
    """e/G experts of each width, one width's after another's; callable on their rows as `GroupedExperts` is.

    Attributes:
      groups: the experts of each width.
    """

    groups: tuple[GroupedExperts, ...]

    def __call__(self, rows: Float[Array, "e r d"], weight: Float[Array, "e r"] | None = None):
        """[e, r, d] -> [e, r, d], or columns of it in parts, as `GroupedExperts` gives them."""
        num = len(self.groups)
        weights = [None] * num if weight is None else jnp.split(weight, num)
        found = [group(part, w) for group, part, w in zip(self.groups, jnp.split(rows, num), weights, strict=True)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)

    def apart(self) -> list[ApplyRows]:
        """Each expert as a function of its own rows and their weights: ([r, d], [r] or None) -> [r, d]."""
        return [apply for group in self.groups for apply in group.apart()]

    def flat(
        self, rows: Float[Array, "R d"], group_sizes: Int[Array, "e"], row_weight: Float[Array, "R"]
    ) -> Float[Array, "R d"]:
        """As `GroupedExperts.flat`. Each width's rows are moved to the front for its products, and their results back."""
        total, first = jnp.zeros_like(rows), jnp.zeros((), group_sizes.dtype)
        for group, sizes in zip(self.groups, jnp.split(group_sizes, len(self.groups)), strict=True):
            mine = group.flat(jnp.roll(rows, -first, 0), sizes, jnp.roll(row_weight, -first))
            total += jnp.roll(mine, first, 0)
            first += sizes.sum()
        return total

    @property
    def num_experts(self) -> int:
        """e, how many there are."""
        return sum(group.num_experts for group in self.groups)

    def map(self, change) -> "UnlikeExperts":
        """The experts with change(name, weights) for each array of weights."""
        return UnlikeExperts(tuple(group.map(change) for group in self.groups))


def slot_of_expert(expert, num_experts: int, num_groups: int, num_shards: int):
    """Where an expert stands when shards follow each other, in each the groups and in each group its experts.

    Args:
      expert: integers of any shape: experts counted group by group.
      num_experts: E.
      num_groups: G; G * num_shards divides E.
      num_shards: s; each holds E / (G * s) consecutive experts of every group.
    """
    own = num_experts // (num_groups * num_shards)
    group, member = expert // (own * num_shards), expert % (own * num_shards)
    return member // own * (own * num_groups) + group * own + member % own
