"""Seconds of a step, term by term; the terms add up to the total.

Ops are rooflines whose share of the peak grows with the sizes of the product; collectives come from `layouts.network`; what
may run beside compute hides under it; pipelines take what their schedule's table says. `Efficiency` holds the constants.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from layouts import network
from layouts.activations import rerun_kinds
from layouts.hardware import Chip, Cluster
from layouts.layout import Layout
from layouts.live import placement
from layouts.memory import Memory, memory
from layouts.messages import Message, layer_gradients, layer_messages, table_messages, uses
from layouts.model import Layer, Model, MoE
from layouts.network import LinkShares
from layouts.schedules import make_schedule
from layouts.simulate import Costs, simulate
from layouts.tables import Shape
from layouts.work import Op, head_ops, layer_ops, share_of
from layouts.workload import Batch, Recipe, check_fit

# What a stage computes, as terms.
WORK: tuple[str, ...] = ("products", "attention", "pointwise", "recompute")


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """What hardware gives of its peaks; `calibrate` fits these.

    Attributes:
      product: share of the peak that a large product reaches.
      half_rows: rows at which a product reaches half of that.
      half_width: inner or outer width at which it does.
      attention: share of the peak that attention reaches.
      narrow: of `product`, in formats narrower than 16 bits (scales, casts).
      memory: share of the memory's bandwidth.
      op_seconds: of every op, whatever its size.
      links: shares of the links.
      hidden: share of a message that hides under compute where the dataflow lets it.
    """

    product: float = 0.75
    half_rows: float = 128.0
    half_width: float = 128.0
    attention: float = 0.45
    narrow: float = 0.7
    memory: float = 0.8
    op_seconds: float = 4e-6
    links: LinkShares = dataclasses.field(default_factory=LinkShares)
    hidden: float = 0.9


DEFAULTS = {
    "gpu": Efficiency(),
    "tpu": Efficiency(product=0.85, half_rows=64.0, attention=0.4, op_seconds=1e-6),
    "cpu": Efficiency(product=0.7, half_rows=16.0, half_width=16.0, attention=0.3, op_seconds=2e-5),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step.

    Attributes:
      terms: name -> seconds: products, attention, pointwise, recompute, each axis' exposed messages, bubble, optimizer.
      stage_seconds: what each stage works on one micro-batch, forward and backward.
    """

    terms: dict[str, float]
    stage_seconds: tuple[float, ...]

    @property
    def step_seconds(self) -> float:
        """All terms together."""
        return sum(self.terms.values())


@dataclasses.dataclass(frozen=True)
class Job:
    """What is priced.

    Attributes:
      model: the model.
      layout: the layout.
      batch: the batch.
      recipe: how the executor keeps numbers.
      cluster: the devices.
      number_format: of the products.
      efficiency: what the hardware gives; None: the default of its kind.
    """

    model: Model
    layout: Layout
    batch: Batch
    recipe: Recipe
    cluster: Cluster
    number_format: str = "bf16"
    efficiency: Efficiency | None = None

    @property
    def chip(self) -> Chip:
        """The slowest class' chip."""
        if not self.cluster.is_mixed:
            return self.cluster.classes[0].chip
        return min((part.chip for part in self.cluster.classes), key=lambda chip: chip.peak(self.number_format))

    @property
    def speed(self) -> float:
        """Of the slowest device in use, as a fraction of the others': all wait for it."""
        return min((speed for index, speed in self.cluster.slow if index not in self.layout.excluded), default=1.0)

    @property
    def gives(self) -> Efficiency:
        """The constants in force."""
        return self.efficiency or DEFAULTS[self.chip.kind]


def op_seconds(op: Op, chip: Chip, number_format: str, gives: Efficiency) -> float:
    """The forward of an op: what takes longer, its FLOPs or its bytes."""
    moved = op.bytes / (chip.hbm_bytes_per_second * gives.memory)
    return max(op.flops / _rate(op, chip, number_format, gives), moved) + gives.op_seconds


def _rate(op: Op, chip: Chip, number_format: str, gives: Efficiency) -> float:
    if op.kind == "attention":
        return chip.peak("bf16" if number_format != "fp32" else "fp32") * gives.attention
    if op.kind == "pointwise":
        return math.inf
    rows, inner, outer = op.sizes
    share = gives.product / (1 + gives.half_rows / rows) / (1 + gives.half_width / inner) / (1 + gives.half_width / outer)
    narrow = gives.narrow if number_format in ("fp8", "fp4") else 1.0
    return chip.peak(number_format) * share * narrow


def cost(job: Job) -> Cost:
    """Seconds of a step of the job.

    Raises:
      InputError: where the layout, the model and the batch do not go together.
    """
    check_fit(job.model, job.layout, job.batch)
    count = job.layout.num_microbatches
    layers = {layer: _layer_seconds(job, layer) | layer_exposed(job, layer) for layer in job.model.kinds}
    stages = [_stage(job, stage, layers) for stage in range(job.layout.stage)]
    totals = [sum(parts.values()) for parts in stages]
    slowest = stages[max(range(job.layout.stage), key=totals.__getitem__)]
    terms = {name: count * seconds for name, seconds in slowest.items()}
    terms["bubble"] = bubble(job.layout) * (sum(totals) - max(totals)) / max(1, job.layout.stage - 1)
    terms["gradients"] = _step_exposed(job)
    found = memory(job.model, job.layout, job.batch, job.recipe)
    terms["optimizer"] = _optimizer(job, found)
    if any(stage.host_bytes for stage in found.stages):
        terms["host"] = _host(job, found)
    return Cost(terms, tuple(totals))


def _stage(job: Job, stage: int, layers: dict[Layer, dict[str, float]]) -> dict[str, float]:
    """One micro-batch on one stage, forward and backward: the work by kind, and the messages that are not hidden."""
    layout, model = job.layout, job.model
    parts, where = layout.part_layers(len(model.layers)), placement(layout)
    held = where.parts[stage]
    terms: dict[str, float] = dict.fromkeys(WORK, 0.0)
    counts = [sum(of_kind) for of_kind in zip(*(model.kind_counts(parts[part]) for part in held), strict=True)]
    for layer, times in zip(model.kinds, counts, strict=True):
        for name, seconds in layers[layer].items() if times else ():
            terms[name] = terms.get(name, 0.0) + times * seconds
    if len(parts) - 1 in held:
        terms["head"] = head_seconds(job)
    if layout.stage > 1:
        terms["stage"] = stage_exposed(job)
    # Of two copies of the model a micro-batch crosses one.
    return {name: seconds / len(set(where.pipes)) for name, seconds in terms.items()}


def stage_rest(job: Job) -> tuple[list[float], list[float]]:
    """Seconds of one micro-batch: of each layer, and of each stage besides its layers; for one chunk a stage."""
    kinds = {layer: sum((_layer_seconds(job, layer) | layer_exposed(job, layer)).values()) for layer in job.model.kinds}
    fixed = [stage_exposed(job)] * job.layout.stage
    fixed[-1] += head_seconds(job)
    return [kinds[layer] for layer in job.model.layers], fixed


def _layer_seconds(job: Job, layer: Layer) -> dict[str, float]:
    share = share_of(layer, job.layout, job.batch, job.recipe)
    ops = layer_ops(layer, job.model.d_model, share, job.recipe.compute_bytes)
    found = _ops_seconds(ops, job.chip, job.number_format, job.gives, job.layout.remat)
    return found if job.speed == 1 else {name: seconds / job.speed for name, seconds in found.items()}


@functools.lru_cache(maxsize=65536)
def _ops_seconds(ops: tuple[Op, ...], chip: Chip, number_format: str, gives: Efficiency, remat: str) -> dict[str, float]:
    forward = [op_seconds(op, chip, number_format, gives) for op in ops]
    return work_seconds(ops, forward) | {"recompute": rerun_seconds(ops, forward, [remat])[0]}


def work_seconds(ops: tuple[Op, ...], forward: Sequence[float]) -> dict[str, float]:
    """Seconds of forwards and backwards by kind of op, from those of the forwards."""
    terms: dict[str, float] = dict.fromkeys(WORK, 0.0)
    names = {"product": "products", "attention": "attention", "pointwise": "pointwise"}
    for op, seconds in zip(ops, forward, strict=True):
        terms[names[op.kind]] += seconds * (1 + op.backward)
    return terms


def rerun_seconds(ops: tuple[Op, ...], forward: Sequence[float], remats: Sequence[str]) -> list[float]:
    """Seconds of the forwards that run again before the backward, by remat policy."""
    unfused = any(op.name == "scores" for op in ops)
    making: dict[frozenset[str], float] = {}
    for op, seconds in zip(ops, forward, strict=True):
        kinds = _makes(op, unfused)
        making[kinds] = making.get(kinds, 0.0) + seconds
    return [sum(seconds for kinds, seconds in making.items() if kinds & rerun_kinds(remat)) for remat in remats]


def _makes(op: Op, unfused: bool) -> frozenset[str]:
    """The kinds of tensors that an op makes; it runs again where one of them is not kept."""
    return made_kinds(op.kind, op.name, unfused)


@functools.cache
def made_kinds(kind: str, name: str, unfused: bool) -> frozenset[str]:
    """The kinds of tensors that an op of this kind and name makes; `unfused`: attention that keeps its scores."""
    if kind == "product":
        hidden = name.endswith(("up", "gate")) and "kv" not in name
        return frozenset({"combine" if name == "expert_down" else "hidden" if hidden else "product"})
    if kind == "attention":
        return frozenset({"core", "scores"} if unfused else {"core"})
    return frozenset({next((made for made in ("activation", "dispatch", "scores") if made in name), "norm")})


def head_seconds(job: Job) -> float:
    """Logits and loss of one micro-batch, forward and backward."""
    share = share_of(job.model.layers[-1], job.layout, job.batch, job.recipe)
    ops = head_ops(job.model, share, job.recipe.compute_bytes)
    number_format = "fp32" if job.number_format == "fp32" else "bf16"
    return sum(op_seconds(op, job.chip, number_format, job.gives) * (1 + op.backward) for op in ops) / job.speed


# ------------------------------------------------------------------------------------------------------------- messages


def layer_exposed(job: Job, layer: Layer) -> dict[str, float]:
    """Seconds of a layer's messages for one micro-batch that its compute does not hide, by axis."""
    model, layout = job.model, job.layout
    share = share_of(layer, layout, job.batch, job.recipe)
    room = sum(_layer_seconds(job, layer).values())
    found: dict[str, float] = {}
    for message in layer_messages(layer, model.d_model, layout, share, job.recipe):
        took = _message_seconds(job, message, layer) / layout.num_microbatches
        under = min(took * _hides(job, message), room)
        room -= under
        name = "+".join(message.axes)
        found[name] = found.get(name, 0.0) + took - under
    return found


def stage_exposed(job: Job) -> float:
    """Seconds a micro-batch that transfers between stages are not hidden."""
    found = (m for m in table_messages(job.model, job.layout, job.batch, job.recipe) if m.axes == ("stage",))
    return sum(_message_seconds(job, m) * (1 - _hides(job, m)) for m in found) / job.layout.num_microbatches


def _step_exposed(job: Job) -> float:
    """Seconds of a step's own messages that are not hidden: gradients over replicas, the tables' gathers."""
    model, layout, found = job.model, job.layout, 0.0
    for layer, times in zip(model.kinds, model.kind_counts(range(len(model.layers))), strict=True):
        took = sum(_message_seconds(job, m, layer) for m in layer_gradients(model, layer, layout, job.recipe))
        found += times * took / layout.stage
    for message in table_messages(model, layout, job.batch, job.recipe):
        hidden = 0.0 if message.phase == "step" else _hides(job, message)
        found += _message_seconds(job, message) * (1 - hidden) if message.axes != ("stage",) else 0.0
    # Gradients over replicas hide under the backward that makes the last of them: one each time that they are summed.
    compute = [sum(_layer_seconds(job, layer).values()) for layer in model.kinds]
    last = sum(t * n for t, n in zip(compute, model.kind_counts(range(len(model.layers))), strict=True)) / layout.stage
    return max(0.0, found - job.recipe.sums(layout) * job.gives.hidden * last * 2 / 3)


def message_terms(job: Job) -> list[tuple[Message, float]]:
    """The messages of a device of a mean stage, with the seconds of all their times before anything hides them."""
    model, layout, found = job.model, job.layout, []
    for layer, times in zip(model.kinds, model.kind_counts(range(len(model.layers))), strict=True):
        share = share_of(layer, layout, job.batch, job.recipe)
        of_layer = layer_messages(layer, model.d_model, layout, share, job.recipe)
        for message in (*of_layer, *layer_gradients(model, layer, layout, job.recipe)):
            on_stage = dataclasses.replace(message, count=message.count * times / layout.stage)
            found.append((on_stage, _message_seconds(job, on_stage, layer)))
    tables = table_messages(model, layout, job.batch, job.recipe)
    return found + [(message, _message_seconds(job, message)) for message in tables]


def _message_seconds(job: Job, message: Message, layer: Layer | None = None) -> float:
    moe = layer.feed_forward if layer is not None else None
    top_k = moe.top_k if isinstance(moe, MoE) and job.layout.exchange == "hierarchical" else 1
    return message.count * network.seconds(job.cluster, job.layout, message, job.gives.links, top_k)


def _hides(job: Job, message: Message) -> float:
    """The share of a message that the dataflow lets run beside compute."""
    if message.axes == ("fsdp",) or message.axes == ("stage",) or message.kind == "permute":
        return job.gives.hidden
    if message.kind == "all_to_all":
        parts = max(job.layout.num_chunks, job.layout.microbatch_overlap)
        return job.gives.hidden * (1 - 1 / parts)
    return 0.0


# ------------------------------------------------------------------------------------------------------- pipeline, optimizer


def bubble(layout: Layout) -> float:
    """What equal stages wait in a step, over what one of them takes for a micro-batch, by the schedule's own table.

    Of unlike stages the others' mean counts: for 1F1B and GPipe that is the makespan exactly.
    """
    if layout.stage == 1:
        return 0.0
    return _bubble(layout.schedule, layout.stage, layout.stage_chunks, layout.num_microbatches, layout.unit)


def _bubble(name: str, stages: int, chunks: int, count: int, unit: int | None) -> float:
    period = unit or 2 * stages
    if count >= stages:
        closed = {"gpipe": stages - 1.0, "1f1b": stages - 1.0, "zb_h1": (stages - 1) / 3}
        if count % stages == 0:
            closed["interleaved"] = (stages - 1) / chunks
        if count % period == 0 and period >= 2 * stages:
            closed["zeropp"] = (stages - 1) / chunks / 3
        if name in closed:
            return closed[name]
    # Past its start a table grows by one micro-batch's work a micro-batch.
    first = count if count <= period else period + count % period
    return _simulated(name, stages, chunks, first, unit) - first


@functools.lru_cache(maxsize=4096)
def _simulated(name: str, stages: int, chunks: int, count: int, unit: int | None) -> float:
    """The makespan of stages whose micro-batch takes 1: a third forward, a third each half of the backward."""
    table = make_schedule(name, Shape(stages, count, chunks, unit))
    return simulate(table, Costs(1 / 3, 1 / 3, 1 / 3)).makespan


def _optimizer(job: Job, found: Memory) -> float:
    """Reads and writes every state once, also those from the host, gradients once: the stages' mean, as none waits here."""
    states = sum(stage.term(name) for stage in found.stages for name in ("parameters", "master", "moments"))
    states += sum(stage.host_bytes for stage in found.stages)
    moved = 2 * states + sum(stage.term("gradients") for stage in found.stages)
    return moved / len(found.stages) / (job.chip.hbm_bytes_per_second * job.gives.memory)


def _host(job: Job, found: Memory) -> float:
    """Offloaded parameters come for each use, which hides as gathers do; they and their states go there and back once."""
    gathers = 2 * uses(job.layout)[0] * (1 - job.gives.hidden)
    moved = sum(stage.host_params * (gathers + 2) + 2 * stage.host_states for stage in found.stages)
    return moved / len(found.stages) / job.chip.host_link.bytes_per_second
