"""What crosses between devices in one step: each collective with its kind, axes, bytes and how often.

These are the algorithm's messages. What a backend makes of one (XLA:CPU writes an all-reduce for a reduce-scatter) is the
lowering's business.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from layouts.layout import Layout
from layouts.memory import CODEC_BYTES
from layouts.model import Layer, Model, MoE, norm_params, products
from layouts.work import Share, share_of
from layouts.workload import Batch, Recipe, check_fit


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective, as often as it comes in a step.

    Attributes:
      name: "dispatch", "gather experts" ...
      kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "permute".
      axes: mesh axes that it runs over.
      group: devices of one group.
      bytes: of one device's operand, once.
      count: times a step, on one device.
      phase: "forward", "backward" or "step".
      layer: index of its layer; None for what belongs to no layer.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: float
    count: float
    phase: str
    layer: int | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends over all its times, on a ring (an all-to-all sends all but its own part)."""
        others = (self.group - 1) / self.group
        share = {"all_gather": self.group - 1, "reduce_scatter": others, "all_reduce": 2 * others, "all_to_all": others}
        return self.count * self.bytes * share.get(self.kind, 1.0)


def messages(model: Model, layout: Layout, batch: Batch, recipe: Recipe) -> tuple[Message, ...]:
    """All messages of one step; those of a layer are sent by the devices of its stage.

    Raises:
      InputError: where the layout, the model and the batch do not go together.
    """
    check_fit(model, layout, batch)
    found = []
    for index, layer in enumerate(model.layers):
        share = share_of(layer, layout, batch, recipe)
        of_layer = layer_messages(layer, model.d_model, layout, share, recipe) + layer_gradients(model, layer, layout, recipe)
        found += [dataclasses.replace(message, layer=index) for message in of_layer]
    return (*found, *table_messages(model, layout, batch, recipe))


def layer_gradients(model: Model, layer: Layer, layout: Layout, recipe: Recipe) -> tuple[Message, ...]:
    """The messages of a layer's gradients over the devices that hold the same parameters."""
    return tuple(_gradients(layer, model.d_model, layout, recipe, float(norm_params(model, layer))))


def table_messages(model: Model, layout: Layout, batch: Batch, recipe: Recipe) -> tuple[Message, ...]:
    """The messages that belong to no layer: those of both tables, and between stages."""
    return (*_tables(model, layout, recipe), *_transfers(model, layout, batch, recipe))


@functools.lru_cache(maxsize=4096)
def layer_messages(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> tuple[Message, ...]:
    """The messages of a layer's forwards and backwards, of all micro-batches; gradients over replicas apart."""
    found = (
        *_tensor(layer, d, layout, share, recipe),
        *_context(layer, layout, share, recipe),
        *_expert(layer, d, layout, share, recipe),
        *_fsdp(layer, d, layout, recipe),
    )
    return tuple(message for message in found if message.group > 1 and message.bytes > 0)


def _tensor(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    """Partial sums after attention and after the feed-forward, forward; of the inputs' gradients, backward."""
    size, count, f = share.tokens * d * recipe.compute_bytes, layout.num_microbatches, layer.feed_forward
    whole = [("attention", size)]
    if not isinstance(f, MoE) or f.shared_d_ff:
        whole.append(("feed-forward", size))
    for name, bytes_ in whole:
        for phase in ("forward", "backward"):
            if layout.sequence:
                part = bytes_ / layout.tensor
                yield Message(f"gather {name}", "all_gather", ("tensor",), layout.tensor, part, count, phase)
                yield Message(f"sum {name}", "reduce_scatter", ("tensor",), layout.tensor, bytes_, count, phase)
            else:
                yield Message(f"sum {name}", "all_reduce", ("tensor",), layout.tensor, bytes_, count, phase)
    if isinstance(f, MoE) and layout.expert_tensor > 1:
        rows = share.rows * d * recipe.compute_bytes
        for phase in ("forward", "backward"):
            yield Message("sum expert rows", "all_reduce", ("tensor",), layout.tensor, rows, count, phase)


def _context(layer: Layer, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    """Keys and values go round the context axis; backward their gradients too."""
    a = layer.attention
    kv = share.tokens * a.num_kv_heads / min(layout.tensor, a.num_kv_heads) * (a.qk_dim + a.v_dim) * recipe.compute_bytes
    turns = layout.num_microbatches * (layout.context - 1)
    for phase, times in (("forward", 1), ("backward", 2)):
        yield Message("keys and values", "permute", ("context",), layout.context, kv * times, turns, phase)


def _expert(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    """Rows to the experts and back, backward the other way; or all tokens; or the experts' weights."""
    if not isinstance(layer.feed_forward, MoE):
        return
    makers = {"all_gather": _gathered_tokens, "weight_stream": _streamed_weights}
    yield from makers.get(layout.exchange, _rows)(layer, d, layout, share, recipe)


def _rows(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    count = layout.num_microbatches * layout.num_chunks
    for phase, codec in zip(("forward", "backward"), layout.codecs, strict=True):
        rows = share.rows * d * CODEC_BYTES.get(codec, recipe.compute_bytes) / layout.num_chunks
        for name in ("dispatch", "combine"):
            yield Message(name, "all_to_all", layout.expert_axes, layout.expert_shards, rows, count, phase)


def _gathered_tokens(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    """Every device gets all tokens of its group, and the partial outputs are summed; backward the other way."""
    tokens = share.tokens / (layout.tensor if "tensor" in layout.expert_axes else 1)
    shards, count = layout.expert_shards, layout.num_microbatches
    for phase, codec in zip(("forward", "backward"), layout.codecs, strict=True):
        size = tokens * d * CODEC_BYTES.get(codec, recipe.compute_bytes)
        yield Message("dispatch", "all_gather", layout.expert_axes, shards, size, count, phase)
        yield Message("combine", "reduce_scatter", layout.expert_axes, shards, size * shards, count, phase)


def _streamed_weights(layer: Layer, d: int, layout: Layout, share: Share, recipe: Recipe) -> Iterator[Message]:
    """Each device's experts go round; backward they go round again, with their gradients."""
    numbers = _groups(layer, d, layout)["experts"]
    turns = layout.num_microbatches * (layout.expert_shards - 1)
    for phase, times in (("forward", 1), ("backward", 2)):
        size = times * numbers * recipe.compute_bytes
        yield Message("experts", "permute", layout.expert_axes, layout.expert_shards, size, turns, phase)


def _groups(layer: Layer, d: int, layout: Layout) -> dict[str, float]:
    """Matrices' numbers on one device, by group, before fsdp divides them; routers are never divided."""
    found: dict[str, float] = {}
    for product in products(layer, d):
        expert = product.group == "experts"
        cut = product.parts(layout.expert_tensor if expert else layout.tensor) * (layout.expert_shards if expert else 1)
        found[product.group] = found.get(product.group, 0.0) + (product.weights + product.biases) / cut
    return found


def _fsdp(layer: Layer, d: int, layout: Layout, recipe: Recipe) -> Iterator[Message]:
    """Parameters before each use, gradients after each backward; what is kept is gathered once a step."""
    gathers, divisions = uses(layout)
    for group, numbers in _groups(layer, d, layout).items():
        if group == "router":
            continue
        part = numbers / layout.fsdp * recipe.compute_bytes
        kept = layout.policy_of(group) == "keep"
        gather = functools.partial(Message, f"gather {group}", "all_gather", ("fsdp",), layout.fsdp, part)
        yield gather(1 if kept else gathers, "forward")
        if not kept:
            yield gather(gathers, "backward")
        whole = numbers * recipe.division_bytes
        yield Message(f"divide gradients of {group}", "reduce_scatter", ("fsdp",), layout.fsdp, whole, divisions, "backward")


def uses(layout: Layout) -> tuple[float, float]:
    """How often in a step a layer's parameters are gathered, forward and backward each, and its gradients divided.

    Once a micro-batch; under `zeropp` a stage gathers 2V - 2 chunks a unit and one more, and divides each chunk's
    gradients once a unit.
    """
    count = layout.num_microbatches
    if layout.schedule != "zeropp":
        return count, count
    units = math.ceil(count / min(count, layout.unit or 2 * layout.stage))
    gathers = (2 * layout.stage_chunks - 2) * units + 1
    return gathers / layout.stage_chunks / 2, units


def _gradients(layer: Layer, d: int, layout: Layout, recipe: Recipe, norms: float) -> Iterator[Message]:
    """Gradients over the devices that hold the same parameters, as often as the recipe sums them."""
    counts = {**_groups(layer, d, layout), "norms": norms}
    for dense in (True, False):
        axes = _replica_axes(layout, dense)
        groups = [group for group in counts if (group != "experts") == dense]
        numbers = sum(counts[group] / (1 if group in ("norms", "router") else layout.fsdp) for group in groups)
        name = "gradients" if dense else "gradients of experts"
        yield from _over_replicas(name, axes, numbers, layout, recipe)


def _replica_axes(layout: Layout, dense: bool) -> tuple[str, ...]:
    axes = (name for name in ("data", "expert", "context") if dense or name not in layout.expert_axes)
    return tuple(name for name in axes if getattr(layout, name) > 1)


def _over_replicas(name: str, axes: tuple[str, ...], numbers: float, layout: Layout, recipe: Recipe) -> Iterator[Message]:
    group = math.prod(getattr(layout, axis) for axis in axes)
    if group == 1 or not numbers:
        return
    size, count = numbers * recipe.grad_bytes, recipe.sums(layout)
    if layout.moments == "with_parameters":
        yield Message(name, "all_reduce", axes, group, size, count, "step")
        return
    yield Message(name, "reduce_scatter", axes, group, size, count, "step")
    yield Message(f"{name}' new parameters", "all_gather", axes, group, numbers * recipe.param_bytes / group, 1, "step")


def _tables(model: Model, layout: Layout, recipe: Recipe) -> Iterator[Message]:
    """Of embedding, head and the norm before it: gathers and gradients."""
    tables = {"embedding": model.embedding_params, "head": 0 if model.tied else model.head.weights}
    for name, numbers in tables.items():
        on_device = numbers / layout.tensor / layout.fsdp
        if layout.fsdp > 1 and numbers:
            part, count = on_device * recipe.compute_bytes, layout.num_microbatches
            yield Message(f"gather {name}", "all_gather", ("fsdp",), layout.fsdp, part, count, "forward")
            whole = on_device * layout.fsdp * recipe.division_bytes
            yield Message(f"divide gradients of {name}", "reduce_scatter", ("fsdp",), layout.fsdp, whole, count, "backward")
        yield from _over_replicas(f"gradients of {name}", _replica_axes(layout, True), on_device, layout, recipe)
    axes = _replica_axes(layout, True)
    yield from _over_replicas("gradients of the last norm", axes, float(model.final_norm_params), layout, recipe)


def _transfers(model: Model, layout: Layout, batch: Batch, recipe: Recipe) -> Iterator[Message]:
    """A micro-batch's activations to the next part of the model, and their gradient back."""
    if layout.stage == 1:
        return
    whole = batch.device_tokens(layout) * model.d_model * recipe.compute_bytes
    size = whole / (layout.tensor if layout.sequence else 1)
    crossings = layout.num_microbatches * (layout.stage * layout.stage_chunks - 1) / layout.stage
    for phase in ("forward", "backward"):
        yield Message("between stages", "permute", ("stage",), layout.stage, size, crossings, phase)
