"""Experts that move between steps, where their loads make it pay."""

import math
from typing import Any

import jax
import numpy as np

from layouts.moves import LoadHistory, MoveCost, improve
from moejax.axes import mesh_size
from moejax.migration import leaves_with_slots, migrate, num_moved, placements_of
from moejax.placement import ExpertPlacement
from moejax.step import TrainState
from train.config import RULES, TrainConfig


class Mover:
    """Watches the experts' loads, and every so many steps moves experts between slots."""

    def __init__(self, cfg: TrainConfig, kept: dict[str, Any] | None = None):
        """Args: cfg, the run's; kept, what `keep` gave when the run was saved, or None at its start."""
        self.cfg = cfg
        total, weight = (None, 0.0) if kept is None else (np.asarray(kept["total"]), kept["weight"])
        self.history = LoadHistory(cfg.placement.decay, total, weight)

    def add(self, metrics: dict[str, Any]) -> None:
        """Takes notice of a step's loads."""
        if self.cfg.placement.every:
            self.history = self.history.add(np.asarray(metrics["tokens_per_expert"]))

    def due(self, step: int) -> bool:
        """Whether experts may move after this step."""
        return self.cfg.placement.every > 0 and step % self.cfg.placement.every == 0

    def move(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state after the moves that pay, and what to log: by layer the slots moved, and the fullest device's load over
        the mean, before and after."""
        mesh = jax.sharding.get_mesh()
        num_devices, cost = mesh_size(mesh, RULES.axes("expert", mesh)), move_cost(self.cfg, state)
        before, loads = placements_of(state.router), self.history.mean
        after = [improve(one, load, num_devices, cost) for one, load in zip(before, loads, strict=True)]
        moved = [num_moved(*pair) for pair in zip(before, after, strict=True)]
        fullest = lambda placements: [_fullest(*pair, num_devices) for pair in zip(placements, loads, strict=True)]
        found = {"moved": moved, "load_before": fullest(before), "load_after": fullest(after)}
        return (migrate(state, after, RULES) if any(moved) else state), found

    def keep(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of it, as JSON."""
        total = self.history.total
        return None if total is None else {"total": total.tolist(), "weight": self.history.weight}


def move_cost(cfg: TrainConfig, state: TrainState) -> MoveCost:
    """What a move costs in this run: an expert's parameters and moments over the wire, a row's products on a device."""
    slots = lambda tree: [(leaf, table.expert.size) for leaf, table in leaves_with_slots(tree, state.router)]
    slot_bytes = sum(leaf.nbytes / num for tree in (state.params, state.opt_state) for leaf, num in slots(tree))
    numbers = sum(math.prod(leaf.shape) / num for leaf, num in slots(state.params))
    # A product forward and two backward, a multiplication and an addition each.
    row_seconds = 6 * numbers / cfg.placement.flops_per_second
    return MoveCost(slot_bytes, cfg.placement.bytes_per_second, row_seconds, cfg.placement.horizon_steps)


def _fullest(placement: ExpertPlacement, loads: np.ndarray, num_devices: int) -> float:
    of_device = placement.device_loads(loads, num_devices)
    return float(of_device.max() / max(of_device.mean(), 1e-9))
