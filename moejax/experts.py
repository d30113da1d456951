"""GroupedExperts: the feed-forward of each expert over its own rows. No collectives inside.

e: experts on this shard, r: rows of an expert, d: model width, f: expert width (this shard's part of it).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.feed_forward import NONLINEARITY, feed_forward
from moejax.flat_feed_forward import flat_feed_forward
from moejax.permute import unstack
from moejax.pytree import pytree
from moejax.ring_feed_forward import Spread, ring_feed_forward

GATED = ("swiglu", "geglu")
ApplyRows = Callable[..., Array]
LOGICAL_AXES = {
    "up": ("expert", "embed", "mlp"),
    "gate": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
}


@pytree
class GroupedExperts:
    """The weights of e experts, callable on their rows: down(act(up(x))), or down(act(gate(x)) * up(x)) where gated.

    Attributes:
      up: [e, d, f].
      down: [e, f, d].
      gate: [e, d, f] for "swiglu" and "geglu" (Shazeer 2020), else None.
      activation: a name from `NONLINEARITY`.
      ring: mesh axes that width d of the weights is still divided over; the parts go round while others are multiplied
        (see `moejax.ring_feed_forward`).
      sums: mesh axes that f is divided over, where outputs are to be in parts by columns, for `moejax.ring_sum`.
    """

    up: Float[Array, "e d f"]
    down: Float[Array, "e f d"]
    gate: Float[Array, "e d f"] | None
    activation: str = dataclasses.field(metadata={"static": True})
    ring: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    sums: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def __call__(self, rows: Float[Array, "e r d"], weight: Float[Array, "e r"] | None = None):
        """[e, r, d] -> [e, r, d], row by row; a zero row gives a zero row. With f split, the partial sum over this part.

        Args:
          rows: [e, r, d].
          weight: [e, r] float32 factors of the outputs; None: 1. See `moejax.feed_forward`.
        """
        return self._through((self.gate, self.up, self.down), rows, weight)

    def apart(self) -> list[ApplyRows]:
        """Each expert as a function of its own rows and their weights: ([r, d], [r] or None) -> [r, d]."""
        return [functools.partial(self._through, weights) for weights in unstack((self.gate, self.up, self.down))]

    def _through(self, weights, rows, weight=None):
        if self.ring or self.sums:
            spread = Spread(embed=self.ring, columns=self.sums)
            return ring_feed_forward(rows, weights, NONLINEARITY[self.activation], spread, row_weight=weight)
        gate, up, down = weights
        return feed_forward(rows, weight, gate, up, down, self.activation)

    def flat(self, rows, group_sizes, row_weight) -> Float[Array, "R d"]:
        """The same for rows of all experts in one array, each multiplied by its weight.

        Args:
          rows: [R, d], grouped by expert, empty rows last.
          group_sizes: [e] int32, rows of each expert.
          row_weight: [R] float32; its gradient needs no output to be kept.
        """
        weights = self.gate, self.up, self.down
        if self.ring:
            act, options = NONLINEARITY[self.activation], {"row_weight": row_weight, "group_sizes": group_sizes}
            return ring_feed_forward(rows, weights, act, Spread(embed=self.ring), **options)
        return flat_feed_forward(rows, group_sizes, row_weight, weights, self.activation)

    @property
    def num_experts(self) -> int:
        """e, how many there are."""
        return self.up.shape[0]

    def map(self, change) -> "GroupedExperts":
        """The experts with change(name, weights) for each of up, down and gate."""
        names = [name for name in LOGICAL_AXES if getattr(self, name) is not None]
        return dataclasses.replace(self, **{name: change(name, getattr(self, name)) for name in names})


def expert_shapes(num_experts: int, d_model: int, d_ff: int, activation: str) -> dict[str, tuple[int, int, int]]:
    """The shape of each weight array, by name."""
    wide, narrow = (num_experts, d_model, d_ff), (num_experts, d_ff, d_model)
    gate = {"gate": wide} if activation in GATED else {}
    return {"up": wide, **gate, "down": narrow}


def expert_bytes(d_model: int, d_ff: int, activation: str, dtype: str) -> int:
    """Bytes of one expert's weights."""
    shapes = expert_shapes(1, d_model, d_ff, activation).values()
    return jnp.dtype(dtype).itemsize * sum(math.prod(shape) for shape in shapes)
