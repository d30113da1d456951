"""Pools: capacity per (sender, destination device), each token sent once per destination, and what that means on arrival.

A pair's *level* is its place among its token's experts on one destination, heaviest first: a token has one level-0 pair
per destination that it visits, a level-1 pair where it has two experts there, and so on. A pool is ordered by how many
levels a token has, most first, so the tokens that have a level j are a prefix of it and every array has a static length:
the first caps[j] rows of a pool carry a level j, and level j is dropped where its pool rank is caps[j] or more.

t: tokens of one sender, k: experts per token, n: destinations, e: experts of one destination, J: levels, min(k, e),
M = caps[0]: rows of a pool, L = sum(caps): pairs of a pool, S: senders to one destination, R: rows it works on.
Indices are int32; "past the end" stands for "nothing here".
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.pytree import pytree
from moejax.router import Routing


def level_loads(num_experts: int, num_destinations: int, top_k: int) -> tuple[float, ...]:
    """The share of a sender's tokens that have each level on one destination, under uniform routing (hypergeometric)."""
    e = num_experts // num_destinations
    ways = [math.comb(e, c) * math.comb(num_experts - e, top_k - c) for c in range(min(top_k, e) + 1)]
    total = math.comb(num_experts, top_k)
    return tuple(sum(ways[level:]) / total for level in range(1, len(ways)))


def measured_level_loads(expert: Int[Array, "t k"], num_experts: int, num_destinations: int) -> tuple[float, ...]:
    """The same from recorded routing: for each level the busiest destination's share of the tokens.

    Caps from uniform shares are too small for skewed routing; caps from these drop nothing that was in the record, up to
    the factor.

    Args:
      expert: [t, k] int32, the experts that each token chose.
      num_experts: experts in the layer.
      num_destinations: devices that they are divided over, in equal consecutive parts.
    """
    e = num_experts // num_destinations
    dest = np.asarray(expert) // e
    levels = (dest[:, :, None] == np.arange(num_destinations)).sum(1)  # [t, n]
    return tuple(float((levels > j).mean(0).max()) for j in range(min(dest.shape[1], e)))


def level_caps(num_tokens: int, loads: tuple[float, ...], factor: float | None) -> tuple[int, ...]:
    """Rows per level of a pool: factor times the expected tokens, and never under four deviations above them.

    Args:
      num_tokens: t, of one sender.
      loads: the expected share of tokens by level.
      factor: over the expectation; None: t for each level, so that nothing can be dropped.

    Returns:
      A tuple that does not increase, each a multiple of 8 or t.
    """
    if factor is None:
        return (num_tokens,) * len(loads)
    mean = [num_tokens * load for load in loads]
    room = [min(num_tokens, max(factor * rows, rows + 4 * math.sqrt(rows))) for rows in mean]
    return tuple(min(num_tokens, max(8, math.ceil(rows / 8) * 8)) for rows in room)


@pytree
class PoolPlan:
    """One sender's pools.

    Attributes:
      slot: [t, k] the row of the send buffer [n*M] that carries the token to the destination whose level-0 pair this is;
        n*M for other pairs and where dropped.
      token: [n*M] the token in each row; t where empty.
      cell: [t, k] where the pair's expert and weight travel, in [n*L]; n*L where dropped.
      pair: [n*L] the pair (token * k + choice) there; t*k where empty.
      weight: [t, k] float32 combine weight; zero where dropped here.
      local_expert: [n, L] the expert, counted within its destination; e where empty.
      routed: [E] pairs of valid tokens that chose each expert, before any drop.
      kept: [E] pairs of them that are sent.
      caps: rows per level.
      max_rows: how many pairs a destination works on at most; None: as many as come.
    """

    slot: Int[Array, "t k"]
    token: Int[Array, "slots"]
    cell: Int[Array, "t k"]
    pair: Int[Array, "cells"]
    weight: Float[Array, "t k"]
    local_expert: Int[Array, "n L"]
    routed: Int[Array, "E"]
    kept: Int[Array, "E"]
    caps: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    max_rows: int | None = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class PoolRule:
    """Who is dropped from pools: part of the model.

    Attributes:
      caps: rows per level of a pool.
      max_rows: how many pairs a destination works on at most; None: as many as come.
      num_destinations: n; divides the number of experts.
      drop_by: order of the tokens with equally many levels: "position", or "weight", the largest routing weight first.
    """

    caps: tuple[int, ...]
    max_rows: int | None
    num_destinations: int
    drop_by: str = "position"


def make_pool_plan(routing: Routing, valid: Bool[Array, "t"], rule: PoolRule) -> PoolPlan:
    """Ranks tokens within each pool and keeps what the caps have room for. Two sorts of n*t integers, gathers, no scatter.

    Args:
      routing: the experts and weights of each token.
      valid: [t] which tokens count; the others are in no pool.
      rule: the capacities.
    """
    (t, k), num_experts, n, caps = routing.expert.shape, routing.num_places, rule.num_destinations, rule.caps
    e, depth, width = num_experts // n, caps[0], sum(caps)
    offset = starts(caps)
    counted = routing.counted(valid)
    dest = jnp.where(counted, routing.expert // e, n)
    weight = lax.stop_gradient(routing.weight)
    level = _level(dest, weight)
    here = dest[:, :, None] == jnp.arange(n)  # [t, k, n]
    order, rank = _pool_order(here, weight, rule.drop_by)  # both [n, t]
    rank = jnp.where(here, rank.T[:, None, :], 0).sum(-1)  # [t, k]
    kept = counted & (rank < _pick(level, caps))
    slot = jnp.where(kept & (level == 0), dest * depth + rank, n * depth)
    cell = jnp.where(kept, dest * width + _pick(level, offset) + rank, n * width)
    token = jnp.where(jnp.arange(depth) < here.any(1).sum(0)[:, None], order[:, :depth], t)  # [n, M]
    choice = _choices(token, dest, level, caps)  # [n, L], k where the level is empty
    row_token = jnp.concatenate([token[:, :cap] for cap in caps], 1)
    pair = jnp.where(choice < k, row_token * k + choice, t * k)
    expert = routing.expert.reshape(-1).at[pair].get(mode="fill", fill_value=0)
    chosen = lambda counted: ((routing.expert[:, :, None] == jnp.arange(num_experts)) & counted[:, :, None]).sum((0, 1))
    return PoolPlan(
        slot=slot.astype(jnp.int32),
        token=token.reshape(-1).astype(jnp.int32),
        cell=cell.astype(jnp.int32),
        pair=pair.reshape(-1).astype(jnp.int32),
        weight=jnp.where(kept, routing.weight, 0),
        local_expert=jnp.where(choice < k, expert % e, e).astype(jnp.int32),
        routed=chosen(counted),
        kept=chosen(kept),
        caps=caps,
        max_rows=rule.max_rows,
    )


def _level(dest, weight):
    """[t, k] how many of the token's pairs on the same destination come before this one: heavier, or as heavy and earlier."""
    same = dest[:, :, None] == dest[:, None, :]
    heavier = weight[:, None, :] > weight[:, :, None]
    earlier = (weight[:, None, :] == weight[:, :, None]) & jnp.tril(jnp.ones(2 * dest.shape[1:], bool), -1)
    return (same & (heavier | earlier)).sum(-1)


def _pool_order(here, weight, drop_by):
    """For each destination: the tokens in pool order, and each token's place in it; tokens not going there come last."""
    t, _, n = here.shape
    token = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (n, t))
    keys = (-here.sum(1, dtype=jnp.int32).T,)
    if drop_by == "weight":
        keys += (-jnp.where(here, weight[:, :, None], 0).max(1).T,)
    order = lax.sort((*keys, token), dimension=1, num_keys=len(keys), is_stable=True)[-1]
    return order, lax.sort((order, token), dimension=1, num_keys=1)[1]


def _choices(token, dest, level, caps):
    """[n, L] which of the token's choices has each level of each pool row; k where none."""
    n, k = token.shape[0], dest.shape[1]
    filled = lambda table, empty: table.at[token].get(mode="fill", fill_value=empty)  # [n, M, k]
    there = filled(dest, n) == jnp.arange(n)[:, None, None]
    row_level, found = filled(level, 0), []
    for j, cap in enumerate(caps):
        match = (there & (row_level == j))[:, :cap]
        found.append(jnp.where(match.any(-1), match.argmax(-1), k))
    return jnp.concatenate(found, 1)


@pytree
class RowPlan:
    """What a destination does with the pools that it received.

    Attributes:
      group_sizes: [e] rows of each of its experts.
      source: [R] the received row [S*M] that each row reads; S*M where empty.
      cell: [R] the received pair [S*L] that each row is; S*L where empty.
      rows: for each level j, [S, caps[j]] the row of that pair; R where there is none.
    """

    group_sizes: Int[Array, "e"]
    source: Int[Array, "R"]
    cell: Int[Array, "R"]
    rows: tuple[Int[Array, "S cap"], ...]


def keep_first(local_expert: Int[Array, "S L"], num_experts: int, max_rows: int) -> Int[Array, "S L"]:
    """The pairs that a destination works on, at most `max_rows`; the others marked empty.

    The lightest levels go first, evenly over senders: pairs are kept by level, then pool rank, then sender.

    Args:
      local_expert: [S, L] the expert of each received pair; num_experts where empty.
      num_experts: e, of this destination.
      max_rows: at least 1.
    """
    real = (local_expert < num_experts).T
    place = jnp.cumsum(real.reshape(-1)).reshape(real.shape)
    return jnp.where((real & (place <= max_rows)).T, local_expert, num_experts)


def make_row_plan(
    local_expert: Int[Array, "S L"], *, num_experts: int, caps: tuple[int, ...], max_rows: int | None = None
) -> RowPlan:
    """Groups the received pairs by expert.

    Args:
      local_expert: [S, L] the expert of each received pair; num_experts where empty.
      num_experts: e, of this destination.
      caps: rows per level.
      max_rows: no more pairs than this are there (see `keep_first`); None: as many as S*L.
    """
    senders, width = local_expert.shape
    depth, total = caps[0], senders * width
    max_rows = total if max_rows is None else min(max_rows, total)
    expert = local_expert.T.reshape(-1)  # by level, then pool rank, then sender
    index = jnp.arange(total, dtype=jnp.int32)
    by_expert, order = lax.sort((expert, index), num_keys=1, is_stable=True)
    place = lax.sort((order, index), num_keys=1)[1]
    row = jnp.where(expert < num_experts, place, max_rows).reshape(width, senders).T
    order, full = order[:max_rows], by_expert[:max_rows] < num_experts
    sender, position = order % senders, order // senders
    rank = position - _pick(_level_of(position, caps), starts(caps))
    return RowPlan(
        group_sizes=(expert[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32),
        source=jnp.where(full, sender * depth + rank, senders * depth).astype(jnp.int32),
        cell=jnp.where(full, sender * width + position, total).astype(jnp.int32),
        rows=tuple(part.astype(jnp.int32) for part in jnp.split(row, np.cumsum(caps)[:-1], axis=1)),
    )


def starts(caps: tuple[int, ...]) -> tuple[int, ...]:
    """Where each level begins among a pool's pairs, [J]."""
    return tuple(int(start) for start in np.cumsum(caps) - np.asarray(caps))


def _level_of(position, caps):
    return sum((position >= start).astype(jnp.int32) for start in starts(caps)[1:]) + jnp.zeros_like(position)


def _pick(level, table):
    """table[level], for a table of a few Python numbers."""
    return sum(jnp.where(level == j, value, 0) for j, value in enumerate(table))
