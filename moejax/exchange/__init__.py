"""How rows cross the expert axis: one transport a file, one signature.

An exchange takes this shard's tokens through the experts wherever those live and returns the combined outputs, and how
many rows this shard's experts worked on: `exchange(x, plan, experts, wire) -> (y, num_rows)`. Cells and flat rows drop
exactly what their plan drops; a pool's destination may drop more, by the rule that `make_row_plan` states.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from moejax.exchange.all_gather import all_gather, gather_flat
from moejax.exchange.all_to_all import all_to_all
from moejax.exchange.flat import flat
from moejax.exchange.hierarchical import hierarchical
from moejax.exchange.pooled import pooled
from moejax.exchange.ragged import ragged
from moejax.exchange.weight_stream import stream_flat, weight_stream
from moejax.exchange.wire import Wire
from moejax.flat_plan import FlatPlan
from moejax.plan import DispatchPlan
from moejax.pool import PoolPlan

# The experts are a function of their rows; flat rows and pools need the `flat` of GroupedExperts.
Exchange = Callable[[Array, DispatchPlan | FlatPlan | PoolPlan, Any, Wire], tuple[Array, Array]]
# By (how rows stand, exchange): in padded cells, flat, or in pools. On one device all flat ones are the same.
EXCHANGES: dict[tuple[str, str], Exchange] = {
    ("cell", "all_to_all"): all_to_all,
    ("cell", "hierarchical"): hierarchical,
    ("cell", "all_gather"): all_gather,
    ("cell", "weight_stream"): weight_stream,
    ("flat", "all_to_all"): flat,
    ("flat", "hierarchical"): flat,
    ("flat", "all_gather"): gather_flat,
    ("flat", "weight_stream"): stream_flat,
    ("flat", "ragged"): ragged,
    ("pool", "all_to_all"): pooled,
}

__all__ = ["EXCHANGES", "Exchange", "Wire"]
