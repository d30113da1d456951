"""A step's batch, how an executor keeps numbers, and whether model, layout and batch go together."""

import dataclasses
import math
from collections.abc import Iterator

from layouts.errors import InputError
from layouts.layout import Layout
from layouts.model import Layer, Model, MoE


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step works on.

    Attributes:
      seq: tokens of a sequence.
      sequences: in the whole batch, over all devices and micro-batches.
    """

    seq: int
    sequences: int

    def __post_init__(self):
        for name in ("seq", "sequences"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"batch {name}={getattr(self, name)!r}: needs a whole number of at least 1")

    @property
    def tokens(self) -> int:
        """Of the whole batch."""
        return self.seq * self.sequences

    def device_tokens(self, layout: Layout) -> float:
        """Tokens of one micro-batch on one device; those of a tensor group are the same."""
        return self.tokens / (layout.batch_shards * layout.context * layout.num_microbatches)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an executor keeps numbers and what it saves for the backward: what is neither in the model nor in the layout.

    Attributes:
      name: of the executor.
      param_bytes: a parameter as it is stored.
      compute_bytes: a number in the products; where parameters are stored otherwise, a layer's are cast when used.
      grad_bytes: a gradient as it is added up over micro-batches.
      master_bytes: a master weight beside the stored one; 0: none.
      moment_bytes: both moments of a parameter.
      wide_division: fsdp divides gradients as they are added up, `grad_bytes` each; else as the products make them.
      sums_each: without stages, gradients are summed over replicas after every micro-batch; else once a step.
      score_bytes: a pair of tokens and a head, kept of the attention scores; 0: a fused kernel keeps none.
      dropout: masks of a byte an element after attention and feed-forward.
      keeps_expert_outputs: for the gradient of the combine weights; not where these multiply inside the experts.
      capacity: rows that a device's experts get room for: "exact", "cell", "pool" or "worst".
      capacity_factor: for "cell" and "pool", as in MoEConfig; None: nothing dropped.
      imbalance: for "exact": rows of the fullest device over the mean.
      loads: for "exact", in place of that: each expert's share of the rows, of any scale; the fullest device is the one
        whose experts have the most.
      by_chunk: a pipeline's stages work by whole chunks, as moejax's executor does: embedding and head lie on every stage,
        and what a chunk's W needs of its B waits until all of that B is done. False: ends on the end stages, and B and W
        of one op go layer by layer.
    """

    name: str
    param_bytes: float
    compute_bytes: float
    grad_bytes: float
    master_bytes: float
    moment_bytes: float
    wide_division: bool = False
    sums_each: bool = False
    score_bytes: float = 0.0
    dropout: bool = False
    keeps_expert_outputs: bool = True
    capacity: str = "exact"
    capacity_factor: float | None = 1.0
    imbalance: float = 1.0
    loads: tuple[float, ...] = ()
    by_chunk: bool = False

    def __post_init__(self):
        if not self.imbalance >= 1:
            raise InputError(f"imbalance={self.imbalance!r}: needs a number of at least 1, rows of the fullest over the mean")
        if any(not load >= 0 for load in self.loads) or (self.loads and not sum(self.loads)):
            raise InputError(f"loads={self.loads!r}: needs numbers of at least 0 that are not all 0, one an expert")

    def fullest(self, num_experts: int, shards: int) -> float:
        """Rows of the fullest of the devices that experts are divided over, over the mean."""
        if not self.loads:
            return self.imbalance
        if len(self.loads) != num_experts:
            raise InputError(f"loads of {len(self.loads)} experts: the model has {num_experts} in a layer")
        size = num_experts // shards
        sums = [sum(self.loads[first : first + size]) for first in range(0, num_experts, size)]
        return max(sums) * shards / sum(self.loads)

    @property
    def division_bytes(self) -> float:
        """A gradient on its way to the device that fsdp gives it to."""
        return self.grad_bytes if self.wide_division else self.compute_bytes

    def sums(self, layout: Layout) -> int:
        """How often in a step gradients are summed over the devices that hold the same parameters."""
        return layout.num_microbatches if self.sums_each and layout.stage == 1 else 1

    @property
    def even(self) -> "Recipe":
        """The same with all experts loaded alike."""
        return dataclasses.replace(self, imbalance=1.0, loads=())

    def expert_rows(self, moe: MoE, tokens: float, shards: int) -> float:
        """Rows that one device's experts have room for.

        Args:
          moe: the layer.
          tokens: that one device sends.
          shards: devices that the experts are divided over.
        """
        mean, factor = tokens * moe.top_k, self.capacity_factor
        if self.capacity == "exact":
            return mean * self.fullest(moe.num_experts, shards)
        if self.capacity == "worst":
            return tokens * shards * min(moe.top_k, moe.num_experts // shards)
        if self.capacity == "pool":
            most = tokens * shards * min(moe.top_k, moe.num_experts // shards)
            return most if factor is None else min(most, math.ceil(factor * mean))
        cell = tokens if factor is None else min(tokens, math.ceil(factor * mean / moe.num_experts))
        return moe.num_experts * cell


# Parameters and moments in float32, cast to bf16 a layer at a time; XLA's attention keeps probabilities in float32. A layer's
# gradients are float32 sums (`moejax.narrow`), over replicas within the scan over micro-batches; pipelines sum at their end.
MOEJAX = Recipe(
    "moejax",
    param_bytes=4,
    compute_bytes=2,
    grad_bytes=4,
    master_bytes=0,
    moment_bytes=8,
    wide_division=True,
    sums_each=True,
    score_bytes=4,
    capacity="cell",
    capacity_factor=1.25,
    by_chunk=True,
)
# Megatron-Core: weights in bf16, gradients and master weights in float32, a fused attention kernel, true rows.
MEGATRON = Recipe("megatron", 2, 2, 4, 4, 8)


def check_fit(model: Model, layout: Layout, batch: Batch) -> None:
    """Refuses a layout that the model or the batch cannot be divided by.

    Raises:
      InputError: naming what does not divide what, and the nearest that would.
    """
    layout.part_layers(len(model.layers))
    shards = layout.batch_shards * layout.num_microbatches
    if batch.sequences % shards:
        low = max(1, batch.sequences // shards) * shards
        raise InputError(
            f"batch of {batch.sequences} sequences over {layout.batch_shards} batch shards x {layout.num_microbatches} "
            f"micro-batches: needs a multiple of {shards}, nearest {low} or {low + shards}"
        )
    for what, size, axis, parts in _divisions(model, layout, batch):
        if size % parts:
            legal = [n for n in range(1, size + 1) if size % n == 0]
            near = sorted(sorted(legal, key=lambda n: abs(n - parts))[:3])
            raise InputError(
                f"{what}={size} over {axis}={parts} parts: does not divide; nearest parts {', '.join(map(str, near))}"
            )
    for layer in model.kinds:
        if not _heads_fit(layer, layout):
            raise InputError(
                f"num_kv_heads={layer.attention.num_kv_heads} and tensor={layout.tensor}: one must divide the other"
            )


def divides(model: Model, layout: Layout, batch: Batch) -> bool:
    """Whether model and batch can be divided by the layout's axes: what `check_fit` asks, but for the micro-batches."""
    return (
        layout.stage * layout.stage_chunks <= len(model.layers)
        and not batch.sequences % layout.batch_shards
        and all(size % parts == 0 for _, size, _, parts in _divisions(model, layout, batch))
        and all(_heads_fit(layer, layout) for layer in model.kinds)
    )


def _heads_fit(layer: Layer, layout: Layout) -> bool:
    kv_heads = layer.attention.num_kv_heads
    return not (kv_heads % layout.tensor and layout.tensor % kv_heads)


def _divisions(model: Model, layout: Layout, batch: Batch) -> Iterator[tuple[str, int, str, int]]:
    """(what, its size, the axis, its parts) of all that must divide."""
    tensor = layout.tensor
    yield "seq", batch.seq, "context", layout.context
    yield "d_model", model.d_model, "fsdp", layout.fsdp
    yield "vocab_size", model.vocab_size, "tensor", tensor
    for layer in model.kinds:
        f = layer.feed_forward
        yield "num_heads", layer.attention.num_heads, "tensor", tensor
        if not isinstance(f, MoE):
            yield "d_ff", f.d_ff, "tensor", tensor
            continue
        yield "num_experts", f.num_experts, "+".join(layout.expert_axes), layout.expert_shards
        yield "expert d_ff", f.d_ff, "tensor", layout.expert_tensor
        if f.shared_d_ff:
            yield "shared d_ff", f.shared_d_ff, "tensor", tensor
