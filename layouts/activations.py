"""What a layer keeps of its forward for its backward, tensor by tensor, in bytes a token of its device."""

import dataclasses
import functools
from collections.abc import Iterator

from layouts.layout import RECOMPUTED
from layouts.model import Attention, FeedForward, Layer, MoE, products
from layouts.workload import Recipe

KINDS = ("input", "norm", "product", "latent", "core", "scores", "mask", "hidden", "activation", "route", "dispatch", "combine")
# What each remat policy keeps, by kind; `kept_kinds` reads the rest.
_KEPT = {
    "none": frozenset(KINDS),
    "selective": frozenset(KINDS) - {"scores"},
    "dots": frozenset({"input", "product", "hidden", "combine"}),
    "received": frozenset({"input", "route", "dispatch"}),
    "exchange": frozenset({"input", "route", "dispatch", "combine"}),
    "experts": frozenset({"input", "route", "dispatch", "hidden", "combine"}),
    "offload": frozenset({"input", "route"}),
    "full": frozenset({"input"}),
}


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a device's share of a layer is cut.

    Attributes:
      tensor: parts of heads and dense hidden widths.
      sequence: whether what tensor parallelism leaves whole is divided too, along the sequence.
      expert_tensor: parts of each expert's hidden width.
      rows: rows of the experts' room for a token of the device.
      moe_tokens: of the device's tokens, the share that it sends to experts itself (1 / tensor where experts are folded
        over the tensor axis).
      context: tokens whose keys a query sees room for, of the device's and others' (scores only).
    """

    tensor: int = 1
    sequence: bool = False
    expert_tensor: int = 1
    rows: float = 0.0
    moe_tokens: float = 1.0
    context: float = 0.0


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor: its name, its kind (one of `KINDS`), its bytes a token of the device."""

    name: str
    kind: str
    bytes_per_token: float


@functools.cache
def kept_kinds(remat: str) -> frozenset[str]:
    """The kinds of tensors that a remat policy keeps."""
    return _KEPT[remat] if remat in _KEPT else frozenset(KINDS) - (frozenset(remat.split("+")) & frozenset(RECOMPUTED))


@functools.cache
def rerun_kinds(remat: str) -> frozenset[str]:
    """The kinds of tensors that a backward makes again: what is neither kept nor on the host."""
    return frozenset(KINDS) - kept_kinds("exchange" if remat == "offload" else remat)


def kept_bytes(tensors: tuple[Kept, ...], remat: str) -> float:
    """Bytes a token that a layer keeps under a remat policy."""
    kinds = kept_kinds(remat)
    return sum(tensor.bytes_per_token for tensor in tensors if tensor.kind in kinds)


@functools.lru_cache(maxsize=4096)
def tensors(layer: Layer, d: int, recipe: Recipe, cut: Cut) -> tuple[Kept, ...]:
    """All that the layer's backward reads, were nothing recomputed.

    The sizes are those of arXiv 2205.05198 (sections 4.1 and 4.2) for its layers, and the same count for gated, grouped,
    latent and mixture-of-experts ones.
    """
    return (*_attention(layer.attention, d, recipe, cut), *_feed_forward(layer.feed_forward, d, recipe, cut))


def _whole(d: int, recipe: Recipe, cut: Cut) -> float:
    """A residual's width, which tensor parallelism leaves whole unless the sequence is divided."""
    return d * recipe.compute_bytes / (cut.tensor if cut.sequence else 1)


def _mask(name: str, d: int, recipe: Recipe, cut: Cut) -> Iterator[Kept]:
    if recipe.dropout:
        yield Kept(name, "mask", d / (cut.tensor if cut.sequence else 1))


def _attention(a: Attention, d: int, recipe: Recipe, cut: Cut) -> Iterator[Kept]:
    size = recipe.compute_bytes
    heads = a.num_heads / min(cut.tensor, a.num_heads)
    kv_heads = a.num_kv_heads / min(cut.tensor, a.num_kv_heads)
    kind = "latent" if a.kv_rank else "product"
    yield Kept("layer input", "input", _whole(d, recipe, cut))
    yield Kept("attention norm", "norm", _whole(d, recipe, cut))
    for name, width in (("query latent", a.q_rank or 0), ("key-value latent", (a.kv_rank or 0))):
        if width:
            yield Kept(name, "product", width * size)
            yield Kept(f"{name} norm", "norm", width * size)
    if a.rope_dim:
        yield Kept("rotary key", "product", a.rope_dim * size)
    yield Kept("query", kind, heads * a.qk_dim * size)
    yield Kept("key", kind, kv_heads * a.qk_dim * size)
    yield Kept("value", kind, kv_heads * a.v_dim * size)
    if a.qk_norm:
        yield Kept("normed query and key", "norm", (heads + kv_heads) * a.qk_dim * size)
    if recipe.score_bytes:
        yield Kept("attention scores", "scores", heads * cut.context * recipe.score_bytes)
    else:
        yield Kept("attention statistics", "core", heads * 4)
    yield Kept("attended", "core", heads * a.v_dim * size)
    yield from _mask("attention dropout", d, recipe, cut)


def _feed_forward(f: FeedForward | MoE, d: int, recipe: Recipe, cut: Cut) -> Iterator[Kept]:
    yield Kept("feed-forward input", "product", _whole(d, recipe, cut))
    yield Kept("feed-forward norm", "norm", _whole(d, recipe, cut))
    if isinstance(f, FeedForward):
        yield from _hidden("", f.d_ff / cut.tensor, f.gated, recipe)
    else:
        yield from _experts(f, d, recipe, cut)
    yield from _mask("feed-forward dropout", d, recipe, cut)


def _experts(f: MoE, d: int, recipe: Recipe, cut: Cut) -> Iterator[Kept]:
    row = d * recipe.compute_bytes
    # Logits and probabilities in float32, the experts' ids and weights of each token.
    yield Kept("routing", "route", cut.moe_tokens * (8 * f.num_experts + 8 * f.top_k))
    yield Kept("dispatched rows", "dispatch", cut.rows * row)
    yield from _hidden("expert ", cut.rows * f.d_ff / cut.expert_tensor, f.gated, recipe)
    if recipe.keeps_expert_outputs:
        yield Kept("expert outputs", "combine", cut.rows * row)
    if f.shared_d_ff:
        yield from _hidden("shared ", f.shared_d_ff / cut.tensor, f.gated, recipe)


def _hidden(prefix: str, width: float, gated: bool, recipe: Recipe) -> Iterator[Kept]:
    yield Kept(f"{prefix}hidden", "hidden", width * (2 if gated else 1) * recipe.compute_bytes)
    yield Kept(f"{prefix}activation", "activation", width * recipe.compute_bytes)


@functools.lru_cache(maxsize=4096)
def awaited(layer: Layer, d: int, recipe: Recipe, cut: Cut) -> tuple[float, float]:
    """Bytes a token of what the gradients of a layer's weights need between its B and its W: the gradients of all products'
    results, and their operands (those of a group that divide alike read the same rows)."""
    results, operands = 0.0, {}
    for product in products(layer, d):
        rows, tensor = (cut.rows, cut.expert_tensor) if product.group == "experts" else (1.0, cut.tensor)
        parts = product.parts(tensor)
        results += rows * product.outer / (parts if product.split == "out" else 1)
        operands[product.group, product.inner, product.split] = rows * product.inner / (parts if product.split == "in" else 1)
    return recipe.compute_bytes * results, recipe.compute_bytes * sum(operands.values())
