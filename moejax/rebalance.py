"""Who works on which expert's rows within one step: experts of full devices lent, whole or in parts, to emptier ones.

A *domain* is a group of devices with fast links between them. An expert's *owner* keeps its weights; a *host* works on some
of its rows for this step, with weights that travelled in a *lane*: `pair` lanes lead from each device to each other one.
The plan is a pure function of the rows that each expert has, in integers, so every device makes the same one.

n: devices of a domain, e: experts that each owns, p: lanes from one device to another.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moejax import axes as ax
from moejax.checks import one_of, positive
from moejax.pytree import pytree

PICKS = ("fixed", "hot")
MOVES = ("whole", "divide")


@dataclasses.dataclass(frozen=True)
class RebalanceConfig:
    """How experts are lent within a step (FEPLB, arXiv 2604.19654, for whole ones).

    Args:
      axis: the mesh axis with the fast links, or a tuple of them; the last of those that experts are sharded over.
      dyn: experts of each device that may be lent.
      pair: lanes from a device to another one: what each device sends every step is pair weights to every other.
      max_slots: lent experts that one device hosts at most.
      tau: the least rows for which an expert, or a part of one, is lent.
      pick: which experts may be lent, "hot", those with most rows now, or "fixed", a device's first ones.
      move: "divide", an expert's rows between its owner and any hosts, or "whole", all of them to one host, as in the paper.
      num_devices: devices of a domain, for a reference without that axis; None: all destinations.

    Raises:
      ValueError: for an impossible value, naming it and the legal ones.
    """

    axis: str | tuple[str, ...] = "expert"
    dyn: int = 4
    pair: int = 2
    max_slots: int = 8
    tau: int = 1
    pick: str = "hot"
    move: str = "divide"
    num_devices: int | None = None

    def __post_init__(self):
        names = ax.as_tuple(self.axis) if isinstance(self.axis, str | tuple) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"rebalance axis={self.axis!r}: needs the name of a mesh axis, or a tuple of them")
        for field in ("dyn", "pair", "max_slots", "tau"):
            positive(f"rebalance {field}", getattr(self, field))
        if self.num_devices is not None:
            positive("rebalance num_devices", self.num_devices)
        one_of("rebalance pick", self.pick, PICKS)
        one_of("rebalance move", self.move, MOVES)


@pytree
class Loans:
    """Who works on what.

    Attributes:
      rows: [n, e, n] rows of each owner's each expert on every device; over the last axis they add up to the expert's.
      lane: [n, e, n] the lane in which the expert's weights go there; -1: they do not.
    """

    rows: Int[Array, "n e n"]
    lane: Int[Array, "n e n"]


def plan_loans(load: Int[Array, "n e"], cfg: RebalanceConfig) -> Loans:
    """The loans of one domain.

    Args:
      load: [n, e] rows of each owner's each expert, all below 2**31 together.
      cfg: the rule.
    """
    n = load.shape[0]
    kept = jnp.where(jnp.eye(n, dtype=bool)[:, None, :], load[:, :, None], 0)
    nobody = Loans(kept, jnp.full_like(kept, -1))
    if n == 1:
        return nobody
    index = jnp.broadcast_to(jnp.arange(load.shape[1]), load.shape)
    hottest_first = lambda load: jnp.argsort(-load, axis=1)
    place = jnp.argsort(hottest_first(load), axis=1) if cfg.pick == "hot" else index
    dynamic = place < cfg.dyn
    if cfg.move == "whole":
        return _whole(nobody, dynamic, cfg)
    return _divide(load, hottest_first(jnp.where(dynamic, load, -1)), cfg)


def _divide(load, order, cfg) -> Loans:
    """No loop: what full devices hold over the mean is laid beside what the others lack, and cut there.

    Every owner's hottest expert comes first, then the second ones: so the experts of one owner go to several hosts, and its
    lanes to each of them suffice for more of its rows.
    """
    n = load.shape[0]
    over = load.sum(1) - (load.sum() + n - 1) // n
    spare = jnp.take_along_axis(load, order, 1)[:, : cfg.dyn]
    before = jnp.cumsum(spare, 1) - spare
    given = jnp.clip(jnp.maximum(over, 0)[:, None] - before, 0, spare).T.reshape(-1, 1)
    lacking = jnp.maximum(-over, 0)
    given_stop, lacking_stop = jnp.cumsum(given, 0), jnp.cumsum(lacking)
    part = jnp.minimum(given_stop, lacking_stop) - jnp.maximum(given_stop - given, lacking_stop - lacking)
    part = part.reshape(-1, n, n).swapaxes(0, 1)  # [owner, dyn, host]
    lane = _lanes(part >= cfg.tau, cfg)
    chosen = order[:, : cfg.dyn, None] == jnp.arange(load.shape[1])  # [owner, dyn, expert]
    by_expert = lambda values: jnp.where(chosen[..., None], values[:, :, None, :], 0).sum(1)
    lent = by_expert(jnp.where(lane >= 0, part, 0))
    home = jnp.eye(n, dtype=bool)[:, None, :]
    return Loans(lent + jnp.where(home, (load - lent.sum(2))[..., None], 0), by_expert(lane + 1) - 1)


def _lanes(wanted: Bool[Array, "n e n"], cfg: RebalanceConfig) -> Int[Array, "n e n"]:
    """A lane for each that there is one for, and a slot at the host."""
    number = jnp.cumsum(wanted, 1) - 1
    wanted &= number < cfg.pair
    hosted = jnp.cumsum(wanted.reshape(-1, wanted.shape[2]), 0).reshape(wanted.shape)
    return jnp.where(wanted & (hosted <= cfg.max_slots), number, -1)


def _whole(nobody: Loans, dynamic: Bool[Array, "n e"], cfg: RebalanceConfig) -> Loans:
    """FEPLB's greedy: from the fullest device to the emptiest with room, the largest expert that lowers the fuller of them."""
    n = dynamic.shape[0]

    def step(state):
        i, _, loans = state
        total = loans.rows.sum((0, 1))
        used = (loans.lane >= 0).sum(1)  # [owner, host]
        owner = jnp.argmax(total)
        room = (used[owner] < cfg.pair) & (used.sum(0) < cfg.max_slots) & (jnp.arange(n) != owner)
        host = jnp.argmin(jnp.where(room, total, jnp.iinfo(total.dtype).max))
        mine = loans.rows[owner, :, owner]
        helps = dynamic[owner] & (mine >= cfg.tau) & (total[host] + mine < total[owner]) & room[host]
        expert, any_helps = jnp.argmax(jnp.where(helps, mine, -1)), helps.any()
        moved = jnp.where(any_helps, mine[expert], 0)
        lane = jnp.where(any_helps, used[owner, host], loans.lane[owner, expert, host])
        rows = loans.rows.at[owner, expert, owner].add(-moved).at[owner, expert, host].add(moved)
        return i + 1, any_helps, Loans(rows, loans.lane.at[owner, expert, host].set(lane))

    go = lambda state: state[1] & (state[0] < n * cfg.dyn)
    # As different over manual mesh axes as what the loop makes of them.
    start = ax.vary_alike((jnp.int32(0), jnp.bool_(True), nobody))
    return lax.while_loop(go, step, start)[2]


@dataclasses.dataclass(frozen=True)
class WireCost:
    """Attributes: rows_a_lane, rows whose products take as long, forward, as one expert's weights on the wire; evidence."""

    rows_a_lane: int
    evidence: str


# FLOP/s over bytes/s, whatever d and f: a bfloat16 matrix of an expert has as many bytes as its product with a row has FLOPs.
WIRE_COSTS = {
    "cpu": WireCost(0, "virtual devices share one memory: there is no wire"),
    "gpu": WireCost(1300, "H100: 0.6 of 989 TFLOP/s in bfloat16 over 450 GB/s of NVLink"),
    "tpu": WireCost(3300, "v5p: 0.65 of 459 TFLOP/s in bfloat16 over 90 GB/s of one link"),
}


def why_not(cfg: RebalanceConfig, num_devices: int, group_size: int, device_rows: int, platform: str) -> str | None:
    """Why lending cannot gain anything here, whatever the load; None where it may.

    Every lane is sent every step, used or not. What the products of a device's own rows do not hide of that is lost, and
    the most that can be won is what all the group's rows on one device would take over an even share.

    Args:
      cfg: the rule.
      num_devices: n, of a domain.
      group_size: devices that share the experts.
      device_rows: rows of an even load, tokens x top_k.
      platform: as `moejax.axes.platform` names it.
    """
    if num_devices == 1:
        return "a domain of one device has nobody to lend to"
    every = group_size * device_rows
    if cfg.tau > every:
        return f"tau={cfg.tau} is more than all {every} rows of the {group_size} devices"
    lanes, cost = (num_devices - 1) * cfg.pair, WIRE_COSTS[platform]
    shown = lanes * cost.rows_a_lane - device_rows
    most = every - every // num_devices
    if shown < most:
        return None
    return (
        f"{lanes} lanes of weights take as long as the products of {lanes * cost.rows_a_lane} rows ({cost.evidence}), of "
        f"which a device's own {device_rows} hide as many, and at most {most} rows can be taken off a device"
    )
