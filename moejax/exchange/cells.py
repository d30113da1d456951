"""Cells through a transport: the driver that all_to_all and hierarchical share.

E: experts in the layer, e: experts on this shard, s: shards along the expert axes, r: rows per expert and shard,
g: shards that hold the same tokens and gather what each of them sent (see `Route.gather`), else 1.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax.axes import axis_size
from moejax.codec import Transport, carry
from moejax.dispatch import collect, combine, dispatch_parts, row_weights
from moejax.exchange.wire import Wire, own_counts
from moejax.experts import ApplyRows
from moejax.plan import DispatchPlan, by_chunk, by_expert


@dataclasses.dataclass(frozen=True)
class Route:
    """A transport; without axes, each of its functions is the identity. It moves whole rows, of any shape [*d].

    Attributes:
      there: [E, r, *d] -> [e, s*r, *d]: rows land expert-major, so that nothing is sorted or scattered after it.
      back: its transpose.
      swap: [s, n, *d] -> [s, n, *d], block i to shard i; its own transpose.
      gather: (landed, axis) -> all the rows that its g shards have, one shard's after the other along that axis.
      scatter: (rows, axis) -> this shard's of them, summed over the g shards: its transpose.
    """

    there: Transport = lambda rows: rows
    back: Transport = lambda rows: rows
    swap: Transport = lambda rows: rows
    gather: Callable[[Array, int], Array] = lambda rows, axis: rows
    scatter: Callable[[Array, int], Array] = lambda rows, axis: rows


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The send buffer, part by part.

    Attributes:
      plan: of the send buffer with the parts one after the other.
      sources: plan.source of each part.
      shape: of each part when it is sent, but for its rows: there they land in the experts' shape.
      experts: of each part.
      weights: of each part's rows where they land; an empty tuple where the token weighs.
      there: the transport of a part.
      back: its transpose.
    """

    plan: DispatchPlan
    sources: tuple[Int[Array, "_"], ...]
    shape: tuple[int, ...]
    experts: list[ApplyRows]
    weights: list[tuple[Float[Array, "..."], ...]]
    there: Transport
    back: Transport


def through_cells(x, plan, experts, wire: Wire, route: Route):
    """x [t, d] -> (y [t, d], rows worked on here), in `wire.num_chunks` parts of the rows, or a part per local expert.

    Where the experts give a tuple, of columns, so is y: some columns cross while others are multiplied.

    Part i + 1 crosses without waiting for the experts of part i (MPipeMoE), forward and backward. Who is dropped does not
    depend on the parts: they cut the cells' rows or the experts, not the tokens.
    """
    weigh = wire.weigh_at == "expert"
    d = x.shape[1]
    with jax.named_scope("moe/dispatch"):
        parts = (_each_expert if wire.exchange_by == "expert" else _chunks)(plan, experts, wire, route)
        sent = dispatch_parts(x, parts.plan, parts.sources, clip=weigh)
        sent = [part.reshape(*parts.shape, -1, d) for part in sent]
        land = lambda part: route.gather(carry(part, parts.there, parts.back, wire.codecs), -2)
        rows = [checkpoint_name(land(part), "moe/dispatch") for part in sent]
    with jax.named_scope("moe/experts"):
        landed = zip(parts.experts, rows, parts.weights, strict=True)
        rows = [checkpoint_name(apply(part, *weight), "moe/experts") for apply, part, weight in landed]
    with jax.named_scope("moe/combine"):
        leave = lambda rows: carry(route.scatter(rows, -2), parts.back, parts.there, wire.codecs)
        home = lambda rows: checkpoint_name(leave(rows), "moe/combine")
        y = jax.tree.map(lambda *rows: _combined(tuple(map(home, rows)), parts, weigh), *rows)
    return y, own_counts(plan.group_sizes, wire.axes).sum()


def _combined(rows, parts: _Parts, weigh: bool):
    """y [t, d] of the rows of all parts; or some of its columns, where the rows are these columns of theirs."""
    rows = tuple(part.reshape(-1, part.shape[-1]) for part in rows)
    if weigh:
        return collect(rows, parts.plan, parts.sources)
    return combine(jnp.concatenate(rows).reshape(parts.plan.num_experts, -1, rows[0].shape[-1]), parts.plan)


def _chunks(plan, experts, wire, route) -> _Parts:
    """All experts' rows together, in `wire.num_chunks` parts."""
    ordered, sources = by_chunk(plan, wire.num_chunks)
    weights = [()] * len(sources)
    if wire.weigh_at == "expert":
        sent = row_weights(plan).reshape(plan.num_experts, -1)
        landed = checkpoint_name(route.gather(route.there(sent), -1), "moe/dispatch")  # [e, g*s*r]
        by_place = landed.reshape(landed.shape[0], -1, sent.shape[1])
        ends = list(itertools.accumulate(source.shape[0] // plan.num_experts for source in sources))
        split = [part.reshape(landed.shape[0], -1) for part in jnp.split(by_place, ends[:-1], 2)]
        # Behind the barrier, so that XLA:GPU does not fuse the activations of two parts because both read `landed`. One part
        # goes without: behind it the OLMoE-like layer takes 0.71 GiB on H100 in place of 0.63.
        weights = [(part,) for part in (lax.optimization_barrier(split) if len(split) > 1 else split)]
    shape = (plan.num_experts,)
    return _Parts(ordered, sources, shape, [experts] * len(sources), weights, route.there, route.back)


def _each_expert(plan, experts, wire, route) -> _Parts:
    """Each local expert's rows by themselves: they land as one matrix, and no product has a batch dimension."""
    shards = axis_size(wire.axes)
    ordered, sources = by_expert(plan, shards)
    weights = [()] * len(sources)
    if wire.weigh_at == "expert":
        landed = checkpoint_name(route.swap(row_weights(plan).reshape(shards, -1)), "moe/dispatch")  # [s, e*r]
        weights = [(route.gather(part.reshape(-1), 0),) for part in jnp.split(landed, len(sources), 1)]
    there = lambda rows: route.swap(rows).reshape(-1, *rows.shape[2:])
    back = lambda rows: route.swap(rows.reshape(shards, -1, *rows.shape[1:]))
    return _Parts(ordered, sources, (shards,), experts.apart(), weights, there, back)
