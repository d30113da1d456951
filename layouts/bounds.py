"""Lower bounds of time and memory of many layouts at once: what lets a search price only a few of them exactly.

No layout's step, as `layouts.cost` prices it, is shorter than its bound, and no device's memory, as `layouts.memory` counts
it, smaller. With one stage the bounds are the exact figures but for rounding. Of a pipeline the cuts are open: the longest
stage takes at least the mean, and the fullest one holds at least what the best cut of whole and part layers would.

Shape legend. n: (mesh, plan) pairs, R: remat policies, P: parameter policies, X: ways to cross, C: kinds of layers (lists).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from layouts.cost import Job, bubble
from layouts.figures import Case, Figures, Line, group_numbers
from layouts.layout import Layout
from layouts.live import live
from layouts.memory import CODEC_BYTES, FRAGMENTATION, GATHERED_LAYERS, LOGIT_BYTES
from layouts.messages import uses
from layouts.model import Layer, MoE, norm_params
from layouts.space import Mesh, Option, Plan
from moejax.axes import MESH_AXES

# Bounds are sums in another order than the exact figures: this much of them is left to rounding.
ROUNDING = 1e-9
Crossing = tuple[str, str | tuple[str, str], int]


@dataclasses.dataclass(frozen=True)
class Choices:
    """The options as axes: every combination of the three is one option."""

    remats: tuple[str, ...]
    policies: tuple[tuple[tuple[str, str], ...], ...]
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, options: Sequence[Option]) -> "Choices":
        """The values that the options have, in their order."""
        keep = lambda values: tuple(dict.fromkeys(values))
        return cls(
            keep(option.remat for option in options),
            keep(option.policy for option in options),
            keep((option.exchange, option.codec, option.num_chunks) for option in options),
        )


@dataclasses.dataclass(frozen=True)
class Profile:
    """A stage of a plan, as bounds see it.

    Attributes:
      layers: of each kind, for its time and its states.
      live: micro-batches held of all layers of a kind together, at one moment.
      embedding: share of the embedding that it has.
      head: share of the head.
    """

    layers: tuple[float, ...]
    live: tuple[float, ...]
    embedding: float
    head: float


@dataclasses.dataclass(frozen=True, eq=False)
class Kinds:
    """A model's kinds of layers, by identity: a model's own hash reads all its layers."""

    num_layers: int
    count: Callable[[range], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _LayerBounds:
    """Of one kind of layer: seconds [R,P,n] of a micro-batch; bytes of states [P,n], kept [R,n], and what comes and goes."""

    seconds: np.ndarray
    compute: np.ndarray
    gradients: np.ndarray
    states: np.ndarray
    stepped: np.ndarray
    host: np.ndarray
    on_host: np.ndarray
    kept: np.ndarray
    again: np.ndarray
    gathered: np.ndarray
    all_gathered: np.ndarray
    kept_parameters: np.ndarray
    crossing: np.ndarray


class Bounds:
    """Bounds for the layouts of some meshes."""

    def __init__(self, job: Job, meshes: Sequence[Mesh], plans: Sequence[Plan], choices: Choices, uneven: bool):
        """Args: job, what is searched for (its layout is not read); meshes; plans; choices; uneven, as in Space."""
        self.job, self.meshes, self.choices, self.uneven = job, list(meshes), choices, uneven
        self.figures = Figures(job, choices.remats)
        self.kinds = Kinds(len(job.model.layers), job.model.kind_counts)
        sizes = np.array([mesh.sizes for mesh in self.meshes]).reshape(-1, len(MESH_AXES))
        self.sizes: dict[str, np.ndarray] = {name: sizes[:, index] for index, name in enumerate(MESH_AXES)}
        of = lambda name: np.array([getattr(mesh.layout, name) for mesh in self.meshes])
        names = ("expert_shards", "expert_tensor", "dense_replicas", "expert_replicas", "batch_shards")
        self.sizes |= {name: of(name) for name in names}
        # What a layer's work depends on, of a mesh: few meshes differ in it.
        cut = np.stack([self.sizes[name] for name in ("tensor", "expert_tensor", "expert_shards")])
        cuts, self.cut = np.unique(cut, axis=1, return_inverse=True)
        self.cut, self.cuts = self.cut.reshape(-1), cuts.T.tolist()
        self.numbers = [self._numbers(layer) for layer in job.model.kinds]
        self._lines: dict[tuple, Line] = {}
        self.plans = self._plans(list(plans))

    def case(self, divisor: int, sequence: bool, cut: int, streams: bool) -> Case:
        """The case of a layer where a mesh cuts as `cuts[cut]` says."""
        tensor, expert_tensor, shards = self.cuts[cut]
        return Case(divisor, sequence, tensor, expert_tensor, shards, streams)

    def _plans(self, plans: list[Plan]) -> dict[str, np.ndarray]:
        """What bounds read of each plan, [plan]; of its profiles [profile, plan, ...], shorter lists repeat the last."""
        layouts = [_plan_layout(plan) for plan in plans]
        found = {name: np.array([getattr(plan, name) for plan in plans]) for name in ("stage", "count", "chunks", "sequence")}
        found["over_data"] = np.array([plan.moments == "over_data" for plan in plans])
        found["bubble"] = np.array([bubble(layout) for layout in layouts])
        found["gathers"], found["divisions"] = np.array([uses(layout) for layout in layouts]).reshape(-1, 2).T
        found["falls"] = np.array([plan.schedule == "1f1b" for plan in plans])
        profiles = [_profiles(plan, self.kinds, self.uneven) for plan in plans]
        longest = max(map(len, profiles), default=0)
        padded = [[each[min(index, len(each) - 1)] for each in profiles] for index in range(longest)]
        for name in ("layers", "live", "embedding", "head"):
            found[name] = np.array([[getattr(one, name) for one in row] for row in padded])
        return found

    def _numbers(self, layer: Layer) -> dict[str, np.ndarray]:
        """Numbers of each group of a layer's matrices on one device of each mesh, before fsdp divides them."""
        each = [group_numbers(layer, self.job.model.d_model, *cut) for cut in self.cuts]
        found = {group: np.array([one[group] for one in each])[self.cut] for group in (each[0] if each else ())}
        return {**found, "norms": np.full(len(self.meshes), float(norm_params(self.job.model, layer)))}

    def rows(self, mesh: np.ndarray, plan: np.ndarray, choices: Choices) -> "Rows":
        """Bounds of pairs of a mesh and a plan, the best crossing taken for each.

        Args:
          mesh: [n] indices of meshes.
          plan: [n] indices of plans.
          choices: the remat policies and policies to bound, and the crossings allowed.
        """
        return Rows(self, mesh, plan, choices)

    def line(self, kind: str, axes: str, top_k: int = 1) -> Line:
        """The seconds of a kind of message over axes named by their use, for all meshes."""
        key = (kind, axes, top_k)
        if key not in self._lines:
            self._lines[key] = self._line(kind, _AXES[axes], top_k)
        return self._lines[key]

    def _line(self, kind: str, axes: Callable[[Mesh], tuple[str, ...]], top_k: int) -> Line:
        """Mesh by mesh the same axes but for those of the experts, which have few forms."""
        latency, per_byte = np.zeros((2, len(self.meshes)))
        of = [axes(mesh) for mesh in self.meshes]
        for form in set(of):
            index = np.array([number for number, names in enumerate(of) if names == form])
            found = self.figures.line([self.meshes[number] for number in index], kind, form, top_k)
            latency[index], per_byte[index] = found.latency, found.per_byte
        return Line(latency, per_byte)


_AXES = {
    "tensor": lambda mesh: ("tensor",),
    "context": lambda mesh: ("context",),
    "fsdp": lambda mesh: ("fsdp",),
    "stage": lambda mesh: ("stage",),
    "fold": lambda mesh: mesh.fold,
    "dense": lambda mesh: ("data", "expert", "context"),
    "experts": lambda mesh: tuple(name for name in ("data", "expert", "context") if name not in mesh.fold),
}


class Rows:
    """The pairs [n] of one call."""

    def __init__(self, bounds: Bounds, mesh: np.ndarray, plan: np.ndarray, choices: Choices):
        self.bounds, self.job, self.mesh, self.choices = bounds, bounds.job, mesh, choices
        self.remats = [bounds.choices.remats.index(remat) for remat in choices.remats]
        of = {name: values[plan] for name, values in bounds.plans.items() if name not in _PROFILE}
        self.stage, self.count, self.chunks, self.sequence = of["stage"], of["count"], of["chunks"], of["sequence"]
        self.over_data, self.bubble, self.falls = of["over_data"], of["bubble"], of["falls"]
        self.gathers, self.divisions = of["gathers"], of["divisions"]
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
    def layers(self) -> list[_LayerBounds]:
        """Of each kind."""
        return [self._layer(kind, layer) for kind, layer in enumerate(self.job.model.kinds)]

    def _layer(self, kind: int, layer: Layer) -> _LayerBounds:
        work, rerun, kept, again, rows = self._scalars(kind)
        numbers = self._numbers(kind)
        compute = work + rerun
        side, beside = self._messages(layer, numbers, rows)
        crossing = self._crossings(layer, (rows, numbers), compute[:, None], beside)
        buffer = self._buffers(layer, rows, numbers)
        states, stepped, host, on_host = self._states(layer, numbers)
        in_use, whole, held = (self._gathered(numbers, which) for which in ("use", "all", "keep"))
        seconds = compute[:, None] + side + crossing
        gradients = self._gradients(layer, numbers)
        return _LayerBounds(
            seconds, compute, gradients, states, stepped, host, on_host, kept, again, in_use, whole, held, buffer
        )

    @functools.cached_property
    def cases(self) -> tuple[list[tuple[int, bool, int]], np.ndarray]:
        """The (divisor, sequence, index of what the mesh cuts) that differ, and which of them each pair is."""
        number = len(self.bounds.cuts)
        packed = (self.divisor * 2 + self.sequence) * number + self.bounds.cut[self.mesh]
        cases, where = np.unique(packed, return_inverse=True)
        return [(case // number // 2, bool(case // number % 2), case % number) for case in cases.tolist()], where.reshape(-1)

    def _scalars(self, kind: int) -> tuple[np.ndarray, ...]:
        """work [n], rerun, kept, again [R,n], rows [n] of a kind; where experts may go round, the less of both ways."""
        cases, where = self.cases
        found = []
        for way in sorted({crossing[0] == "weight_stream" for crossing in self.choices.crossings}):
            each = [self.bounds.figures.layer(kind, self.bounds.case(d, s, cut, way)) for d, s, cut in cases]
            lists = [np.array([getattr(one, name) for one in each]) for name in ("work", "rerun", "kept", "again", "rows")]
            found.append([values.T[..., where] for values in lists])
        work, rerun, kept, again, rows = (functools.reduce(np.minimum, values) for values in zip(*found, strict=True))
        return work, rerun[self.remats], kept[self.remats], again[self.remats], rows

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
        divide = self.line("reduce_scatter", "fsdp")(size) * self.divisions
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
        found = [self._group_states(group, count) for group, count in numbers.items()]
        return tuple(functools.reduce(np.add, values) for values in zip(*found, strict=True))

    def _group_states(self, group: str, numbers: np.ndarray) -> tuple[np.ndarray, ...]:
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
        dense = sum(count * self._share(group) for group, count in numbers.items() if group != "experts")
        experts = numbers["experts"] / self.fsdp if "experts" in numbers else np.zeros(len(self.mesh))
        return self._over_replicas(dense, "dense") + self._over_replicas(experts, "experts")

    def _over_replicas(self, numbers: np.ndarray, axes: str) -> np.ndarray:
        recipe = self.job.recipe
        size = numbers * recipe.grad_bytes
        replicas = self.at["dense_replicas" if axes == "dense" else "expert_replicas"]
        gather = self.line("all_gather", axes)(numbers * recipe.param_bytes / replicas)
        divided = self.line("reduce_scatter", axes)(size) + gather
        return np.where(numbers > 0, np.where(self.over_data, divided, self.line("all_reduce", axes)(size)), 0.0)

    # ------------------------------------------------------------------------------------------------------- whole layouts

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
            took = took + self._over_replicas(share, "dense")
            part = share * self.job.recipe.compute_bytes
            gather = self.line("all_gather", "fsdp")(part) + self.line("reduce_scatter", "fsdp")(part * self.fsdp)
            took = took + np.where(self.fsdp > 1, self.count * gather * (1 - self.hidden), 0.0)
        last = sum(n * layer.compute for n, layer in zip(self.all_layers, self.layers, strict=True)) / self.stage
        return np.maximum(0.0, took - self.hidden * last * 2 / 3)

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
        tables = sum(self._group_states(group, numbers)[_STATES.index(name)] for group, numbers in groups)
        layers = sum(n * getattr(layer, name) for n, layer in zip(self.all_layers, self.layers, strict=True))
        return (layers + tables) / self.stage

    def _optimizer(self) -> np.ndarray:
        """Seconds [P,n] of the optimizer and of what lies on the host: the stages' mean."""
        stepped, host = self._mean("stepped"), self._mean("host")
        chip, gives = self.job.chip, self.job.gives
        return stepped / (chip.hbm_bytes_per_second * gives.memory) + host / chip.host_link.bytes_per_second

    # -------------------------------------------------------------------------------------------------------------- memory

    def _each_profile(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """The stages that bounds look at: (layers [C,n], live [C,n], embedding [n], head [n])."""
        found = self.bounds.plans
        for index in range(len(found["head"])):
            layers, held, embedding, head = (found[name][index][self.plan].T for name in _PROFILE)
            yield layers, held, embedding, head

    def peak_bytes(self) -> np.ndarray:
        """Of the fullest device, [R,P,n]."""
        found: Any = 0.0
        for layers, held, embedding, head in self._each_profile():
            states = sum(n * layer.states for n, layer in zip(layers, self.layers, strict=True))
            for part, group, numbers in zip((embedding, head), ("embedding", "head"), self._tables(), strict=True):
                states = states + part * self._group_states(group, numbers)[0]
            moving = sum(n * layer.kept for n, layer in zip(held, self.layers, strict=True))[:, None] + self._passing(
                layers, head
            )
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
        most, found = int(self.stage.max()), np.zeros(1)
        for number, layer in zip(self.all_layers, self.layers, strict=True):
            states, kept = layer.states, layer.kept[:, None] * (1 + FRAGMENTATION)
            held = sum(
                np.where(
                    stage < self.stage,
                    1 / (states + np.where(self.falls, stage + 1, np.minimum(self.stage, self.count)) * kept),
                    0.0,
                )
                for stage in range(most)
            )
            found = np.maximum(found, number / held)
        return found


_STATES = ("states", "stepped", "host", "on_host")
_PROFILE = ("layers", "live", "embedding", "head")
# Groups that fsdp never divides.
_WHOLE = ("norms", "router")


def _over_kinds(whole: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """The most over the kinds that one stage certainly has: all where it is the only one, else the least of all kinds."""
    return np.where(whole, functools.reduce(np.maximum, values), functools.reduce(np.minimum, values))


@functools.lru_cache(maxsize=4096)
def _plan_layout(plan: Plan) -> Layout:
    """The plan's layout on as many devices as it has stages."""
    return Layout(stage=plan.stage, schedule=plan.schedule, stage_chunks=plan.chunks, num_microbatches=plan.count)


@functools.lru_cache(maxsize=4096)
def _profiles(plan: Plan, kinds: "Kinds", uneven: bool) -> tuple[Profile, ...]:
    """One stage: all. Of cuts to be found: the mean stage, and the last with its last layer. Else: those that differ."""
    whole, stage = tuple(map(float, kinds.count(range(kinds.num_layers)))), plan.stage
    if stage == 1:
        return (Profile(whole, whole, 1.0, 1.0),)
    none = (0.0,) * len(whole)
    if uneven and plan.chunks == 1:
        mean = tuple(number / stage for number in whole)
        last = tuple(map(float, kinds.count(range(kinds.num_layers - 1, kinds.num_layers))))
        return Profile(mean, none, 0.0, 1 / stage), Profile(last, last, 0.0, 1.0)
    layout = _plan_layout(plan)
    parts = [kinds.count(part) for part in layout.part_layers(kinds.num_layers)]
    found = {}
    for index, moments in enumerate(live(layout)):
        held = [parts[part] for part in range(index, len(parts), stage)]
        moment = max(moments, key=sum)
        layers = tuple(float(sum(kinds)) for kinds in zip(*held, strict=True))
        alive = tuple(float(sum(m * n for m, n in zip(moment, kinds, strict=True))) for kinds in zip(*held, strict=True))
        profile = Profile(layers, alive, float(index == 0), float(index == stage - 1))
        found.setdefault((layers, profile.embedding, profile.head), profile)
    return tuple(found.values())
