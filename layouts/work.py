"""What one device computes of a layer for one micro-batch, op by op: FLOPs, bytes of its memory, sizes of products."""

import dataclasses
import functools
from collections.abc import Iterator

from layouts.layout import Layout
from layouts.model import FeedForward, Layer, Model, MoE, Product, attention_flops, products
from layouts.workload import Batch, Recipe


@dataclasses.dataclass(frozen=True)
class Op:
    """The forward of one op on one device.

    Attributes:
      name: "query", "attention", "expert_up", "norm" ...
      kind: "product", "attention" or "pointwise".
      flops: of the forward.
      bytes: read from and written to the device's memory, once each.
      sizes: (rows, inner, outer) of one product; () for the rest.
      copies: products of these sizes that make up the op: a device's experts.
      backward: FLOPs and bytes of the backward over the forward's.
    """

    name: str
    kind: str
    flops: float
    bytes: float
    sizes: tuple[float, ...] = ()
    copies: float = 1
    backward: float = 2.0


@dataclasses.dataclass(frozen=True)
class Share:
    """One device's share of a micro-batch.

    Attributes:
      tokens: that the device works on; those of a tensor group are the same.
      seq: tokens of a whole sequence.
      tensor: parts of heads, dense widths and vocabulary.
      sequence: whether norms and residuals are divided over the tensor axis too.
      expert_tensor: parts of each expert's width.
      expert_shards: devices that the experts are divided over; 1 where each device works with all, as they come by.
      rows: rows that the device's experts work on, of all senders.
      score_bytes: kept of a pair of tokens and a head, where attention is not fused: scores then go through memory.
    """

    tokens: float
    seq: int
    tensor: int = 1
    sequence: bool = False
    expert_tensor: int = 1
    expert_shards: int = 1
    rows: float = 0.0
    score_bytes: float = 0.0


def share_of(layer: Layer, layout: Layout, batch: Batch, recipe: Recipe) -> Share:
    """A device's share of one micro-batch of this layer."""
    tokens = batch.device_tokens(layout)
    shards = 1 if layout.exchange == "weight_stream" else layout.expert_shards
    rows = expert_rows(layer, layout, tokens, recipe)
    tensor, expert = layout.tensor, layout.expert_tensor
    return Share(tokens, batch.seq, tensor, layout.sequence, expert, shards, rows, recipe.score_bytes)


def expert_rows(layer: Layer, layout: Layout, tokens: float, recipe: Recipe) -> float:
    """Rows that one device's experts have room for, of a micro-batch of `tokens` tokens a device; 0 in a dense layer."""
    moe = layer.feed_forward
    if not isinstance(moe, MoE):
        return 0.0
    sent = tokens / layout.tensor if "tensor" in layout.expert_axes else tokens
    if layout.exchange == "weight_stream":  # each device works on its own tokens, however uneven the experts' loads
        return recipe.even.expert_rows(moe, sent, 1)
    return recipe.expert_rows(moe, sent, layout.expert_shards)


@functools.lru_cache(maxsize=4096)
def layer_ops(layer: Layer, d: int, share: Share, size: float) -> tuple[Op, ...]:
    """A layer's ops.

    Args:
      layer: the layer.
      d: model width.
      share: the device's.
      size: bytes of a number in the products.
    """
    return (*_products(layer, d, share, size), _attention(layer, share, size), *_pointwise(layer, d, share, size))


def head_ops(model: Model, share: Share, size: float) -> tuple[Op, ...]:
    """Logits and loss: the product, and float32 logits read and written about three times (maximum, sum, gradient)."""
    logits = share.tokens * model.vocab_size / share.tensor
    return (_product(model.head, share, size), Op("loss", "pointwise", 0.0, logits * 4 * 3, backward=1.0))


def _products(layer: Layer, d: int, share: Share, size: float) -> Iterator[Op]:
    for product in products(layer, d):
        yield _product(product, share, size)


def _product(product: Product, share: Share, size: float) -> Op:
    expert = product.group == "experts"
    cut = product.parts(share.expert_tensor if expert else share.tensor)
    inner = product.inner / (cut if product.split == "in" else 1)
    outer = product.outer / (cut if product.split == "out" else 1)
    copies = product.copies / share.expert_shards if expert else 1
    rows = share.rows if expert else share.tokens
    moved = (copies * inner * outer + rows * (inner + outer)) * size
    return Op(product.name, "product", 2 * rows * inner * outer, moved, (rows / copies, inner, outer), copies)


def _attention(layer: Layer, share: Share, size: float) -> Op:
    a = layer.attention
    heads, kv_heads = a.num_heads / share.tensor, a.num_kv_heads / min(share.tensor, a.num_kv_heads)
    moved = share.tokens * (heads + kv_heads) * (a.qk_dim + a.v_dim) * size
    flops = share.tokens * attention_flops(a, share.seq) / share.tensor
    # A fused backward makes the scores again: 2.5 times the forward (arXiv 2205.14135, 2307.08691).
    return Op("attention", "attention", flops, moved, (share.seq,), backward=2.5)


def _pointwise(layer: Layer, d: int, share: Share, size: float) -> Iterator[Op]:
    whole = share.tokens / (share.tensor if share.sequence else 1)
    yield Op("norms and residuals", "pointwise", 0.0, 10 * whole * d * size)
    a = layer.attention
    if share.score_bytes:
        # What is kept and the scores themselves, each written and read.
        pairs = share.tokens * share.seq * layer.attention.num_heads / share.tensor
        yield Op("scores", "pointwise", 0.0, 2 * pairs * (share.score_bytes + size), backward=1.0)
    yield Op("rotary", "pointwise", 0.0, 2 * share.tokens * (a.num_heads + a.num_kv_heads) * a.qk_dim / share.tensor * size)
    f = layer.feed_forward
    if isinstance(f, FeedForward):
        yield _activation("activation", share.tokens * f.d_ff / share.tensor, f.gated, size)
        return
    yield _activation("expert activation", share.rows * f.d_ff / share.expert_tensor, f.gated, size)
    if f.shared_d_ff:
        yield _activation("shared activation", share.tokens * f.shared_d_ff / share.tensor, f.gated, size)
    yield Op("routing", "pointwise", 0.0, 6 * share.tokens * f.num_experts * 4)
    # Rows are written to the send buffer, grouped by expert where they land, and both once more on the way back.
    yield Op("dispatch and combine", "pointwise", 0.0, 8 * share.rows * d * size, backward=1.0)


def _activation(name: str, numbers: float, gated: bool, size: float) -> Op:
    return Op(name, "pointwise", 0.0, numbers * (3 if gated else 2) * size, backward=1.5)
