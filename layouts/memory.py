"""Bytes on the devices of each pipeline stage, term by term; the terms add up to the total.

Parameters and what goes with them are counted from the model's own matrices, activations from `layouts.activations`, what a
pipeline has in flight from its schedule's table (`layouts.live`).
"""

import dataclasses
import functools
from collections.abc import Iterator

from layouts.activations import Cut, Kept, awaited, kept_bytes, kept_kinds, tensors
from layouts.layout import Layout
from layouts.live import live, placement, waiting
from layouts.model import Layer, Model, MoE, norm_params, products
from layouts.work import expert_rows
from layouts.workload import Batch, Recipe, check_fit

# What an allocator loses of the memory that comes and goes within a step: holes between arrays of unlike sizes, and rounding.
FRAGMENTATION = 0.02
# Layers whose gathered parameters are there at once: the one in use and the next.
GATHERED_LAYERS = 2
# Logits and their gradient, both float32.
LOGIT_BYTES = 8
CODEC_BYTES = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0}

Terms = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of one stage.

    Attributes:
      stage: its number.
      terms: term -> part -> bytes: parameters, master, moments, gradients (by group of parameters), gathered, activations
        (by tensor, at the fullest moment), recomputed, logits, exchange, transfers, fragmentation.
      host_params: bytes of host memory, a device's, for parameters that are offloaded.
      host_states: the same for their master weights and moments.
    """

    stage: int
    terms: Terms
    host_params: float = 0.0
    host_states: float = 0.0

    @property
    def host_bytes(self) -> float:
        """Of host memory, a device's share."""
        return self.host_params + self.host_states

    def term(self, name: str) -> float:
        """The bytes of one term."""
        return sum(self.terms[name].values())

    @property
    def total_bytes(self) -> float:
        """All terms together."""
        return sum(map(self.term, self.terms))


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the devices of every stage."""

    stages: tuple[StageMemory, ...]

    @property
    def heaviest(self) -> StageMemory:
        """The stage whose devices hold the most."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return self.heaviest.total_bytes


@dataclasses.dataclass(frozen=True)
class _Job:
    model: Model
    layout: Layout
    batch: Batch
    recipe: Recipe

    @property
    def tokens(self) -> float:
        return self.batch.device_tokens(self.layout)

    @functools.cached_property
    def parts(self) -> tuple[dict[Layer, int], ...]:
        """The layers of each part of the model, by kind."""
        cuts = self.layout.part_layers(len(self.model.layers))
        return tuple(self._kinds(part) for part in cuts)

    def _kinds(self, part: range) -> dict[Layer, int]:
        counts = self.model.kind_counts(part)
        return {layer: count for layer, count in zip(self.model.kinds, counts, strict=True) if count}


def memory(model: Model, layout: Layout, batch: Batch, recipe: Recipe) -> Memory:
    """Bytes on the devices of each stage, at the fullest moment of a step.

    Raises:
      InputError: where the layout, the model and the batch do not go together.
    """
    check_fit(model, layout, batch)
    job = _Job(model, layout, batch, recipe)
    return Memory(tuple(_stage(job, stage) for stage in range(layout.stage)))


def stage_with(model: Model, layout: Layout, batch: Batch, recipe: Recipe, held: tuple[int, int, int]) -> StageMemory:
    """Bytes of one stage, wherever the others are cut; for one chunk a stage.

    Args:
      model: the model.
      layout: its cuts are not read.
      batch: of a step.
      recipe: how the executor keeps numbers.
      held: (stage, first layer, end).
    """
    stage, first, end = held
    cuts = [0] * layout.stage
    cuts[0], cuts[-1] = first, len(model.layers) - end
    cuts[stage] = end - first + (first if stage == 0 else 0) + (len(model.layers) - end if stage == layout.stage - 1 else 0)
    return _stage(_Job(model, dataclasses.replace(layout, cuts=tuple(cuts)), batch, recipe), stage)


def _stage(job: _Job, stage: int) -> StageMemory:
    held = placement(job.layout).parts[stage]
    last = len(job.parts) - 1
    counts: dict[str, float] = {}
    for part in held:
        for group, count in _part_params(job, part, last).items():
            counts[group] = counts.get(group, 0.0) + count
    if job.recipe.by_chunk and job.layout.stage > 1:
        counts |= _tables(job.model, job.layout.tensor, together=True)
    layers = {layer for part in held for layer in job.parts[part]}
    terms, *host = _states(job, counts)
    terms["gathered"] = _gathered(job, held, last)
    terms["activations"] = _activations(job, stage, held)
    terms["recomputed"] = {"fullest layer": max((_recomputed(job, layer) for layer in layers), default=0.0)}
    terms["logits"] = _logits(job) if last in held else {}
    terms["exchange"] = {"rows": max((_exchanged(job, layer) for layer in layers), default=0.0)}
    terms["transfers"] = {"between stages": _transfers(job)}
    moving = ("gathered", "activations", "recomputed", "logits", "exchange", "transfers")
    lost = FRAGMENTATION * sum(sum(terms[name].values()) for name in moving)
    return StageMemory(stage, {**terms, "fragmentation": {"holes": lost}}, *host)


# ------------------------------------------------------------------------------------------------- parameters and states


def _part_params(job: _Job, part: int, last: int) -> dict[str, float]:
    """Numbers of a part on one device, by group, before fsdp divides them."""
    model, tensor = job.model, job.layout.tensor
    found: dict[str, float] = {}
    for layer, times in job.parts[part].items():
        for group, count in _layer_counts(model, layer, job.layout).items():
            found[group] = found.get(group, 0.0) + times * count
    tables = _tables(model, tensor, together=last == 0)
    if part == 0:
        found["embedding"] = tables["embedding"]
    if part == last:
        found["head"] = tables["head"]
        found["norms"] = found.get("norms", 0.0) + model.final_norm_params
    return found


def _tables(model: Model, tensor: int, together: bool) -> dict[str, float]:
    """Numbers of embedding and head on one device; tied ones are one table where both are on it (`together`)."""
    head = 0.0 if model.tied and together else model.head.weights / tensor
    return {"embedding": model.embedding_params / tensor, "head": head}


def _layer_counts(model: Model, layer: Layer, layout: Layout) -> dict[str, float]:
    return {"norms": float(norm_params(model, layer)), **_matrix_counts(layer, model.d_model, layout)}


@functools.lru_cache(maxsize=4096)
def _matrix_counts(layer: Layer, d: int, layout: Layout) -> dict[str, float]:
    found: dict[str, float] = {}
    for product in products(layer, d):
        expert = product.group == "experts"
        cut = product.parts(layout.expert_tensor if expert else layout.tensor)
        shards = layout.expert_shards if expert else 1
        # The bias of a product that is split along its rows is not split.
        bias = product.biases / shards / (cut if product.split == "out" else 1)
        found[product.group] = found.get(product.group, 0.0) + product.weights / shards / cut + bias
    return found


def _states(job: _Job, counts: dict[str, float]) -> tuple[Terms, float, float]:
    """Parameters, master weights, moments and gradients by group; and the host's bytes of parameters, and of the rest."""
    recipe, layout = job.recipe, job.layout
    terms: Terms = {"parameters": {}, "master": {}, "moments": {}, "gradients": {}}
    host_params, host_states = 0.0, 0.0
    for group, count in counts.items():
        share = count / (1 if group in ("norms", "router") else layout.fsdp)
        if layout.moments == "over_data":
            replicas = layout.expert_replicas if group == "experts" else layout.dense_replicas
        else:
            replicas = 1
        stored = share * recipe.param_bytes
        states = {"master": share * recipe.master_bytes / replicas, "moments": share * recipe.moment_bytes / replicas}
        if layout.policy_of(group) == "offload":
            host_params += stored
            host_states += sum(states.values())
            stored, states = 0.0, dict.fromkeys(states, 0.0)
        terms["parameters"][group] = stored
        for name, size in states.items():
            terms[name][group] = size
        terms["gradients"][group] = share * recipe.grad_bytes
    return terms, host_params, host_states


def _gathered(job: _Job, held: tuple[int, ...], last: int) -> dict[str, float]:
    """Whole parameters while they are used, and their gradients before they are divided again; casts where those differ."""
    layout, recipe = job.layout, job.recipe
    moved = layout.fsdp > 1 or any(policy == "offload" for _, policy in layout.policy)
    if not moved and recipe.param_bytes == recipe.compute_bytes:
        return {}
    chunks = [job.parts[part] for part in held]
    # A pipeline's chunk is gathered as a whole; without one, layers come one after another.
    whole = lambda chunk, policy: sum(times * _gather_bytes(job, layer, policy) for layer, times in chunk.items())
    uses = [whole(chunk, None) for chunk in chunks] if layout.stage > 1 else []
    uses += [(GATHERED_LAYERS if moved else 1) * _gather_bytes(job, layer) for chunk in chunks for layer in chunk]
    tables = [job.model.vocab_size * job.model.d_model / layout.tensor * recipe.compute_bytes] if {0, last} & {*held} else []
    kept = sum(whole(chunk, "keep") for chunk in chunks)
    every = [_gather_bytes(job, layer, "") for chunk in chunks for layer in chunk] if layout.fsdp > 1 else []
    return {"in use": max([*uses, *tables], default=0.0), "kept": kept, "gradients": max(every, default=0.0)}


def _gather_bytes(job: _Job, layer: Layer, policy: str | None = None) -> float:
    """Whole parameters of a layer: of the groups that are not kept (None), that have a policy, or of all ("")."""
    counts = _layer_counts(job.model, layer, job.layout)
    of = lambda group: job.layout.policy_of(group)
    wanted = [group for group in counts if policy == "" or (of(group) != "keep" if policy is None else of(group) == policy)]
    return sum(counts[group] for group in wanted) * job.recipe.compute_bytes


# ---------------------------------------------------------------------------------------------------------- activations


def _cut(job: _Job, layer: Layer) -> Cut:
    layout = job.layout
    share = 1 / layout.tensor if "tensor" in layout.expert_axes else 1.0
    rows = expert_rows(layer, layout, job.tokens, job.recipe) / job.tokens
    return Cut(layout.tensor, layout.sequence, layout.expert_tensor, rows, share, job.batch.seq)


def _tensors(job: _Job, layer: Layer) -> tuple[Kept, ...]:
    return tensors(layer, job.model.d_model, job.recipe, _cut(job, layer))


def _activations(job: _Job, stage: int, held: tuple[int, ...]) -> dict[str, float]:
    """What the stage holds at its fullest moment, by tensor."""
    remat = job.layout.remat
    kept = {layer: kept_bytes(_tensors(job, layer), remat) for part in held for layer in job.parts[part]}
    sizes = [sum(times * kept[layer] for layer, times in job.parts[part].items()) for part in held]
    moment = max(live(job.layout)[stage], key=lambda counts: sum(n * size for n, size in zip(counts, sizes, strict=True)))
    found: dict[str, float] = {}
    for part, count in zip(held, moment, strict=True):
        for tensor, times in _kept_of_part(job, part):
            found[tensor.name] = found.get(tensor.name, 0.0) + count * times * job.tokens * tensor.bytes_per_token
    if job.layout.stage == 1:
        return found
    sizes = [sum(times * _awaited(job, layer) for layer, times in job.parts[part].items()) for part in held]
    waits = waiting(job.layout, job.recipe.by_chunk)[stage]
    most = max(sum(n * size for n, size in zip(counts, sizes, strict=True)) for counts in waits)
    return found | {"weights' gradients wait for": most}


def _awaited(job: _Job, layer: Layer) -> float:
    """What the gradients of a layer's weights need beyond what its forward kept, between its B and its W, for one micro-batch:
    the gradients of all products' results, and of their operands those that the backward has made again."""
    results, operands = awaited(layer, job.model.d_model, job.recipe, _cut(job, layer))
    return job.tokens * results + min(job.tokens * operands, _recomputed(job, layer))


def _kept_of_part(job: _Job, part: int) -> Iterator[tuple[Kept, int]]:
    """What a part of the model keeps, and how many of its layers keep it."""
    kinds = kept_kinds(job.layout.remat)
    for layer, times in job.parts[part].items():
        yield from ((tensor, times) for tensor in _tensors(job, layer) if tensor.kind in kinds)


def _recomputed(job: _Job, layer: Layer) -> float:
    """What the backward of one layer makes again, for one micro-batch."""
    found = _tensors(job, layer)
    return job.tokens * (kept_bytes(found, "none") - kept_bytes(found, job.layout.remat))


def _logits(job: _Job) -> dict[str, float]:
    """Of one micro-batch: logits and their gradient, and what the last norm keeps."""
    width = job.model.vocab_size / job.layout.tensor * LOGIT_BYTES
    whole = 2 * job.model.d_model * job.recipe.compute_bytes / (job.layout.tensor if job.layout.sequence else 1)
    return {"logits": job.tokens * width, "last norm": job.tokens * whole}


def _exchanged(job: _Job, layer: Layer) -> float:
    """Of one layer on its way: rows sent and come, of the parts that cross at a time; or all tokens; or experts' weights."""
    layout, moe = job.layout, layer.feed_forward
    if not isinstance(moe, MoE) or layout.expert_shards == 1:
        return 0.0
    if layout.exchange == "weight_stream":
        return 2 * _layer_counts(job.model, layer, layout)["experts"] * job.recipe.compute_bytes
    row = job.model.d_model * CODEC_BYTES.get(layout.codecs[0], job.recipe.compute_bytes)
    cut = _cut(job, layer)
    if layout.exchange == "all_gather":
        return 2 * layout.expert_shards * job.tokens * cut.moe_tokens * row
    return 2 * min(1.0, 2 / layout.num_chunks) * job.tokens * cut.rows * row


def _transfers(job: _Job) -> float:
    """A micro-batch's activations and their gradient, arriving from the neighbours."""
    if job.layout.stage == 1:
        return 0.0
    width = job.model.d_model * job.recipe.compute_bytes / (job.layout.tensor if job.layout.sequence else 1)
    return 2 * job.tokens * width
