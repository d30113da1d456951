"""Makers of expert placements from loads: packing, replication flat and by node, and co-activation.

EPLB's problem (DeepSeek, 2024), FlexMoE's moves (arXiv 2304.03946), placement by co-activation (arXiv 2602.21626).
E: experts, P: slots, D: devices, p = P/D: slots of one device.
"""

from collections.abc import Sequence

import numpy as np

from layouts.errors import InputError
from moejax.placement import ExpertPlacement


def balanced_packing(weights: Sequence[float] | np.ndarray, num_packs: int) -> np.ndarray:
    """Items into packs of equal number and about equal weight: heaviest first, each into the lightest pack that has room.

    Args:
      weights: [n] of the items.
      num_packs: divides n.

    Returns:
      [n] the pack of each item.

    Raises:
      InputError: where num_packs does not divide the items.
    """
    weights = np.asarray(weights, float)
    if num_packs < 1 or len(weights) % num_packs:
        raise InputError(f"num_packs={num_packs} does not divide {len(weights)} items: needs a divisor")
    total, room, pack = np.zeros(num_packs), np.full(num_packs, len(weights) // num_packs), np.zeros(len(weights), int)
    for item in np.argsort(-weights, kind="stable"):
        pack[item] = np.argmin(np.where(room > 0, total, np.inf))
        total[pack[item]] += weights[item]
        room[pack[item]] -= 1
    return pack


def replicas(loads: Sequence[float] | np.ndarray, num_slots: int) -> np.ndarray:
    """[E] how many slots each expert gets, one at least: every further slot goes where a slot's load is highest.

    That is the choice whose largest load of a slot is least.
    """
    loads = np.asarray(loads, float)
    if num_slots < len(loads):
        raise InputError(f"num_slots={num_slots}: {len(loads)} experts need that many at least")
    count = np.ones(len(loads), int)
    for _ in range(num_slots - len(loads)):
        count[np.argmax(loads / count)] += 1
    return count


def replicate(
    loads: Sequence[float] | np.ndarray, num_slots: int, num_devices: int, num_nodes: int = 1, num_groups: int = 1
) -> ExpertPlacement:
    """Replicas of the loaded experts, packed onto devices.

    With nodes, groups of experts are packed onto nodes first, and the replicas of an expert stay on its node: what a router
    that is limited to a few groups of experts sends then crosses to few nodes.

    Args:
      loads: [E] tokens of each expert.
      num_slots: P, a multiple of the devices.
      num_devices: D, a multiple of the nodes.
      num_nodes: 1: flat, over all devices.
      num_groups: equal consecutive groups of experts, a multiple of the nodes; 1 where the router has none.

    Raises:
      InputError: where these do not divide.
    """
    loads = np.asarray(loads, float)
    groups = num_groups if num_nodes > 1 else 1
    groups = len(loads) if num_nodes > 1 and groups == 1 else groups
    for what, size, by in (
        ("num_slots", num_slots, num_devices),
        ("num_devices", num_devices, num_nodes),
        ("experts", len(loads), groups),
        ("groups", groups, num_nodes),
    ):
        if by < 1 or size % by:
            raise InputError(f"{what}={size} is not divisible by {by}")
    node_of_group = balanced_packing(loads.reshape(groups, -1).sum(1), num_nodes)
    node_of = np.repeat(node_of_group, len(loads) // groups)
    expert_of: list[int] = []
    for node in range(num_nodes):
        expert_of += _on_devices(np.flatnonzero(node_of == node), loads, num_slots // num_nodes, num_devices // num_nodes)
    return ExpertPlacement(len(loads), tuple(expert_of))


def _on_devices(experts: np.ndarray, loads: np.ndarray, num_slots: int, num_devices: int) -> list[int]:
    """The experts of these slots, device after device."""
    count = replicas(loads[experts], num_slots)
    copies = np.repeat(experts, count)
    device = balanced_packing(np.repeat(loads[experts] / count, count), num_devices)
    return copies[np.argsort(device, kind="stable")].tolist()


def together(
    loads: Sequence[float] | np.ndarray, coactivation: np.ndarray, num_slots: int, num_devices: int, slack: float = 0.1
) -> ExpertPlacement:
    """Replicas as in `replicate`, with experts that tokens use together on one device as far as the balance allows.

    Under pools a token crosses once to each device that it visits, so fewer devices a token are fewer bytes. Starting from the
    balanced packing, slots of two devices are exchanged as long as that raises the co-activation inside devices and keeps the
    fullest device within `slack` of where it was.

    Args:
      loads: [E] tokens of each expert.
      coactivation: [E, E] how many tokens used both, see `layouts.routing_trace.RoutingTrace.coactivation`.
      num_slots: P.
      num_devices: D.
      slack: fraction that the fullest device's load may grow by.
    """
    start = replicate(loads, num_slots, num_devices)
    loads = np.asarray(loads, float)
    expert_of = np.array(start.expert_of)
    weight = (loads / np.bincount(expert_of, minlength=len(loads)))[expert_of]
    device = np.repeat(np.arange(num_devices), num_slots // num_devices)
    both = np.asarray(coactivation, float)
    pull = (both + both.T)[expert_of][:, expert_of]  # symmetric, or exchanges could go round in a circle
    np.fill_diagonal(pull, 0)
    most = (1 + slack) * np.bincount(device, weight, num_devices).max()
    while (better := _best_exchange(device, weight, pull, most)) is not None:
        device[list(better)] = device[list(better)[::-1]]
    return ExpertPlacement(len(loads), tuple(expert_of[np.argsort(device, kind="stable")].tolist()))


def _best_exchange(device: np.ndarray, weight: np.ndarray, pull: np.ndarray, most: float) -> tuple[int, int] | None:
    """The two slots whose exchange raises the pull inside devices most, no device getting more than `most`."""
    inside = pull @ (device[:, None] == np.arange(device.max() + 1))  # [P, D] a slot's pull to each device
    stay, go = inside[np.arange(len(device)), device], inside[:, device]  # [P], [P, P] to the other's device
    gain = go - stay[:, None] + go.T - stay[None, :] - 2 * pull
    total = np.bincount(device, weight)
    after = total[device][:, None] - weight[:, None] + weight[None, :]  # of the first one's device
    gain[(device[:, None] == device) | (after > most) | (most < after.T)] = 0
    one, other = np.unravel_index(np.argmax(gain), gain.shape)
    return (int(one), int(other)) if gain[one, other] > 1e-9 else None


def devices_per_token(expert: np.ndarray, placement: ExpertPlacement, num_devices: int) -> float:
    """Devices that a token of a trace visits, on average, each of its experts being served from its first slot.

    Args:
      expert: [tokens, k], -1 for a choice that is not used.
      placement: where the experts are.
      num_devices: D.
    """
    first = np.array([placement.slots_of(e)[0] for e in range(placement.num_experts)]) // (placement.num_slots // num_devices)
    device = np.where(expert >= 0, first[np.maximum(expert, 0)], -1)
    visited = (device[:, :, None] == np.arange(num_devices)).any(1).sum(1)
    return float(visited[(expert >= 0).any(1)].mean())
