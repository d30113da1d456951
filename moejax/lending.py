"""Lending inside a layer: which seat each (token, choice) pair goes to, and whose weights sit there.

A device has *seats*: one for each of its own experts, then, for each device of its domain, one for each lane from there. A
plan over seats in place of experts sends rows straight to whoever works on them; nothing else of the exchange changes.

t: tokens on this shard, k: experts per token, E: experts in the layer, replicas counted (`moejax.placement`), m: senders on
this shard; N: devices that share the experts, in S domains of n; e: experts that each owns, p: lanes, g: groups of N senders on
this shard (1 on a mesh).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moejax import axes as ax
from moejax.axes import ShardAxes
from moejax.config import MoEConfig
from moejax.experts import GroupedExperts, expert_bytes
from moejax.guests import WithGuests
from moejax.plan import rank_pairs
from moejax.pytree import pytree
from moejax.rebalance import Loans, RebalanceConfig, plan_loans
from moejax.routing import Routing
from moejax.stats import RebalanceStats, straggler

# 2**32 over the golden ratio: multiples of it, modulo 2**32, fill the range evenly however many are taken.
GOLDEN = 2654435769
# Rows are dealt by the leading bits of those: as many as a float32 holds exactly.
DEAL_BITS = 24


@dataclasses.dataclass(frozen=True)
class Domain:
    """Attributes: size, n devices; group_size, N; num_own, e experts of a device; pair, p lanes."""

    size: int
    group_size: int
    num_own: int
    pair: int

    @property
    def device_seats(self) -> int:
        """e + n * p."""
        return self.num_own + self.size * self.pair

    @property
    def num_seats(self) -> int:
        """Seats of all devices together."""
        return self.group_size * self.device_seats


@pytree
class Lending:
    """One step's loans, as this shard needs them.

    Attributes:
      seat: [t, k] where each pair goes.
      counts: [m, E] rows of each of this shard's senders for each expert.
      loads: [g, E] those of all senders of a group.
      lane: [g, S, n, n, p] by owner and host, which of the owner's experts each lane carries; e: none.
      num_moved: pairs of this shard that leave their expert's owner.
      domain: the sizes.
    """

    seat: Int[Array, "t k"]
    counts: Int[Array, "m E"]
    loads: Int[Array, "g E"]
    lane: Int[Array, "g S n n p"]
    num_moved: Int[Array, ""]
    domain: Domain = dataclasses.field(metadata={"static": True})

    def routing(self, routing: Routing) -> Routing:
        """The routing to seats."""
        return dataclasses.replace(routing, expert=self.seat, places=self.domain.num_seats)

    def experts(self, own: GroupedExperts, expert_axes: tuple[str, ...], axes: tuple[str, ...]) -> WithGuests | GroupedExperts:
        """The experts in this shard's seats; without axes those in the seats of all devices, group after group.

        Args:
          own: this shard's.
          expert_axes: the axes that experts are sharded over.
          axes: those of the domain, the last of them.
        """
        if not expert_axes:
            seated = self._seated().reshape(-1)
            return own.map(lambda _, weights: weights[seated])
        outer = expert_axes[: len(expert_axes) - len(axes)]
        return WithGuests(own, self.lane[0, ax.axis_index(outer), ax.axis_index(axes)], axes)

    def _seated(self) -> Int[Array, "g N seats"]:
        """The expert in each seat of each device; in an empty one any."""
        n, e = self.domain.size, self.domain.num_own
        groups, num_domains = self.lane.shape[:2]
        device = jnp.arange(self.domain.group_size).reshape(num_domains, n)
        guests = (device * e)[:, :, None, None] + jnp.minimum(self.lane, e - 1)  # by domain, owner, host, lane
        guests = guests.swapaxes(2, 3).reshape(groups, num_domains, n, -1)
        own = jnp.broadcast_to(device[..., None] * e + jnp.arange(e), (groups, num_domains, n, e))
        return jnp.concatenate([own, guests], -1).reshape(groups, self.domain.group_size, -1)


def lend(
    routing: Routing, valid: Bool[Array, "t"], num_senders: int, domain: Domain, cfg: RebalanceConfig, axes: tuple[str, ...]
) -> Lending:
    """Counts rows, plans the loans, and deals every expert's rows to those who work on it, in proportion, sender by sender.

    Args:
      routing: the experts of each token.
      valid: [t] which tokens count.
      num_senders: m, blocks of consecutive tokens of this shard.
      domain: the sizes.
      cfg: the rule.
      axes: the expert axes, whose shards are a group; without any, every N senders of this shard are one.
    """
    m = 1 if axes else num_senders
    ranks = rank_pairs(routing, valid, m, "position")
    counts = ranks.count.T  # [m, E]
    if axes:
        loads = lax.psum(counts, axes)
        sender = jnp.full(valid.shape, ax.axis_index(axes))
        group = jnp.zeros_like(sender)
    else:
        loads = counts.reshape(-1, domain.group_size, counts.shape[1]).sum(1)
        group, sender = jnp.divmod(jnp.arange(valid.shape[0]) // (valid.shape[0] // m), domain.group_size)
    plan = jax.vmap(jax.vmap(functools.partial(plan_loans, cfg=cfg)))
    loans = plan(loads.reshape(loads.shape[0], -1, domain.size, domain.num_own))
    row = group[:, None] * counts.shape[1] + routing.expert
    flat = lambda table: table.reshape(-1, domain.size)[row]  # [g, S, n, e, n] -> [t, k, n]
    place = (_draw(ranks.rank, sender, domain.group_size)[..., None] >= flat(_cuts(loans.rows))).sum(-1)
    seat = jnp.take_along_axis(flat(_seats(loans, domain)), place[..., None], -1)[..., 0].astype(jnp.int32)
    away = seat // domain.device_seats != routing.expert // domain.num_own
    moved = (away & routing.counted(valid)).sum(dtype=jnp.int32)
    return Lending(seat, counts, loads, _lane_table(loans, domain), moved, domain)


def _draw(rank, sender, num_senders):
    """[t, k] numbers below 2**DEAL_BITS, evenly spread over the ranks of each sender, each of them beginning elsewhere."""
    phase = sender.astype(jnp.uint32) * jnp.uint32(2**32 // num_senders)
    bits = rank.astype(jnp.uint32) * jnp.uint32(GOLDEN) + phase[:, None]
    return (bits >> (32 - DEAL_BITS)).astype(jnp.int32)


def _cuts(rows: Int[Array, "*b n"]) -> Int[Array, "*b n"]:
    """Where each device's share of an expert's rows ends, of 2**DEAL_BITS. Whole shares by comparison: x / x can be below 1."""
    end = jnp.cumsum(rows, -1)
    share = jnp.floor(end.astype(jnp.float32) / jnp.maximum(end[..., -1:], 1) * 2**DEAL_BITS)
    return jnp.where(end == end[..., -1:], 2**DEAL_BITS, share.astype(jnp.int32))


def _seats(loans: Loans, domain: Domain) -> Int[Array, "g S n e n"]:
    """The seat of each expert, by domain and owner, on each host."""
    n, e = domain.size, domain.num_own
    num_domains = loans.lane.shape[1]
    owner, expert, host = jnp.arange(n)[:, None, None], jnp.arange(e)[:, None], jnp.arange(n)
    inside = jnp.where(owner == host, expert, e + owner * domain.pair + jnp.maximum(loans.lane, 0))
    first = jnp.arange(num_domains)[:, None, None, None] * n + host
    return first * domain.device_seats + inside


def _lane_table(loans: Loans, domain: Domain) -> Int[Array, "g S n n p"]:
    """By owner, host and lane: which of the owner's experts travels there; e where none."""
    there = loans.lane[..., None] == jnp.arange(domain.pair)  # [g, S, n, e, n, p]
    return jnp.where(there.any(3), there.argmax(3), domain.num_own).astype(jnp.int32)


def seat_level_loads(top_k: int, domain: Domain) -> tuple[float, ...]:
    """Shares for pools of seats that an even load never exceeds: a level j has at most 1 / (j + 1) of a pool's pairs.

    What sits on a device changes from step to step, so no statistics of its experts hold: one that works for a few hot ones
    has many tokens with one level, another few with many.
    """
    depth = min(top_k, domain.device_seats)
    return tuple(min(1.0, top_k / domain.group_size / (level + 1)) for level in range(depth))


def axes_of(cfg: RebalanceConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The axes of the domain that the mesh has, among the expert axes `names`."""
    return tuple(name for name in ax.as_tuple(cfg.axis) if name in names)


def domain_of(cfg: MoEConfig, expert_axes: tuple[str, ...]) -> Domain:
    """The sizes, from the mesh; without expert axes from what the config says of it."""
    rule = cfg.rebalance
    assert rule is not None, "who asks for a domain has a rule"
    shards = ax.axis_size(expert_axes) if expert_axes else cfg.num_destinations or 1
    size = ax.axis_size(axes_of(rule, expert_axes)) if expert_axes else rule.num_devices or shards
    return Domain(size, shards, cfg.num_places // shards, rule.pair)


def lent_config(cfg: MoEConfig, domain: Domain) -> MoEConfig:
    """The layer whose plan knows seats in place of experts; its pools are as large as even loads need."""
    return cfg.seated(domain.num_seats, seat_level_loads(cfg.top_k, domain))


def loan_stats(
    routing: Routing, valid: Bool[Array, "t"], num_senders: int, lending: Lending, cfg: MoEConfig, axes: ShardAxes
) -> RebalanceStats:
    """What was lent, and what the layer would have done without, its pools with caps for uniform routing."""
    domain, num_devices = lending.domain, lending.domain.group_size
    if cfg.capacity == "pool":
        plain = dataclasses.replace(cfg, level_loads=None)
        held = held_rows(routing, valid, num_senders, plain, num_devices, axes.expert)
    else:
        held = lending.loads.reshape(lending.loads.shape[0], num_devices, -1).sum(-1)
    mine = held[0, ax.axis_index(axes.expert)] if axes.expert else held.sum()
    lanes = (lending.lane < domain.num_own).sum(dtype=jnp.int32)  # of the group: all its devices say the same
    total = (mine, lending.num_moved, lanes, lending.counts.sum(dtype=jnp.int32))
    worked, moved, lanes, routed = ax.sum_over(ax.vary_over(total, axes.tokens), axes.tokens)
    lanes = lanes // num_devices if axes.expert else lanes
    moved_bytes = lanes.astype(jnp.float32) * expert_bytes(cfg.d_model, cfg.d_ff, cfg.activation, cfg.dtype)
    return RebalanceStats(moved, lanes, moved_bytes, straggler(mine, axes.tokens), routed - worked)


def held_rows(
    routing: Routing, valid: Bool[Array, "t"], num_senders: int, cfg: MoEConfig, num_devices: int, axes: tuple[str, ...]
) -> Int[Array, "g N"]:
    """Rows that each device of a group works on under the pools' rule. Counts alone: nothing is sorted.

    Args:
      routing: to experts, or to seats.
      valid: [t] which tokens count.
      num_senders: m, on this shard.
      cfg: the layer, with as many experts as the routing knows.
      num_devices: N.
      axes: the expert axes; without any, every N senders of this shard are a group.
    """
    rule = cfg.pool_rule(valid.shape[0] // num_senders, num_devices)
    there = (routing.expert // (cfg.num_places // num_devices))[..., None] == jnp.arange(num_devices)
    depth = (there & routing.counted(valid)[..., None]).sum(1)  # [t, N] levels of each token at each device
    has_level = (depth[..., None] > jnp.arange(len(rule.caps))).reshape(num_senders, -1, num_devices, len(rule.caps))
    sent = jnp.minimum(has_level.sum(1), jnp.asarray(rule.caps)).sum(-1, dtype=jnp.int32)  # [m, N]
    held = lax.psum(sent.sum(0, keepdims=True), axes) if axes else sent.reshape(-1, num_devices, num_devices).sum(1)
    return held if rule.max_rows is None else jnp.minimum(held, rule.max_rows)
