"""Bounds of whole layouts: seconds of a step, bytes of a device, for pairs of a mesh and a plan. Legend in `layouts.bounds`."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from layouts.bounds import PROFILE
from layouts.layer_bounds import LayerRows
from layouts.memory import FRAGMENTATION, GATHERED_LAYERS, LOGIT_BYTES

# Bounds are sums in another order than the exact figures: this much of them is left to rounding.
ROUNDING = 1e-9
_STATES = ("states", "stepped", "host", "on_host")


class Rows(LayerRows):
    """Bounds of pairs of a mesh and a plan, the best crossing taken for each."""

    @functools.cached_property
    def head(self) -> np.ndarray:
        """Seconds [n] of logits and loss."""
        cases, where = self.cases
        return np.array([self.bounds.figures.head(d, self.bounds.cuts[cut][0]) for d, _, cut in cases])[where]

    @functools.cached_property
    def transfer(self) -> np.ndarray:
        """Seconds [n] a micro-batch of the transfers between stages that are not hidden, on each stage."""
        size = self.tokens * self.job.model.d_model * self.job.recipe.compute_bytes
        size = size / np.where(self.sequence, self.tensor, 1)
        crossings = (self.stage * self.chunks - 1) / self.stage
        return np.where(self.stage > 1, 2 * crossings * self.line("permute", "stage")(size) * (1 - self.hidden), 0.0)

    @functools.cached_property
    def all_layers(self) -> tuple[int, ...]:
        model = self.job.model
        return model.kind_counts(range(len(model.layers)))

    def pass_seconds(self) -> np.ndarray:
        """Of one micro-batch through all stages, [R,P,n]."""
        layers = sum(count * layer.seconds for count, layer in zip(self.all_layers, self.layers, strict=True))
        return (layers + self.head + self.stage * self.transfer) * (1 - ROUNDING)

    def step_seconds(self) -> np.ndarray:
        """Of a step, [R,P,n]."""
        through = self.pass_seconds()
        longest: Any = 0.0
        for profile in self._each_profile():
            parts = zip(profile[0], self.layers, strict=True)
            longest = np.maximum(longest, sum(n * layer.seconds for n, layer in parts) + profile[3] * self.head + self.transfer)
        waits = self.bubble / np.maximum(1, self.stage - 1)
        run = self.count * longest + waits * np.maximum(0.0, through - longest)
        return (run + self._step_gradients()[:, None] + self._optimizer()) * (1 - ROUNDING)

    def _step_gradients(self) -> np.ndarray:
        """Seconds [R,n] of gradients over replicas, and of the tables' gathers, that the last backward does not hide."""
        took = sum(n * layer.gradients for n, layer in zip(self.all_layers, self.layers, strict=True)) / self.stage
        for numbers in self._tables():
            share = numbers / self.fsdp
            took = took + self.over_replicas(share, "dense")
            recipe = self.job.recipe
            whole = self.line("reduce_scatter", "fsdp")(numbers * recipe.division_bytes)
            gather = self.line("all_gather", "fsdp")(share * recipe.compute_bytes) + whole
            took = took + np.where(self.fsdp > 1, self.count * gather * (1 - self.hidden), 0.0)
        last = sum(n * layer.compute for n, layer in zip(self.all_layers, self.layers, strict=True)) / self.stage
        return np.maximum(0.0, took - self.sums * self.hidden * last * 2 / 3)

    def _tables(self) -> tuple[Any, Any]:
        """Numbers of the embedding and of the head of its own, on a device, before fsdp divides them."""
        model = self.job.model
        each = 1 / self.tensor
        return model.embedding_params * each, (0 if model.tied else model.head.weights) * each

    def host_bytes(self) -> np.ndarray:
        """Bytes of host memory that a device takes, the stages' mean, [P,n]."""
        return self._mean("on_host") * (1 - ROUNDING)

    def _mean(self, name: str) -> np.ndarray:
        """The stages' mean of a figure of layers and tables, one of `_STATES`; [P,n]."""
        groups = zip(("embedding", "head"), self._tables(), strict=True)
        tables = sum(self.group_states(group, numbers)[_STATES.index(name)] for group, numbers in groups)
        layers = sum(n * getattr(layer, name) for n, layer in zip(self.all_layers, self.layers, strict=True))
        return (layers + tables) / self.stage

    def _optimizer(self) -> np.ndarray:
        """Seconds [P,n] of the optimizer and of what lies on the host: the stages' mean."""
        stepped, host = self._mean("stepped"), self._mean("host")
        chip, gives = self.job.chip, self.job.gives
        return stepped / (chip.hbm_bytes_per_second * gives.memory) + host / chip.host_link.bytes_per_second

    # -------------------------------------------------------------------------------------------------------------- memory

    def _each_profile(self) -> Iterator[tuple[np.ndarray, ...]]:
        """The stages that bounds look at: (layers [C,n], live [C,n], embedding [n], head [n], waits [C,n])."""
        found = self.bounds.plans
        for index in range(len(found["head"])):
            yield tuple(found[name][index][self.plan].T for name in PROFILE)

    def peak_bytes(self) -> np.ndarray:
        """Of the fullest device, [R,P,n]."""
        found: Any = 0.0
        for layers, held, embedding, head, waits in self._each_profile():
            states = sum(n * layer.states for n, layer in zip(layers, self.layers, strict=True))
            for part, group, numbers in zip((embedding, head), ("embedding", "head"), self._tables(), strict=True):
                part = np.where(self.stage > 1, 1.0, part) if self.job.recipe.by_chunk else part
                states = states + part * self.group_states(group, numbers)[0]
            counts = zip(held, waits, self.layers, strict=True)
            kept = sum((n * layer.kept + m * layer.awaited for n, m, layer in counts), np.zeros(1))
            moving = kept[:, None] + self._passing(layers, head)
            found = np.maximum(found, states + moving * (1 + FRAGMENTATION))
        cut = (self.stage > 1) & (self.chunks == 1) & self.bounds.uneven
        if not cut.any():
            return found * (1 - ROUNDING)
        return np.where(cut, np.maximum(found, self._cut_bytes()), found) * (1 - ROUNDING)

    def _passing(self, layers: np.ndarray, head: np.ndarray) -> np.ndarray:
        """Bytes [R,P,n] of what comes and goes: gathers, recomputation, logits, rows under way, transfers."""
        model, recipe = self.job.model, self.job.recipe
        fold = functools.partial(_over_kinds, self.stage == 1)
        moved = (self.fsdp > 1) | np.array([any(c == "offload" for _, c in pairs) for pairs in self.choices.policies])[:, None]
        in_use = fold([layer.gathered for layer in self.layers]) * np.where(moved, GATHERED_LAYERS, 1)
        chunk = sum(n * layer.gathered for n, layer in zip(layers, self.layers, strict=True)) / self.chunks
        in_use = np.where(self.stage > 1, np.maximum(in_use, chunk), in_use)
        table = model.vocab_size * model.d_model / self.tensor * recipe.compute_bytes
        in_use = np.where(self.stage == 1, np.maximum(in_use, table), in_use)
        kept = sum(n * layer.kept_parameters for n, layer in zip(layers, self.layers, strict=True))
        gradients = np.where(self.fsdp > 1, fold([layer.all_gathered for layer in self.layers]), 0.0)
        casts = moved | (recipe.param_bytes != recipe.compute_bytes)
        gathered = np.where(casts, in_use + kept + gradients, 0.0)
        width = model.vocab_size / self.tensor * LOGIT_BYTES
        narrow = np.where(self.sequence, self.tensor, 1)
        logits = np.floor(head) * self.tokens * (width + 2 * model.d_model * recipe.compute_bytes / narrow)
        transfers = np.where(self.stage > 1, 2 * self.tokens * model.d_model * recipe.compute_bytes / narrow, 0.0)
        again, under_way = (fold([getattr(layer, name) for layer in self.layers]) for name in ("again", "crossing"))
        return gathered + (again + logits + under_way + transfers)[:, None]

    def _cut_bytes(self) -> np.ndarray:
        """Pipelines of one chunk a stage: the fullest stage of the best cut, were layers divisible. [R,P,n]."""
        found = np.zeros(1)
        waits = self.bounds.plans["waiting"][self.plan].T
        for number, layer in zip(self.all_layers, self.layers, strict=True):
            held: Any = 0.0
            for stage in range(int(self.stage.max())):
                # 1F1B's stages, from the last: each holds a micro-batch more.
                live = np.where(self.falls, stage + 1, np.minimum(self.stage, self.count))
                moving = (live * layer.kept + waits[stage] * layer.awaited)[:, None] * (1 + FRAGMENTATION)
                held = held + np.where(stage < self.stage, 1 / (layer.states + moving), 0.0)
            found = np.maximum(found, number / held)
        return found


def _over_kinds(whole: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """The most over the kinds that one stage certainly has: all where it is the only one, else the least of all kinds."""
    return np.where(whole, functools.reduce(np.maximum, values), functools.reduce(np.minimum, values))
