"""Bounds of one layer: seconds and bytes of each kind, for pairs of a mesh and a plan. Legend in `layouts.bounds`."""

import dataclasses
import functools
from typing import Any

import numpy as np

from layouts.bounds import PROFILE, Bounds, Choices
from layouts.figures import Line
from layouts.memory import CODEC_BYTES
from layouts.model import Layer, MoE

# Groups that fsdp never divides.
_WHOLE = ("norms", "router")


@dataclasses.dataclass(frozen=True)
class LayerBounds:
    """Of one kind of layer: seconds [R,P,n] of a micro-batch; bytes of states [P,n], kept and awaited by W [R,n], and what
    comes and goes."""

    seconds: np.ndarray
    compute: np.ndarray
    gradients: np.ndarray
    states: np.ndarray
    stepped: np.ndarray
    host: np.ndarray
    on_host: np.ndarray
    kept: np.ndarray
    again: np.ndarray
    awaited: np.ndarray
    gathered: np.ndarray
    all_gathered: np.ndarray
    kept_parameters: np.ndarray
    crossing: np.ndarray


class LayerRows:
    """What bounds read of the pairs [n] of one call, and their layers' own bounds."""

    def __init__(self, bounds: Bounds, mesh: np.ndarray, plan: np.ndarray, choices: Choices):
        """Of the pairs (mesh[i], plan[i]).

        Args:
          bounds: of the meshes, the plans and all the options.
          mesh: [n] indices of meshes.
          plan: [n] indices of plans.
          choices: the remat policies and policies to bound, and the crossings allowed.
        """
        self.bounds, self.job, self.mesh, self.choices = bounds, bounds.job, mesh, choices
        self.remats = [bounds.choices.remats.index(remat) for remat in choices.remats]
        of = {name: values[plan] for name, values in bounds.plans.items() if name not in PROFILE}
        self.stage, self.count, self.chunks, self.sequence = of["stage"], of["count"], of["chunks"], of["sequence"]
        self.over_data, self.bubble, self.falls = of["over_data"], of["bubble"], of["falls"]
        self.gathers, self.divisions = of["gathers"], of["divisions"]
        # As Recipe.sums.
        self.sums = np.where((self.stage == 1) & self.job.recipe.sums_each, self.count, 1)
        self.plan = plan
        at = {name: values[mesh] for name, values in bounds.sizes.items()}
        self.at = at
        self.tensor, self.fsdp, self.context = at["tensor"], at["fsdp"], at["context"]
        self.divisor = at["batch_shards"] * self.context * self.count
        self.tokens = self.job.batch.tokens / self.divisor
        self.hidden = self.job.gives.hidden
        self._lines: dict[tuple, Line] = {}

    def line(self, kind: str, axes: str, top_k: int = 1) -> Line:
        """The seconds of a kind of message over axes named by their use."""
        key = (kind, axes, top_k)
        if key not in self._lines:
            whole = self.bounds.line(*key)
            self._lines[key] = Line(whole.latency[self.mesh], whole.per_byte[self.mesh])
        return self._lines[key]

    def _numbers(self, kind: int) -> dict[str, np.ndarray]:
        return {group: count[self.mesh] for group, count in self.bounds.numbers[kind].items()}

    def policy(self, group: str) -> np.ndarray:
        """[P,1] of what each policy does with a group."""
        return np.array([dict(pairs).get(group, "gather") for pairs in self.choices.policies])[:, None]

    # -------------------------------------------------------------------------------------------------------------- layers

    @functools.cached_property
    def layers(self) -> list[LayerBounds]:
        """Of each kind."""
        return [self._layer(kind, layer) for kind, layer in enumerate(self.job.model.kinds)]

    def _layer(self, kind: int, layer: Layer) -> LayerBounds:
        work, rerun, kept, again, rows, awaited = self._scalars(kind)
        numbers = self._numbers(kind)
        compute = work + rerun
        side, beside = self._messages(layer, numbers, rows)
        crossing = self._crossings(layer, (rows, numbers), compute[:, None], beside)
        buffer = self._buffers(layer, rows, numbers)
        states, stepped, host, on_host = self._states(layer, numbers)
        in_use, whole, held = (self._gathered(numbers, which) for which in ("use", "all", "keep"))
        seconds = compute[:, None] + side + crossing
        gradients = self._gradients(layer, numbers)
        return LayerBounds(
            seconds, compute, gradients, states, stepped, host, on_host, kept, again, awaited, in_use, whole, held, buffer
        )

    @functools.cached_property
    def cases(self) -> tuple[list[tuple[int, bool, int]], np.ndarray]:
        """The (divisor, sequence, index of what the mesh cuts) that differ, and which of them each pair is."""
        number = len(self.bounds.cuts)
        packed = (self.divisor * 2 + self.sequence) * number + self.bounds.cut[self.mesh]
        cases, where = np.unique(packed, return_inverse=True)
        return [(case // number // 2, bool(case // number % 2), case % number) for case in cases.tolist()], where.reshape(-1)

    def _scalars(self, kind: int) -> tuple[np.ndarray, ...]:
        """work [n], rerun, kept, again [R,n], rows [n], awaited [R,n] of a kind; where experts may go round, the less of
        both ways."""
        cases, where = self.cases
        found, names = [], ("work", "rerun", "kept", "again", "rows", "awaited")
        for way in sorted({crossing[0] == "weight_stream" for crossing in self.choices.crossings}):
            each = [self.bounds.figures.layer(kind, self.bounds.case(d, s, cut, way)) for d, s, cut in cases]
            lists = [np.array([getattr(one, name) for one in each]) for name in names]
            found.append([values.T[..., where] for values in lists])
        least = [functools.reduce(np.minimum, values) for values in zip(*found, strict=True)]
        # One a case, or one a remat policy and case.
        return tuple(values if values.ndim == 1 else values[self.remats] for values in least)

    def _messages(self, layer: Layer, numbers: dict[str, np.ndarray], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds that nothing hides [n], of the tensor axis; and those that hide [P,n], of context and fsdp."""
        recipe, f = self.job.recipe, layer.feed_forward
        size = self.tokens * self.job.model.d_model * recipe.compute_bytes
        times = 2 * (1 if isinstance(f, MoE) and not f.shared_d_ff else 2)
        whole = self.line("all_reduce", "tensor")(size, times)
        parts = self.line("all_gather", "tensor")(size / self.tensor, times) + self.line("reduce_scatter", "tensor")(
            size, times
        )
        side = np.where(self.sequence, parts, whole)
        if isinstance(f, MoE):
            rows = rows * self.job.model.d_model * recipe.compute_bytes
            side = side + np.where(self.at["expert_tensor"] > 1, self.line("all_reduce", "tensor")(rows, 2), 0.0)
        a = layer.attention
        kv = self.tokens * a.num_kv_heads / np.minimum(self.tensor, a.num_kv_heads) * (a.qk_dim + a.v_dim)
        permute = self.line("permute", "context")
        turns = (self.context - 1) * (permute(kv * recipe.compute_bytes) + permute(2 * kv * recipe.compute_bytes))
        return side, turns + sum(self._fsdp(group, count) for group, count in numbers.items() if group not in _WHOLE)

    def _fsdp(self, group: str, numbers: np.ndarray) -> np.ndarray:
        """Seconds a micro-batch [P,n] of one group's gathers and of its gradients' division."""
        size = numbers * self.job.recipe.compute_bytes
        gather = self.line("all_gather", "fsdp")(size / self.fsdp)
        divide = self.line("reduce_scatter", "fsdp")(numbers * self.job.recipe.division_bytes) * self.divisions
        gathers = np.where(self.policy(group) == "keep", 1.0, 2 * self.gathers)
        return (gathers * gather + divide) / self.count

    def _crossings(self, layer: Layer, carried: tuple, compute: np.ndarray, beside: np.ndarray) -> np.ndarray:
        """What the best crossing leaves exposed, together with what is beside it: [R,P,n]."""
        best = None
        for seconds, hides in self._ways(layer, *carried):
            exposed = beside + seconds - np.minimum(self.hidden * (beside + hides * seconds), compute)
            best = exposed if best is None else np.minimum(best, exposed)
        assert best is not None
        return best

    def _ways(self, layer: Layer, rows: np.ndarray, numbers: dict[str, np.ndarray]):
        """(seconds a micro-batch [n], the share of it that may hide) of each way to cross; one of nothing in dense layers."""
        f = layer.feed_forward
        if not isinstance(f, MoE):
            yield np.zeros(len(self.mesh)), 0.0
            return
        d, recipe = self.job.model.d_model, self.job.recipe
        tokens = self.tokens / np.where(self.at["expert_tensor"] < self.tensor, self.tensor, 1)
        shards = self.at["expert_shards"]
        for exchange, codec, chunks in self.choices.crossings:
            codecs = (codec, codec) if isinstance(codec, str) else codec
            sizes = [d * CODEC_BYTES.get(name, recipe.compute_bytes) for name in codecs]
            if exchange == "weight_stream":
                size = numbers["experts"] * recipe.compute_bytes
                permute = self.line("permute", "fold")
                yield (shards - 1) * (permute(size) + permute(2 * size)), 1.0
            elif exchange == "all_gather":
                gather, reduce = self.line("all_gather", "fold"), self.line("reduce_scatter", "fold")
                yield sum(gather(tokens * size) + reduce(tokens * size * shards) for size in sizes), 0.0
            else:
                line = self.line("all_to_all", "fold", f.top_k if exchange == "hierarchical" else 1)
                yield sum(line(rows * size / chunks, 2 * chunks) for size in sizes), 1 - 1 / chunks

    def _buffers(self, layer: Layer, rows: np.ndarray, numbers: dict[str, np.ndarray]) -> np.ndarray:
        """Bytes [n] of what is under way, by the crossing that needs least."""
        if not isinstance(layer.feed_forward, MoE):
            return np.zeros(len(self.mesh))
        d, recipe, found = self.job.model.d_model, self.job.recipe, []
        tokens = self.tokens / np.where(self.at["expert_tensor"] < self.tensor, self.tensor, 1)
        for exchange, codec, chunks in self.choices.crossings:
            row = d * CODEC_BYTES.get(codec if isinstance(codec, str) else codec[0], recipe.compute_bytes)
            sizes = {"weight_stream": 2 * numbers["experts"] * recipe.compute_bytes}
            sizes["all_gather"] = 2 * self.at["expert_shards"] * tokens * row
            found.append(sizes.get(exchange, 2 * min(1.0, 2 / chunks) * rows * row))
        return np.where(self.at["expert_shards"] > 1, functools.reduce(np.minimum, found), 0.0)

    # -------------------------------------------------------------------------------------------------------------- states

    def _share(self, group: str) -> np.ndarray:
        return np.ones(len(self.mesh)) if group in _WHOLE else 1 / self.fsdp

    def _states(self, layer: Layer, numbers: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Bytes [P,n] of a layer's parameters, states and gradients; those an optimizer moves; those that the
        host moves, and keeps."""
        found = [self.group_states(group, count) for group, count in numbers.items()]
        return tuple(functools.reduce(np.add, values) for values in zip(*found, strict=True))

    def group_states(self, group: str, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
        """Bytes [P,n] of one group's numbers, as `_states` lists them."""
        recipe = self.job.recipe
        replicas = np.where(self.over_data, self.at["expert_replicas" if group == "experts" else "dense_replicas"], 1)
        share = numbers * self._share(group)
        stored, moments = share * recipe.param_bytes, share * (recipe.master_bytes + recipe.moment_bytes) / replicas
        here = self.policy(group) != "offload"
        gradients = share * recipe.grad_bytes
        gathers = 2 * self.gathers * (1 - self.hidden)
        host = ~here * (stored * (gathers + 2) + 2 * moments)
        whole = stored + moments
        return here * whole + gradients, 2 * whole + gradients, host, ~here * whole

    def _gathered(self, numbers: dict[str, np.ndarray], which: str) -> np.ndarray:
        """Bytes [P,n] of a layer's whole parameters: used (not kept), all, or kept."""
        found: Any = 0.0
        for group, count in numbers.items():
            kept = self.policy(group) == "keep"
            wanted = {"use": ~kept, "all": np.ones_like(kept), "keep": kept}[which]
            found = found + wanted * count
        return found * self.job.recipe.compute_bytes

    def _gradients(self, layer: Layer, numbers: dict[str, np.ndarray]) -> np.ndarray:
        """Seconds [n] of a layer's gradients over replicas."""
        none = np.zeros(len(self.mesh))
        dense = sum((count * self._share(group) for group, count in numbers.items() if group != "experts"), none)
        experts = numbers["experts"] / self.fsdp if "experts" in numbers else none
        return self.over_replicas(dense, "dense") + self.over_replicas(experts, "experts")

    def over_replicas(self, numbers: np.ndarray, axes: str) -> np.ndarray:
        """Seconds [n] of gradients over the replicas of dense parts or of experts."""
        recipe = self.job.recipe
        size = numbers * recipe.grad_bytes
        replicas = self.at["dense_replicas" if axes == "dense" else "expert_replicas"]
        gather = self.line("all_gather", axes)(numbers * recipe.param_bytes / replicas)
        divided = self.line("reduce_scatter", axes)(size, self.sums) + gather
        whole = self.line("all_reduce", axes)(size, self.sums)
        return np.where(numbers > 0, np.where(self.over_data, divided, whole), 0.0)
