"""What a run watches itself for."""

import dataclasses
import math
from typing import Any

import numpy as np

from train.config import AlarmConfig


def not_finite(metrics: dict[str, Any]) -> str | None:
    """The first of loss and gradient norm that is no finite number, as text, or None."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {float(metrics[name])}"
    return None


@dataclasses.dataclass
class Alarms:
    """Rings once when something begins, and again only after it has ended.

    Attributes:
      cfg: the thresholds.
    """

    cfg: AlarmConfig

    def __post_init__(self):
        self._ringing: set[str] = set()
        self._idle_steps: np.ndarray | None = None

    def check(self, metrics: dict[str, Any]) -> list[str]:
        """What began to be wrong with this step: one line each. Must see every step.

        Args:
          metrics: a step's, as `moejax.step.make_train_step` returns them, on the host.
        """
        if "tokens_per_expert" not in metrics:
            return []
        wrong = self._drops(float(metrics["dropped_fraction"])) | self._dead(np.asarray(metrics["tokens_per_expert"]))
        new = [text for name, text in wrong.items() if name not in self._ringing]
        self._ringing = set(wrong)
        return new

    def _drops(self, fraction: float) -> dict[str, str]:
        if fraction <= self.cfg.dropped_fraction:
            return {}
        return {"drops": f"{fraction:.1%} of the assignments were dropped (alarm above {self.cfg.dropped_fraction:.1%})"}

    def _dead(self, tokens: np.ndarray) -> dict[str, str]:
        """tokens: [layers, E], routed to each expert in this step."""
        before = np.zeros_like(tokens) if self._idle_steps is None else self._idle_steps
        self._idle_steps = np.where(tokens == 0, before + 1, 0)
        dead = np.argwhere(self._idle_steps >= self.cfg.dead_expert_steps)
        return {
            f"dead {layer} {expert}": f"expert {expert} of MoE layer {layer} took no token for "
            f"{self._idle_steps[layer, expert]} steps"
            for layer, expert in dead
        }
