"""`auto`: which exchange moves the fewest bytes for the shapes at hand. `layouts` replaces this rule by its cost model."""

import dataclasses

import jax.numpy as jnp

from moejax.axes import platform
from moejax.codec import CODECS
from moejax.config import MoEConfig
from moejax.experts import expert_shapes
from moejax.ragged_all_to_all import NATIVE


@dataclasses.dataclass(frozen=True)
class Choice:
    """An exchange and why. Attributes: name; wire_bytes, by exchange, sent by one device in a forward and a backward."""

    name: str
    wire_bytes: dict[str, int]

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in sorted(self.wire_bytes.items(), key=lambda c: c[1]))
        return f"exchange={self.name}: fewest bytes sent per device and layer, forward and backward ({costs})"


def choose_exchange(cfg: MoEConfig, num_tokens: int, num_senders: int, num_shards: int, *, lifted: bool = False) -> Choice:
    """The exchange with the fewest bytes among those that implement the config's drop rule; ties go to all_to_all.

    Of "ragged" the rows of even routing count where the mesh's hardware has such a collective; elsewhere what its stand-in
    pads to.

    Args:
      cfg: the layer; its own `exchange` is not read.
      num_tokens: on one token shard.
      num_senders: on one token shard.
      num_shards: along the expert axes.
      lifted: experts of a user's kind, which work on cells.
    """
    dtype = jnp.dtype(cfg.dtype)
    others = (num_shards - 1) / num_shards
    if cfg.capacity == "pool" or num_shards == 1:
        return Choice("all_to_all", {"all_to_all": 0} if num_shards == 1 else {})
    row = sum(CODECS[name][i].row_bytes(cfg.d_model, dtype) for i, name in enumerate(cfg.codecs))
    tokens = num_tokens // num_senders
    cells = cfg.num_places * num_senders * cfg.cell_rows(tokens)
    padded = num_shards * num_senders * cfg.pair_rows(tokens, num_shards)
    flat = min(cells, num_tokens * cfg.top_k) if platform() in NATIVE else padded
    shapes = [shape for group in cfg.expert_groups for shape in expert_shapes(*group, cfg.activation).values()]
    weights = dtype.itemsize * sum(shape[0] * shape[1] * shape[2] for shape in shapes) // num_shards
    costs = {
        "all_to_all": 2 * others * cells * row,
        "ragged": 2 * others * flat * row,
        "all_gather": 2 * (num_shards - 1) * num_tokens * row,
        "weight_stream": 3 * (num_shards - 1) * weights,  # the weights twice, their gradient once
    }
    if cfg.codecs != ("plain", "plain") or cfg.overlap:
        del costs["weight_stream"]  # it sends no rows to encode, and weights that cannot be on another ring meanwhile
    if lifted:
        del costs["ragged"]
    costs = {name: round(size) for name, size in costs.items()}
    return Choice(min(costs, key=costs.__getitem__), costs)
