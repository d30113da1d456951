"""How rows cross the expert axis: one transport a file, one signature.

An exchange takes this shard's tokens through the experts wherever those live and returns the combined outputs, and how
many rows this shard's experts worked on: `exchange(x, plan, experts, wire) -> (y, num_rows)`. Cells drop exactly what their
plan drops; a pool's destination may drop more, by the rule that `make_row_plan` states.
"""

from collections.abc import Callable

from jaxtyping import Array

from moejax.exchange.all_gather import all_gather
from moejax.exchange.all_to_all import all_to_all
from moejax.exchange.hierarchical import hierarchical
from moejax.exchange.pooled import pooled
from moejax.exchange.weight_stream import weight_stream
from moejax.exchange.wire import Wire
from moejax.plan import DispatchPlan
from moejax.pool import PoolPlan

# The experts are a function of their rows; pools need GroupedExperts, whose weights they divide.
Exchange = Callable[[Array, DispatchPlan | PoolPlan, Callable[[Array], Array], Wire], tuple[Array, Array]]
# By (capacity, exchange).
EXCHANGES: dict[tuple[str, str], Exchange] = {
    ("cell", "all_to_all"): all_to_all,
    ("cell", "hierarchical"): hierarchical,
    ("cell", "all_gather"): all_gather,
    ("cell", "weight_stream"): weight_stream,
    ("pool", "all_to_all"): pooled,
}

__all__ = ["EXCHANGES", "Exchange", "Wire", "all_gather", "all_to_all", "hierarchical", "pooled", "weight_stream"]
