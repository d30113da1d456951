"""Wire: the mesh axes that an exchange crosses, and the codecs that rows cross them in."""

import dataclasses

from jax import lax
from jaxtyping import Array, Int

from moejax.axes import axis_index, axis_size


@dataclasses.dataclass(frozen=True)
class Wire:
    """How an exchange is to cross.

    Attributes:
      axes: the expert axes; none on one device, where nothing is sent.
      codecs: names of the codecs, (forward, backward).
      num_chunks: in how many parts, so that one part's experts can work while the next part crosses.
      tokens: the axes that tokens are sharded over: what all shards must do alike is decided over them.
      weigh_at: where combine weights multiply cells' rows, "token" or "expert" (see `moejax.exchange.form`).
      exchange_by: what cells cross together, a "device"'s experts or those of one "expert".
      shared: mesh axes whose shards hold the same tokens, where each sends its share of the rows only ("hierarchical").
    """

    axes: tuple[str, ...] = ()
    codecs: tuple[str, str] = ("plain", "plain")
    num_chunks: int = 1
    tokens: tuple[str, ...] = ()
    weigh_at: str = "token"
    exchange_by: str = "device"
    shared: tuple[str, ...] = ()


def own_counts(counts: Int[Array, "E"], axes: tuple[str, ...]) -> Int[Array, "e"]:
    """Counts per expert [E] of each shard -> those of this shard's experts [e], added up over the shards."""
    if not axes:
        return counts
    own = counts.shape[0] // axis_size(axes)
    return lax.dynamic_slice_in_dim(lax.psum(counts, axes), axis_index(axes) * own, own)
