"""How rows cross the expert axis: one transport a file, one signature.

An exchange takes this shard's tokens through the experts wherever those live and returns the combined outputs:
`exchange(x, plan, experts, wire) -> y`. It drops exactly what the plan drops.
"""

from collections.abc import Callable

from jaxtyping import Array

from moejax.exchange.all_gather import all_gather
from moejax.exchange.all_to_all import all_to_all
from moejax.exchange.wire import Wire
from moejax.experts import GroupedExperts
from moejax.plan import DispatchPlan

Exchange = Callable[[Array, DispatchPlan, GroupedExperts, Wire], Array]
EXCHANGES: dict[str, Exchange] = {"all_to_all": all_to_all, "all_gather": all_gather}

__all__ = ["EXCHANGES", "Exchange", "Wire", "all_gather", "all_to_all"]
