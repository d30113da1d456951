"""`auto`: which exchange moves the fewest bytes for the shapes at hand. `layouts` replaces this rule by its cost model."""

import dataclasses

import jax.numpy as jnp

from moejax.codec import CODECS
from moejax.config import MoEConfig
from moejax.experts import expert_shapes


@dataclasses.dataclass(frozen=True)
class Choice:
    """An exchange and why. Attributes: name; wire_bytes, by exchange, sent by one device in a forward and a backward."""

    name: str
    wire_bytes: dict[str, int]

    def __str__(self) -> str:
        costs = ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in sorted(self.wire_bytes.items(), key=lambda c: c[1]))
        return f"exchange={self.name}: fewest bytes sent per device and layer, forward and backward ({costs})"


def choose_exchange(cfg: MoEConfig, num_tokens: int, num_senders: int, num_shards: int) -> Choice:
    """The exchange with the fewest bytes among those that implement the config's drop rule; ties go to all_to_all.

    Args:
      cfg: the layer; its own `exchange` is not read.
      num_tokens: on one token shard.
      num_senders: on one token shard.
      num_shards: along the expert axes.
    """
    dtype = jnp.dtype(cfg.dtype)
    others = (num_shards - 1) / num_shards
    if cfg.capacity == "pool" or num_shards == 1:
        return Choice("all_to_all", {"all_to_all": 0} if num_shards == 1 else {})
    row = sum(CODECS[name][i].row_bytes(cfg.d_model, dtype) for i, name in enumerate(cfg.codecs))
    cells = cfg.num_experts * num_senders * cfg.cell_rows(num_tokens // num_senders)
    shapes = expert_shapes(cfg.num_experts // num_shards, cfg.d_model, cfg.d_ff, cfg.activation).values()
    weights = dtype.itemsize * sum(shape[0] * shape[1] * shape[2] for shape in shapes)
    costs = {
        "all_to_all": 2 * others * cells * row,
        "all_gather": 2 * (num_shards - 1) * num_tokens * row,
        "weight_stream": 3 * (num_shards - 1) * weights,  # the weights twice, their gradient once
    }
    if cfg.codecs != ("plain", "plain"):
        del costs["weight_stream"]  # it sends no rows to encode
    costs = {name: round(size) for name, size in costs.items()}
    return Choice(min(costs, key=costs.__getitem__), costs)
