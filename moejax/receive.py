"""Who is dropped where a device's experts get more rows than it takes: part of the model, known to everybody.

Rows come in cells, one per (sender, expert). Past the room of a device its largest cells are cut first, down to one water
level: what fits below it is never touched, whoever sent it. A cell is cut from its end, so what goes first is what
`drop_by` ranks last. The counts alone decide, so every device computes the same cut.

E: experts in the layer, m: senders on this shard, n: destinations, c: cells of one destination.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moejax.axes import axis_index


@dataclasses.dataclass(frozen=True)
class ReceiveRule:
    """What a destination takes.

    Attributes:
      room: rows that one destination's experts take together.
      num_destinations: n; destinations of one group, which consecutive senders share, as many or a multiple. Divides E.
    """

    room: int
    num_destinations: int


def take_in(sent: Int[Array, "E m"], rule: ReceiveRule, axes: tuple[str, ...]) -> Int[Array, "E m"]:
    """Of each cell's rows [E, m], how many its destination takes.

    Args:
      sent: rows that this shard's senders have for each expert.
      rule: the room.
      axes: the expert axes: the senders of all shards along them are a group, and their counts are gathered. Without axes
        every n senders of this shard are one.
    """
    n, (num_experts, m) = rule.num_destinations, sent.shape
    counts = lax.all_gather(sent.T, axes, tiled=True) if axes else sent.T  # [senders, E]
    groups = counts.reshape(-1, n * m if axes else n, n, num_experts // n).swapaxes(1, 2)  # group, destination, sender, expert
    taken = water_level(groups.reshape(*groups.shape[:2], -1), rule.room)
    taken = taken.reshape(groups.shape).swapaxes(1, 2).reshape(counts.shape)
    return (lax.dynamic_slice_in_dim(taken, axis_index(axes) * m, m) if axes else taken).T


def water_level(cells: Int[Array, "*b c"], room: int) -> Int[Array, "*b c"]:
    """min(cells, level) with the highest level at which they add up to `room` at most; what then is left of the room goes
    to the first of the cells that were cut, one row each. No sort: c * c comparisons."""
    below = jnp.minimum(cells[..., None, :], cells[..., :, None]).sum(-1)  # all cells cut at the size of each
    floor = jnp.where(below <= room, cells, 0).max(-1, keepdims=True)
    left = room - jnp.minimum(cells, floor).sum(-1, keepdims=True)
    higher = cells > floor
    share, extra = jnp.divmod(left, jnp.maximum(higher.sum(-1, keepdims=True), 1))
    first = jnp.cumsum(higher, -1) <= extra
    return jnp.minimum(cells, floor + jnp.where(higher, share + first, 0)).astype(cells.dtype)
