"""Cells through a transport: the driver that all_to_all and hierarchical share.

E: experts in the layer, e: experts on this shard, s: shards along the expert axes, r: rows per expert and shard.
A transport is a pair of functions, [E, r, d] -> [e, s*r, d] and its transpose; rows land expert-major, so that nothing is
sorted or scattered after the exchange.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.codec import Transport, carry
from moejax.dispatch import combine, dispatch
from moejax.exchange.wire import Wire, own_counts


def through_cells(x, plan, experts, wire: Wire, transport: tuple[Transport, Transport]):
    """x [t, d] -> (y [t, d], rows worked on here), in `wire.num_chunks` parts of the rows.

    Part i + 1 crosses without waiting for the experts of part i (MPipeMoE), forward and backward. Who is dropped does not
    depend on the number of parts: they cut the cells' rows, not the tokens.
    """
    there, back = transport
    with jax.named_scope("moe/dispatch"):
        sent = dispatch(x, plan)
        bounds = np.unique(np.linspace(0, sent.shape[1], wire.num_chunks + 1).astype(int))  # no empty parts
        parts = [sent[:, low:high] for low, high in itertools.pairwise(bounds)]
        parts = [checkpoint_name(carry(part, there, back, wire.codecs), "moe/dispatch") for part in parts]
    with jax.named_scope("moe/experts"):
        parts = [checkpoint_name(experts(part), "moe/experts") for part in parts]
    with jax.named_scope("moe/combine"):
        parts = [checkpoint_name(carry(part, back, there, wire.codecs), "moe/combine") for part in parts]
        y = combine(jnp.concatenate(parts, 1), plan)
    return y, own_counts(plan.group_sizes, wire.axes).sum()
