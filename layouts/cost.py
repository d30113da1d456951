"""Seconds of a step, term by term; the terms add up to the total.

Ops are rooflines whose share of the peak grows with the sizes of the product; collectives come from `layouts.network`; what
may run beside compute hides under it; pipelines take what their schedule's table says. `Efficiency` holds the constants.
"""

import dataclasses
import functools
import math
from typing import Any

from layouts import network
from layouts.activations import kept_kinds
from layouts.hardware import Chip, Cluster
from layouts.layout import Layout
from layouts.live import placement
from layouts.memory import memory
from layouts.messages import Message, messages
from layouts.model import Layer, Model, MoE
from layouts.network import LinkShares
from layouts.schedules import make_schedule
from layouts.simulate import Costs, simulate
from layouts.tables import Shape
from layouts.work import Op, head_ops, layer_ops, share_of
from layouts.workload import Batch, Recipe

# What a stage computes, as terms.
WORK: tuple[str, ...] = ("products", "attention", "pointwise", "recompute")
# Beyond this many units, or twice the stages, of micro-batches a makespan grows by the slowest stage's work alone.
_STEADY = 1


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
        return min((part.chip for part in self.cluster.classes), key=lambda chip: chip.peak(self.number_format))

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
    layout, count = job.layout, job.layout.num_microbatches
    exposed = _exposed(job)
    stages = [_stage(job, stage, exposed) for stage in range(layout.stage)]
    totals = [sum(parts.values()) for parts in stages]
    slowest = stages[max(range(layout.stage), key=totals.__getitem__)]
    terms = {name: count * seconds for name, seconds in slowest.items()}
    terms["bubble"] = _makespan(job, totals) - count * max(totals)
    terms["gradients"] = exposed["step"]
    terms["optimizer"] = _optimizer(job)
    return Cost(terms, tuple(totals))


def _stage(job: Job, stage: int, exposed: dict[str, Any]) -> dict[str, float]:
    """One micro-batch on one stage, forward and backward: the work by kind, and the messages that are not hidden."""
    layout = job.layout
    parts, where = layout.part_layers(len(job.model.layers)), placement(layout)
    held = where.parts[stage]
    terms: dict[str, float] = dict.fromkeys(WORK, 0.0)
    for index in (index for part in held for index in parts[part]):
        for name, seconds in (_layer_seconds(job, job.model.layers[index]) | exposed["layers"][index]).items():
            terms[name] = terms.get(name, 0.0) + seconds
    if len(parts) - 1 in held:
        terms["head"] = _head_seconds(job)
    if layout.stage > 1:
        terms["stage"] = exposed["stage"] / layout.num_microbatches
    # Of two copies of the model a micro-batch crosses one.
    return {name: seconds / len(set(where.pipes)) for name, seconds in terms.items()}


def _layer_seconds(job: Job, layer: Layer) -> dict[str, float]:
    share = share_of(layer, job.layout, job.batch, job.recipe)
    ops = layer_ops(layer, job.model.d_model, share, job.recipe.compute_bytes)
    return _ops_seconds(ops, job.chip, job.number_format, job.gives, job.layout.remat)


@functools.lru_cache(maxsize=65536)
def _ops_seconds(ops: tuple[Op, ...], chip: Chip, number_format: str, gives: Efficiency, remat: str) -> dict[str, float]:
    terms: dict[str, float] = dict.fromkeys(WORK, 0.0)
    names = {"product": "products", "attention": "attention", "pointwise": "pointwise"}
    unfused = any(op.name == "scores" for op in ops)
    for op in ops:
        forward = op_seconds(op, chip, number_format, gives)
        terms[names[op.kind]] += forward * (1 + op.backward)
        terms["recompute"] += forward if _makes(op, unfused) - kept_kinds(remat) else 0.0
    return terms


def _makes(op: Op, unfused: bool) -> set[str]:
    """The kinds of tensors that an op makes; it runs again where one of them is not kept."""
    if op.kind == "product":
        return {"product"}
    if op.kind == "attention":
        return {"core", "scores"} if unfused else {"core"}
    return {next((kind for kind in ("activation", "dispatch", "scores") if kind in op.name), "norm")}


def _head_seconds(job: Job) -> float:
    share = share_of(job.model.layers[-1], job.layout, job.batch, job.recipe)
    ops = head_ops(job.model, share, job.recipe.compute_bytes)
    number_format = "fp32" if job.number_format == "fp32" else "bf16"
    return sum(op_seconds(op, job.chip, number_format, job.gives) * (1 + op.backward) for op in ops)


# ------------------------------------------------------------------------------------------------------------- messages


def _exposed(job: Job) -> dict[str, Any]:
    """Seconds of messages that compute does not hide: a micro-batch's by layer and axis, those between stages, the step's."""
    compute = {layer: sum(_layer_seconds(job, layer).values()) for layer in set(job.model.layers)}
    layers: list[dict[str, float]] = [{} for _ in job.model.layers]
    found: dict[str, Any] = {"layers": layers, "stage": 0.0, "step": 0.0}
    room: dict[int, float] = {}
    for message in messages(job.model, job.layout, job.batch, job.recipe):
        took = _message_seconds(job, message)
        if message.phase == "step":
            found["step"] += took / job.layout.stage if message.layer is not None else took
        elif message.layer is None:
            found["stage" if message.axes == ("stage",) else "step"] += took * (1 - _hides(job, message))
        else:
            index, one = message.layer, took / job.layout.num_microbatches
            left = room.setdefault(index, compute[job.model.layers[index]])
            under = min(one * _hides(job, message), left)
            room[index] = left - under
            name = "+".join(message.axes)
            layers[index][name] = layers[index].get(name, 0.0) + one - under
    # Gradients over replicas hide under the last micro-batch's backward.
    last = sum(compute[layer] for layer in job.model.layers) / job.layout.stage * 2 / 3
    found["step"] = max(0.0, found["step"] - job.gives.hidden * last)
    return found


def _message_seconds(job: Job, message: Message) -> float:
    moe = job.model.layers[message.layer].feed_forward if message.layer is not None else None
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


def _makespan(job: Job, totals: list[float]) -> float:
    """Of all micro-batches, by the schedule's table: past its start it grows by the slowest stage's work."""
    layout, count = job.layout, job.layout.num_microbatches
    if layout.stage == 1:
        return count * totals[0]
    top, period = max(totals), layout.unit or 2 * layout.stage
    first = count if count <= _STEADY * period else _STEADY * period + count % period
    shape = (layout.schedule, layout.stage, layout.stage_chunks, first, layout.unit)
    return top * (_simulated(*shape, tuple(round(seconds / top, 3) for seconds in totals)) + count - first)


@functools.lru_cache(maxsize=4096)
def _simulated(name: str, stages: int, chunks: int, count: int, unit: int | None, work: tuple[float, ...]) -> float:
    """The makespan, of stages whose micro-batch takes this long: a third forward, a third each half of the backward."""
    third = tuple(seconds / 3 for seconds in work)
    table = make_schedule(name, Shape(stages, count, chunks, unit))
    return simulate(table, Costs(third, third, third)).makespan


def _optimizer(job: Job) -> float:
    """Reads and writes every state of the heaviest stage once, gradients once."""
    heaviest = memory(job.model, job.layout, job.batch, job.recipe).heaviest
    moved = 2 * sum(map(heaviest.term, ("parameters", "master", "moments"))) + heaviest.term("gradients")
    return moved / (job.chip.hbm_bytes_per_second * job.gives.memory)
