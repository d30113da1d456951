"""How even experts' work gets, how little is dropped, and the weights that move for it: plans, no clock.

128 experts, 8 a token, 4,096 tokens a device, pools at capacity factor 1.1, the layer's own plan and drop rule
(`moejax.forecast`). Loads: each micro-batch draws the experts' popularity anew, of a log-normal of deviation 0.8, or by Zipf's
law, 1 / rank with the ranks in random order; "steady" keeps one log-normal popularity for all of them; tokens draw their
experts by it, without replacement. The trace is what a model chose (`benchmarks/data`).

FEPLB's rules, whole or divided, lend experts within a micro-batch. EPLB and FlexMoE move them between micro-batches, by the
loads of those before, to slots of which there are an eighth more than experts: EPLB's placement is made anew each time,
FlexMoE's changes only where that pays over 50 steps on H100. "+ divide" lends from their slots. Figures are means over
micro-batches that have one before them; the straggler is max - mean of the devices' rows. Experts are OLMoE-like, d 2048 and
f 1024: lent weights are bfloat16, moved ones float32 with Adam's two moments.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax
from layouts.moves import LoadHistory, MoveCost, improve
from layouts.placement import replicate
from moejax.migration import num_moved
from moejax.placement import choose_slots

AIM = (
    "EP 8, dyn 4, log-normal: divided, hot >= 97% of the straggler removed, whole, hot >= 80% (FEPLB's paper, fixed ids: 70%; "
    "FasterMoE: 39%); dropped at factor 1.1 with division <= 0.5%"
)
GROUPS = (2, 4, 8)
DYN = (2, 4, 8)
TOKENS_A_DEVICE = 4096
MICROBATCHES = 5
TRACE = Path(__file__).resolve().parent / "data" / "demo_trace.npz"
LAYER: dict[str, Any] = {"d_model": 2048, "d_ff": 1024, "capacity": "pool", "capacity_factor": 1.1}
EXPERT_NUMBERS = 3 * LAYER["d_model"] * LAYER["d_ff"]
LENT_BYTES, MOVED_BYTES = 2 * EXPERT_NUMBERS, 12 * EXPERT_NUMBERS
# H100: 450 GB/s of NVLink; a row's products, forward and backward, at 0.6 of 989 TFLOP/s.
COST = MoveCost(MOVED_BYTES, 450e9, 6 * EXPERT_NUMBERS / (0.6 * 989e12), 50)


@dataclasses.dataclass(frozen=True)
class Case:
    """Micro-batches of routing.

    Attributes:
      num_experts: experts, or slots.
      experts: [batches, devices, tokens, k].
      layers: how many take turns: a micro-batch's layer was last seen so many before it.
    """

    num_experts: int
    experts: np.ndarray
    layers: int = 1

    def config(self, **rule: Any) -> moejax.MoEConfig:
        """The layer, with experts lent by the rule."""
        top_k = self.experts.shape[-1]
        return moejax.MoEConfig(**LAYER, num_experts=self.num_experts, top_k=top_k, rebalance=moejax.RebalanceConfig(**rule))

    def seen(self, **rule: Any) -> list[Any]:
        """What the layer would do to each micro-batch that has one before it."""
        cfg = self.config(**rule)
        return [moejax.forecast(jnp.asarray(batch), cfg) for batch in self.experts[self.layers :]]


def lognormal(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """Logarithms of popularities, of deviation 0.8."""
    return rng.normal(0, 0.8, num_experts)


def zipf(rng: np.random.Generator, num_experts: int) -> np.ndarray:
    """-log(rank), the ranks in random order."""
    return -np.log(1 + rng.permutation(num_experts))


def drawn(popularity: Any, num_devices: int, *, steady: bool = False, num_experts: int = 128, top_k: int = 8) -> Case:
    """Tokens that draw their experts by popularity: Gumbel noise on its logarithm, the k largest."""
    rng = np.random.default_rng(num_devices)
    kept = popularity(rng, num_experts)

    def microbatch() -> np.ndarray:
        now = kept if steady else popularity(rng, num_experts)
        scores = rng.gumbel(size=(num_devices, TOKENS_A_DEVICE, num_experts)) + now
        return np.argpartition(-scores, top_k, axis=-1)[..., :top_k].astype(np.int32)

    return Case(num_experts, np.stack([microbatch() for _ in range(MICROBATCHES)]))


def trace(num_devices: int) -> Case:
    """What the demo's model chose, its two layers in turn, a step a micro-batch, its tokens divided over devices in order."""
    with np.load(TRACE) as stored:
        expert, num_experts = stored["expert"].astype(np.int32), int(stored["num_experts"])
    return Case(num_experts, expert.reshape(expert.shape[0], num_devices, -1, expert.shape[-1]), layers=2)


LOADS = {
    "log-normal": lambda n: drawn(lognormal, n),
    "log-normal, steady": lambda n: drawn(lognormal, n, steady=True),
    "Zipf": lambda n: drawn(zipf, n),
    "demo trace": trace,
}


def rules(num_devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rules compared, by name: with lanes enough for all that may be lent to go somewhere."""
    for move, pick, dyn in itertools.product(("whole", "divide"), ("fixed", "hot"), DYN):
        pair = max(2, -(-dyn // (num_devices - 1)))
        yield f"{move}, {pick}, dyn {dyn}", {"move": move, "pick": pick, "dyn": dyn, "pair": pair}


def eplb(before: moejax.ExpertPlacement, loads: np.ndarray, num_devices: int) -> moejax.ExpertPlacement:
    """EPLB's placement, whatever there was before."""
    return replicate(loads, before.num_slots, num_devices)


def flexmoe(before: moejax.ExpertPlacement, loads: np.ndarray, num_devices: int) -> moejax.ExpertPlacement:
    """The placement before, or the balanced one, its devices numbered so that few slots change, where the change pays."""
    return improve(before, loads, num_devices, COST, max_moves=0)  # single moves: minutes for 128 experts


PLACERS = {"EPLB": eplb, "FlexMoE": flexmoe}
Placer = Callable[[moejax.ExpertPlacement, np.ndarray, int], moejax.ExpertPlacement]


def placed(case: Case, placer: Placer) -> tuple[Case, float]:
    """The case by slots, each micro-batch placed by the loads of those before, and the slots that a placement changes."""
    num_devices = case.experts.shape[1]
    num_slots = -(-case.num_experts * 9 // (8 * num_devices)) * num_devices
    even = moejax.ExpertPlacement.even(case.num_experts, num_slots)
    placements, histories, moved, slots = [even] * case.layers, [LoadHistory()] * case.layers, [], []
    for index, batch in enumerate(case.experts):
        layer, before = index % case.layers, placements[index % case.layers]
        if index >= case.layers:
            placements[layer] = placer(before, histories[layer].mean, num_devices)
            moved.append(num_moved(before, placements[layer]))
        histories[layer] = histories[layer].add(np.bincount(batch.reshape(-1), minlength=case.num_experts))
        slots.append(_slots(jnp.asarray(batch), placements[layer].table()))
    return Case(num_slots, np.stack(slots), case.layers), float(np.mean(moved))


@jax.jit
def _slots(batch: Any, table: Any) -> Any:
    """[devices, tokens, k] experts as slots, by the layer's rule."""
    expert = batch.reshape(-1, batch.shape[-1])
    return choose_slots(expert, jnp.ones_like(expert, bool), table, (batch.shape[0], 0))[0].reshape(batch.shape)


def run() -> list[dict]:
    """A row per load, group of devices and rule; the first of each group lends and moves nothing."""
    return [row for load in LOADS for num_devices in GROUPS for row in _group(load, num_devices)]


def _group(load: str, num_devices: int) -> list[dict]:
    case, pair = LOADS[load](num_devices), max(2, -(-4 // (num_devices - 1)))
    plain = case.seen()
    figures = functools.partial(_figures, {"load": load, "devices": num_devices}, _mean(plain, "straggler_before"), case)
    found = [figures("none", plain, lent=False)]
    for name, rule in rules(num_devices):
        found.append(figures(name, case.seen(**rule), pair=rule["pair"]))
    for name, placer in PLACERS.items():
        there, moved = placed(case, placer)
        found.append(figures(name, there.seen(), lent=False, moved=moved))
        lent = there.seen(move="divide", pick="hot", dyn=4, pair=pair)
        found.append(figures(f"{name} + divide, hot, dyn 4", lent, pair=pair, moved=moved))
    return found


def _mean(seen: Sequence[Any], figure: str) -> float:
    return float(np.mean([getattr(one, figure) for one in seen]))


def _figures(
    row: dict, before: float, case: Case, rule: str, seen: Sequence[Any], *, lent: bool = True, pair: int = 0, moved: float = 0
) -> dict:
    """Megabytes are of one device: lent ones used, and sent, in one direction of one pass; moved ones between micro-batches."""
    when, num_devices = "after" if lent else "before", row["devices"]
    straggler = _mean(seen, f"straggler_{when}")
    return {
        **row,
        "rule": rule,
        "straggler_rows": straggler,
        "removed_percent": 100 * (1 - straggler / before),
        "dropped_percent": 100 * _mean(seen, f"num_dropped_{when}") / case.experts[0].size,
        "lent_mb": lent * _mean(seen, "moved_bytes") / num_devices / 1e6,
        "lanes_mb": lent * (num_devices - 1) * pair * LENT_BYTES / 1e6,
        "moved_mb": moved * MOVED_BYTES / num_devices / 1e6,
    }
