"""How even experts' work gets within a step, how little is dropped, and the weights that move for it: plans, no clock.

128 experts, 8 a token, 4,096 tokens a device, pools at capacity factor 1.1, the layer's own plan and drop rule
(`moejax.forecast`). Each micro-batch draws the experts' popularity anew, of a log-normal of deviation 0.8, or by Zipf's law,
1 / rank with the ranks in random order; its tokens draw their experts by it, without replacement. The trace is what a model
chose (`benchmarks/data`). Figures are means over micro-batches; the straggler is max - mean of the devices' rows. Weights are
those of OLMoE-like experts, d 2048 and f 1024, in bfloat16; lanes are sent every step, used or not.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import moejax

AIM = (
    "EP 8, dyn 4, log-normal: divided, hot >= 97% of the straggler removed, whole, hot >= 80% (FEPLB's paper, fixed ids: 70%; "
    "FasterMoE: 39%); dropped at factor 1.1 with division <= 0.5%"
)
GROUPS = (2, 4, 8)
DYN = (2, 4, 8)
TOKENS_A_DEVICE = 4096
MICROBATCHES = 4
TRACE = Path(__file__).resolve().parent / "data" / "demo_trace.npz"
LAYER: dict[str, Any] = {"d_model": 2048, "d_ff": 1024, "capacity": "pool", "capacity_factor": 1.1}


@dataclasses.dataclass(frozen=True)
class Case:
    """Micro-batches of routing. Attributes: num_experts; experts, [batches, devices, tokens, k]."""

    num_experts: int
    experts: np.ndarray

    def config(self, **rule: Any) -> moejax.MoEConfig:
        """The layer, with experts lent by the rule."""
        top_k = self.experts.shape[-1]
        return moejax.MoEConfig(**LAYER, num_experts=self.num_experts, top_k=top_k, rebalance=moejax.RebalanceConfig(**rule))


def lognormal(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """Logarithms of popularities, of deviation 0.8."""
    return rng.normal(0, 0.8, num_experts)


def zipf(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """-log(rank), the ranks in random order."""
    return -np.log(1 + rng.permutation(num_experts))


def drawn(popularity: Any, num_devices: int, num_experts: int = 128, top_k: int = 8) -> Case:
    """Tokens that draw their experts by popularity: Gumbel noise on its logarithm, the k largest."""
    rng = np.random.default_rng(num_devices)

    def microbatch() -> np.ndarray:
        scores = rng.gumbel(size=(num_devices, TOKENS_A_DEVICE, num_experts)) + popularity(rng, num_experts)
        return np.argpartition(-scores, top_k, axis=-1)[..., :top_k].astype(np.int32)

    return Case(num_experts, np.stack([microbatch() for _ in range(MICROBATCHES)]))


def trace(num_devices: int) -> Case:
    """What the demo's model chose, a layer and a step a micro-batch, its tokens divided over the devices in their order."""
    with np.load(TRACE) as stored:
        expert, num_experts = stored["expert"].astype(np.int32), int(stored["num_experts"])
    return Case(num_experts, expert.reshape(expert.shape[0], num_devices, -1, expert.shape[-1]))


LOADS = {
    "log-normal": lambda n: drawn(lognormal, n),
    "Zipf": lambda n: drawn(zipf, n),
    "demo trace": trace,
}


def rules(num_devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rules compared, by name: with lanes enough for all that may be lent to go somewhere."""
    for move, pick, dyn in itertools.product(("whole", "divide"), ("fixed", "hot"), DYN):
        pair = max(2, -(-dyn // (num_devices - 1)))
        yield f"{move}, {pick}, dyn {dyn}", {"move": move, "pick": pick, "dyn": dyn, "pair": pair}


def run() -> list[dict]:
    """A row per load, group of devices and rule; the first of each group lends nothing."""
    return [row for load in LOADS for num_devices in GROUPS for row in _group(load, num_devices)]


def _group(load: str, num_devices: int) -> list[dict]:
    case, found = LOADS[load](num_devices), []
    for name, rule in rules(num_devices):
        cfg = case.config(**rule)
        seen = [moejax.forecast(jnp.asarray(batch), cfg) for batch in case.experts]
        mean = lambda figure, seen=seen: float(np.mean([figure(one) for one in seen]))
        row = {"load": load, "devices": num_devices}
        before = mean(lambda one: one.straggler_before)
        if not found:
            found.append(row | _figures("none", before, before, mean(lambda one: one.num_dropped_before), case, 0.0, 0))
        after, dropped = mean(lambda one: one.straggler_after), mean(lambda one: one.num_dropped_after)
        lanes = (num_devices - 1) * rule["pair"]
        moved = mean(lambda one: one.moved_bytes) / num_devices
        found.append(row | _figures(name, before, after, dropped, case, moved, lanes))
    return found


def _figures(rule: str, before: float, after: float, dropped: float, case: Case, moved_bytes: float, lanes: int) -> dict:
    """Megabytes are of one device, in one direction of one pass."""
    expert_bytes = 3 * LAYER["d_model"] * LAYER["d_ff"] * 2
    return {
        "rule": rule,
        "straggler_rows": after,
        "removed_percent": 100 * (1 - after / before),
        "dropped_percent": 100 * dropped / case.experts[0].size,
        "moved_mb": moved_bytes / 1e6,
        "lanes_mb": lanes * expert_bytes / 1e6,
    }
