"""A step's batch, how an executor keeps numbers, and whether model, layout and batch go together."""

import dataclasses
import math

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
      score_bytes: a pair of tokens and a head, kept of the attention scores; 0: a fused kernel keeps none.
      dropout: masks of a byte an element after attention and feed-forward.
      keeps_expert_outputs: for the gradient of the combine weights; not where these multiply inside the experts.
      capacity: rows that a device's experts get room for: "exact", "cell", "pool" or "worst".
      capacity_factor: for "cell" and "pool", as in MoEConfig; None: nothing dropped.
      imbalance: for "exact": rows of the fullest device over the mean.
    """

    name: str
    param_bytes: float
    compute_bytes: float
    grad_bytes: float
    master_bytes: float
    moment_bytes: float
    score_bytes: float = 0.0
    dropout: bool = False
    keeps_expert_outputs: bool = True
    capacity: str = "exact"
    capacity_factor: float | None = 1.0
    imbalance: float = 1.0

    def expert_rows(self, moe: MoE, tokens: float, shards: int) -> float:
        """Rows that one device's experts have room for.

        Args:
          moe: the layer.
          tokens: that one device sends.
          shards: devices that the experts are divided over.
        """
        mean, factor = tokens * moe.top_k, self.capacity_factor
        if self.capacity == "exact":
            return mean * self.imbalance
        if self.capacity == "worst":
            return tokens * shards * min(moe.top_k, moe.num_experts // shards)
        if self.capacity == "pool":
            most = tokens * shards * min(moe.top_k, moe.num_experts // shards)
            return most if factor is None else min(most, math.ceil(factor * mean))
        cell = tokens if factor is None else min(tokens, math.ceil(factor * mean / moe.num_experts))
        return moe.num_experts * cell


# Parameters and moments in float32, cast to bf16 a layer at a time; XLA's attention keeps probabilities in float32.
MOEJAX = Recipe("moejax", 4, 2, 4, 0, 8, score_bytes=4, capacity="cell", capacity_factor=1.25)
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
    _divides("seq", batch.seq, "context", layout.context)
    _divides("d_model", model.d_model, "fsdp", layout.fsdp)
    _divides("vocab_size", model.vocab_size, "tensor", layout.tensor)
    for layer in set(model.layers):
        _check_layer(layer, layout)


def _check_layer(layer: Layer, layout: Layout) -> None:
    heads, kv_heads, tensor = layer.attention.num_heads, layer.attention.num_kv_heads, layout.tensor
    _divides("num_heads", heads, "tensor", tensor)
    if kv_heads % tensor and tensor % kv_heads:
        raise InputError(f"num_kv_heads={kv_heads} and tensor={tensor}: one must divide the other")
    if not isinstance(layer.feed_forward, MoE):
        _divides("d_ff", layer.feed_forward.d_ff, "tensor", tensor)
        return
    moe = layer.feed_forward
    _divides("num_experts", moe.num_experts, "+".join(layout.expert_axes), layout.expert_shards)
    _divides("expert d_ff", moe.d_ff, "tensor", layout.expert_tensor)
    if moe.shared_d_ff:
        _divides("shared d_ff", moe.shared_d_ff, "tensor", tensor)


def _divides(what: str, size: int, axis: str, parts: int) -> None:
    if size % parts:
        legal = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(legal, key=lambda n: abs(n - parts))[:3]
        raise InputError(
            f"{what}={size} over {axis}={parts} parts: does not divide; nearest parts {', '.join(map(str, sorted(near)))}"
        )
