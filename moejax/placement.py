"""ExpertPlacement: which expert is in which slot of the weights, replicas included, and what devices do about it.

The weights of a layer with `MoEConfig.num_slots` have a slot for every copy of an expert, [P, ...] instead of [E, ...]. Which
expert a slot holds is data, an `ExpertTable` among the routers' states: experts move, get replicas or lose a device without
another compilation.

E: experts, P: slots, p: slots of one shard, R: slots that one expert can have, X: experts that can have more than one,
t: tokens on this shard, k: experts per token.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from moejax import axes as ax
from moejax.load_state import LoadState
from moejax.pytree import pytree


@pytree
class ExpertTable(LoadState):
    """A placement as the devices read it. No forward and no load changes it: migrations do, between steps.

    Attributes:
      slots: [E, R] int32, the live slots of each expert first, then P.
      count: [E] int32, how many of them there are; 0: the expert is missing.
      expert: [P] int32, the expert in each live slot; E where there is none.
      primary: [P] bool, the first live slot of its expert.
      shared: [P] int32, a number from 0 for each expert with several live slots; X where it has one.
    """

    slots: Int[Array, "*layers E R"]
    count: Int[Array, "*layers E"]
    expert: Int[Array, "*layers P"]
    primary: Bool[Array, "*layers P"]
    shared: Int[Array, "*layers P"]

    def update(self, tokens_per_expert: Int[Array, "*layers E"]) -> "ExpertTable":
        """The table itself."""
        return self

    @property
    def loads_shape(self) -> tuple[int, ...]:
        """(*layers, E)."""
        return self.count.shape

    @property
    def most_shared(self) -> int:
        """X."""
        return self.slots.shape[-1] - 1


@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """Which expert each slot holds.

    Attributes:
      num_experts: E.
      expert_of: for each of the P slots its expert, or -1 for an empty one. Every expert has a slot. Slots belong to expert
        shards in equal consecutive parts.
      dead: slots whose device is gone, or not to be used: their experts are served from other slots, or are missing.
    """

    num_experts: int
    expert_of: tuple[int, ...]
    dead: frozenset[int] = frozenset()

    def __post_init__(self):
        wrong = [e for e in self.expert_of if type(e) is not int or not -1 <= e < self.num_experts]
        if wrong:
            raise ValueError(f"expert_of holds {wrong[0]!r}: needs experts 0 to {self.num_experts - 1}, or -1 for none")
        lost = sorted(set(range(self.num_experts)) - set(self.expert_of))
        if lost:
            raise ValueError(f"expert_of={self.expert_of}: expert {lost[0]} has no slot; every expert needs one")
        wrong = sorted(slot for slot in self.dead if not 0 <= slot < self.num_slots)
        if wrong:
            raise ValueError(f"dead slot {wrong[0]!r}: needs slots 0 to {self.num_slots - 1}")

    @classmethod
    def even(cls, num_experts: int, num_slots: int) -> "ExpertPlacement":
        """The first one of a layer: experts in order, then from the first one on again."""
        return cls(num_experts, tuple(slot % num_experts for slot in range(num_slots)))

    @property
    def num_slots(self) -> int:
        """P."""
        return len(self.expert_of)

    def slots_of(self, expert: int) -> tuple[int, ...]:
        """The live slots of an expert, ascending."""
        return tuple(slot for slot, e in enumerate(self.expert_of) if e == expert and slot not in self.dead)

    @property
    def missing(self) -> tuple[int, ...]:
        """The experts without a live slot."""
        return tuple(e for e in range(self.num_experts) if not self.slots_of(e))

    def without_devices(self, devices: Sequence[int], num_devices: int) -> "ExpertPlacement":
        """The same with these of the expert shards gone, and no other."""
        wrong = [device for device in devices if not 0 <= device < num_devices]
        if wrong:
            raise ValueError(f"device {wrong[0]!r}: needs 0 to {num_devices - 1}")
        own = self._own(num_devices)
        dead = frozenset(slot for device in devices for slot in range(device * own, (device + 1) * own))
        return dataclasses.replace(self, dead=dead)

    def put(self, expert: int, slot: int) -> "ExpertPlacement":
        """The same with this expert in this slot, or with the slot empty for -1: expands one expert, shrinks another."""
        expert_of = list(self.expert_of)
        expert_of[slot] = expert
        return dataclasses.replace(self, expert_of=tuple(expert_of))

    def swap(self, one: int, other: int) -> "ExpertPlacement":
        """The same with the experts of two slots exchanged."""
        expert_of = list(self.expert_of)
        expert_of[one], expert_of[other] = expert_of[other], expert_of[one]
        return dataclasses.replace(self, expert_of=tuple(expert_of))

    def device_loads(self, loads: Sequence[float] | np.ndarray, num_devices: int) -> np.ndarray:
        """[num_devices] the load of each expert shard, where every expert's load [E] is divided evenly over its live slots."""
        expert, live = np.array(self.expert_of), self.live
        count = np.bincount(expert[live], minlength=self.num_experts)
        of_slot = np.where(live, (np.asarray(loads, float) / np.maximum(count, 1))[expert], 0.0)
        return of_slot.reshape(num_devices, self._own(num_devices)).sum(1)

    @property
    def live(self) -> np.ndarray:
        """[P] bool, the slots that hold an expert and are not dead."""
        return np.array([e >= 0 and slot not in self.dead for slot, e in enumerate(self.expert_of)])

    def table(self) -> ExpertTable:
        """The placement for the devices."""
        P, E = self.num_slots, self.num_experts
        slots, count = np.full((E, P - E + 1), P, np.int32), np.zeros(E, np.int32)
        live = np.full(P, E, np.int32)
        for slot, e in enumerate(self.expert_of):
            if e >= 0 and slot not in self.dead:
                live[slot], slots[e, count[e]] = e, slot
                count[e] += 1
        first = np.zeros(P + 1, bool)
        first[slots[:, 0]] = True
        several = np.where(count > 1, np.cumsum(count > 1) - 1, P - E)
        shared = np.append(several, P - E)[live].astype(np.int32)
        return ExpertTable(*map(jnp.asarray, (slots, count, live, first[:P], shared)))

    @classmethod
    def of_table(cls, table: ExpertTable, before: "ExpertPlacement | None" = None) -> "ExpertPlacement":
        """The placement of one layer's table. Its dead slots are those of the placement `before` it; None: they are empty."""
        num_experts, live = table.count.shape[0], np.asarray(table.expert).tolist()
        dead = frozenset(slot for slot in before.dead if live[slot] == num_experts) if before else frozenset()
        held = [before.expert_of[slot] if before and slot in dead else -1 for slot in range(len(live))]
        return cls(num_experts, tuple(e if e < num_experts else held[slot] for slot, e in enumerate(live)), dead)

    def _own(self, num_devices: int) -> int:
        if self.num_slots % num_devices:
            raise ValueError(f"num_slots={self.num_slots} is not divisible by {num_devices} expert shards")
        return self.num_slots // num_devices


def choose_slots(
    expert: Int[Array, "t k"], counted: Bool[Array, "t k"], table: ExpertTable, senders: tuple[int, Array | int]
) -> tuple[Int[Array, "t k"], Bool[Array, "t k"]]:
    """The slot that serves each pair, and whether there is one.

    A sender's tokens go to an expert's slots in turn, so each gets as many of them as every other, up to one; which slot is
    first depends on the sender.

    Args:
      expert: [t, k].
      counted: [t, k] the pairs that count.
      table: where experts are.
      senders: how many are on this shard, and the number of the first one over all shards.
    """
    num_experts, most = table.count.shape[0], table.slots.shape[1]
    turn = jnp.zeros_like(expert)
    if most > 1:
        member = ((expert[:, :, None] == jnp.arange(num_experts)) & counted[:, :, None]).sum(1, dtype=jnp.int32)
        by_sender = member.reshape(senders[0], -1, num_experts)
        before = (jnp.cumsum(by_sender, 1) - by_sender + senders[1]).astype(jnp.int32)
        own = jnp.arange(senders[0], dtype=jnp.int32)[:, None, None]
        turn = jnp.where(expert[:, :, None] == jnp.arange(num_experts), (before + own).reshape(-1, 1, num_experts), 0).sum(-1)
    count = table.count[expert]
    return table.slots[expert, turn % jnp.maximum(count, 1)], count > 0


def by_expert(of_slot: Int[Array, "P"], table: ExpertTable) -> Int[Array, "E"]:
    """Counts of slots as counts of experts."""
    here = table.expert == jnp.arange(table.count.shape[0])[:, None]
    return jnp.where(here, of_slot, 0).sum(1, dtype=of_slot.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def tied(weights: Array, table: ExpertTable, axes: tuple[str, ...]) -> Array:
    """The weights [p, ...] of this shard's slots; their gradients are summed over the slots of each expert, all of which get
    the sum. What crosses the expert axes are the experts with several slots."""
    return weights


def _tied_bwd(axes, table, cotangent):
    return across_slots(cotangent, table, axes, jnp.ones_like(table.primary)), None


tied.defvjp(lambda weights, table, axes: (weights, table), _tied_bwd)


def across_slots(values: Array, table: ExpertTable, axes: tuple[str, ...], give: Bool[Array, "P"]) -> Array:
    """[p, ...] with the sum over the slots of an expert that give, in all live slots of the experts that have several.

    Args:
      values: of this shard's slots.
      table: where experts are.
      axes: the expert axes.
      give: [P] the slots that are summed.
    """
    own, most = values.shape[0], table.most_shared
    if not most:
        return values
    first = ax.axis_index(axes) * own
    shared, gives = (lax.dynamic_slice_in_dim(part, first, own) for part in (table.shared, give))
    wide = lambda mask: mask.reshape(-1, *[1] * (values.ndim - 1))
    total = jax.ops.segment_sum(jnp.where(wide(gives), values, 0), shared, most + 1)[:most]
    total = ax.sum_over(total, axes)
    return jnp.where(wide(shared < most), total[jnp.minimum(shared, most - 1)], values)
