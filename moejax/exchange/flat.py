"""Rows without padding: dispatch, and the way of one device, where no row has to cross.

t: tokens on this shard, d: model width, R: rows.
"""

import jax
from jax.ad_checkpoint import checkpoint_name

from moejax.exchange.wire import Wire
from moejax.permute import gather_sum, spread


def flat(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on), on one device."""
    assert not wire.axes, wire.axes
    with jax.named_scope("moe/dispatch"):
        rows, weight = outgoing(x, plan)
        rows = checkpoint_name(rows, "moe/dispatch")
    with jax.named_scope("moe/experts"):
        out = checkpoint_name(experts.flat(rows, plan.group_sizes, weight), "moe/experts")
    with jax.named_scope("moe/combine"):
        return home(out, plan), plan.group_sizes.sum()


def outgoing(x, plan):
    """The tokens of the plan's rows [R, d], and their combine weights [R]; past the last row stands any token."""
    weight = spread(plan.weight.reshape(-1), plan.source, (plan.slot.reshape(-1),))
    return spread(x, plan.source // plan.slot.shape[1], _columns(plan), True), weight


def home(rows, plan):
    """[R, d], weighted already -> [t, d]: the sum over each token's rows."""
    return gather_sum(rows, plan.source // plan.slot.shape[1], _columns(plan), True)


def _columns(plan):
    return tuple(plan.slot[:, j] for j in range(plan.slot.shape[1]))
