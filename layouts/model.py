"""What a model is made of: layers, their products and parameters, exactly as a checkpoint counts them.

d: model width, h: query heads, n: key-value heads, q: width of a query or key head, v: of a value head, f: hidden width,
E: experts.
"""

import dataclasses
import functools
from collections.abc import Iterator

from layouts.errors import InputError


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention, or multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) where `kv_rank` is set.

    Attributes:
      num_heads: h.
      num_kv_heads: n; h for latent attention.
      qk_dim: q, the rotary part of latent attention included.
      v_dim: v.
      window: tokens that a token sees, itself included; None: all before it.
      kv_rank: of the latent that keys and values are made from.
      q_rank: of the latent that queries are made from; None: straight from the model width.
      rope_dim: for latent attention, the part of q that carries positions: all heads share one key for it.
      qk_norm: "" none, "head" a scale of q each, "width" over all heads at once.
      qkv_bias: queries, keys and values have biases.
      out_bias: the output product has one.
      sinks: each head has a learned logit that takes probability from all tokens.
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    kv_rank: int | None = None
    q_rank: int | None = None
    rope_dim: int = 0
    qk_norm: str = ""
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False

    def context(self, seq: int) -> float:
        """The tokens that a token sees on average, causal: seq / 2, less with a window."""
        window = min(self.window or seq, seq)
        return window - window**2 / (2 * seq)


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward.

    Attributes:
      d_ff: f.
      gated: three products (SwiGLU), else two.
      bias: its products have biases.
    """

    d_ff: int
    gated: bool = True
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class MoE:
    """A mixture of experts.

    Attributes:
      num_experts: E.
      top_k: experts a token goes to.
      d_ff: f of one expert.
      shared_d_ff: f of all shared experts together; 0: none.
      gated: three products an expert, else two.
      bias: the experts' products have biases.
      router_bias: the router's product has one.
      selection_bias: a number an expert is added for the choice only (DeepSeek-V3, arXiv 2412.19437).
    """

    num_experts: int
    top_k: int
    d_ff: int
    shared_d_ff: int = 0
    gated: bool = True
    bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: attention, then a feed-forward or a mixture of experts."""

    attention: Attention
    feed_forward: FeedForward | MoE


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix that multiplies rows: [rows, inner] x [inner, outer].

    Attributes:
      name: "query", "expert_up" ...
      group: "attention", "dense", "router", "experts", "shared" or "head": what is sharded and kept alike.
      inner: rows of the matrix.
      outer: columns of the matrix.
      split: "out" (tensor parallelism divides columns), "in" (rows; partial sums) or "" (every device has all of it).
      units: what that division cannot cut: heads, or columns.
      copies: matrices of this shape, one an expert.
      rows: rows a token: 1, or top_k.
      bias: it adds a vector of `outer`.
    """

    name: str
    group: str
    inner: int
    outer: int
    split: str
    units: int
    copies: int = 1
    rows: int = 1
    bias: bool = False

    @property
    def weights(self) -> int:
        """Numbers in its matrices."""
        return self.copies * self.inner * self.outer

    @property
    def biases(self) -> int:
        """Numbers in its biases."""
        return self.copies * self.outer if self.bias else 0

    @property
    def flops(self) -> int:
        """Of the forward, a token."""
        return 2 * self.rows * self.inner * self.outer

    def parts(self, tensor: int) -> int:
        """The parts that tensor parallelism of that degree cuts it into."""
        return min(tensor, self.units) if self.split else 1


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder.

    Attributes:
      name: of the preset or file.
      d_model: d.
      vocab_size: of both tables.
      layers: from the first to the last.
      tied: the logits use the embedding's table.
      norm: "rms" (a scale) or "layer" (scale and bias).
      positions: rows of a learned table of positions; 0: rotary.
      num_mtp: layers of multi-token prediction after the last; neither counted nor run here.
      source: where the sizes come from.
      lacks: what of it moejax's Transformer does not have, beyond what the layers show.
    """

    name: str
    d_model: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tied: bool = False
    norm: str = "rms"
    positions: int = 0
    num_mtp: int = 0
    source: str = ""
    lacks: tuple[str, ...] = ()

    @property
    def head(self) -> Product:
        """The product that makes logits; its matrix is the embedding's where tied."""
        return Product("head", "head", self.d_model, self.vocab_size, "out", self.vocab_size)

    @property
    def embedding_params(self) -> int:
        """Numbers in the table of tokens, and of positions where there is one."""
        return (self.vocab_size + self.positions) * self.d_model

    @property
    def final_norm_params(self) -> int:
        """Numbers in the norm before the logits."""
        return self.d_model * (2 if self.norm == "layer" else 1)

    @functools.cached_property
    def params_total(self) -> int:
        """All numbers of a checkpoint, without multi-token prediction."""
        head = 0 if self.tied else self.head.weights
        return self.embedding_params + head + self.final_norm_params + sum(layer_params(self, layer) for layer in self.layers)

    @functools.cached_property
    def params_active(self) -> int:
        """Numbers that one token's forward touches: top_k of E experts; both tables counted."""
        idle = (p.weights + p.biases - (p.weights + p.biases) // p.copies * p.rows for p in self._all_products())
        return self.params_total - sum(idle)

    @functools.cached_property
    def kinds(self) -> tuple[Layer, ...]:
        """The layers that differ, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))

    @functools.cached_property
    def _ends(self) -> tuple[tuple[int, ...], ...]:
        """Of each of `kinds`, how many layers lie before layer 0, 1 ... and before the end."""
        place = {layer: index for index, layer in enumerate(self.kinds)}
        found = [[0] for _ in self.kinds]
        for layer in self.layers:
            for counts in found:
                counts.append(counts[-1])
            found[place[layer]][-1] += 1
        return tuple(map(tuple, found))

    def kind_counts(self, layers: range) -> tuple[int, ...]:
        """How many layers of each of `kinds` a range of layers has."""
        return tuple(ends[layers.stop] - ends[layers.start] for ends in self._ends)

    def _all_products(self) -> Iterator[Product]:
        for layer in self.layers:
            yield from products(layer, self.d_model)

    def flops_per_token(self, seq: int) -> float:
        """Training FLOPs a token at this sequence length, by the usual convention: three times the forward.

        Counts the products (logits too, the router not) and causal attention, each token seeing half of the sequence on
        average or its window; no recompute, no multi-token prediction.
        """
        dense = sum(p.flops for p in self._all_products() if p.group != "router") + self.head.flops
        return 3 * (dense + sum(attention_flops(layer.attention, seq) for layer in self.layers))

    def not_runnable(self) -> tuple[str, ...]:
        """What of the model moejax's Transformer does not have; empty where it can train it."""
        attentions = {layer.attention for layer in self.layers}
        widths = {layer.feed_forward.d_ff for layer in self.layers if isinstance(layer.feed_forward, FeedForward)}
        lacking = {
            "multi-head latent attention": any(a.kv_rank for a in attentions),
            "sliding windows": any(a.window for a in attentions),
            "attention sinks": any(a.sinks for a in attentions),
            "biases in attention": any(a.qkv_bias or a.out_bias for a in attentions),
            "QK norm over all heads": any(a.qk_norm == "width" for a in attentions),
            "biases in feed-forwards": any(layer.feed_forward.bias for layer in self.layers),
            "a learned table of positions": self.positions > 0,
            "LayerNorm with bias": self.norm == "layer",
            "dense layers of unlike widths": len(widths) > 1,
            "multi-token prediction": self.num_mtp > 0,
        }
        return (*(name for name, lacks in lacking.items() if lacks), *self.lacks)


def attention_flops(attention: Attention, seq: int) -> float:
    """Scores and weighted values of the forward, a token."""
    return 2 * attention.num_heads * (attention.qk_dim + attention.v_dim) * attention.context(seq)


@functools.cache
def products(layer: Layer, d: int) -> tuple[Product, ...]:
    """All matrices of a layer in the order of their use."""
    return (*_attention_products(layer.attention, d), *_feed_forward_products(layer.feed_forward, d))


def _attention_products(a: Attention, d: int) -> Iterator[Product]:
    h, n, bias = a.num_heads, a.num_kv_heads, a.qkv_bias
    if a.q_rank:
        yield Product("query_down", "attention", d, a.q_rank, "", 1)
    yield Product("query", "attention", a.q_rank or d, h * a.qk_dim, "out", h, bias=bias)
    if a.kv_rank:
        yield Product("kv_down", "attention", d, a.kv_rank + a.rope_dim, "", 1)
        yield Product("kv_up", "attention", a.kv_rank, h * (a.qk_dim - a.rope_dim + a.v_dim), "out", h)
    else:
        yield Product("key", "attention", d, n * a.qk_dim, "out", n, bias=bias)
        yield Product("value", "attention", d, n * a.v_dim, "out", n, bias=bias)
    yield Product("out", "attention", h * a.v_dim, d, "in", h, bias=a.out_bias)


def _feed_forward_products(f: FeedForward | MoE, d: int) -> Iterator[Product]:
    if isinstance(f, FeedForward):
        yield from _glu("", "dense", d, f.d_ff, f)
        return
    yield Product("router", "router", d, f.num_experts, "", 1, bias=f.router_bias)
    yield from _glu("expert_", "experts", d, f.d_ff, f, f.num_experts, f.top_k)
    if f.shared_d_ff:
        yield from _glu("shared_", "shared", d, f.shared_d_ff, f)


def _glu(
    prefix: str, group: str, d: int, width: int, f: FeedForward | MoE, copies: int = 1, rows: int = 1
) -> Iterator[Product]:
    for name in ("gate", "up") if f.gated else ("up",):
        yield Product(prefix + name, group, d, width, "out", width, copies, rows, f.bias)
    yield Product(prefix + "down", group, width, d, "in", width, copies, rows, f.bias)


def norm_params(model: Model, layer: Layer) -> int:
    """Numbers of a layer that are no matrix and no bias of one: norms, sinks, selection bias."""
    a, scales = layer.attention, 2 if model.norm == "layer" else 1
    found = 2 * model.d_model * scales + (a.num_heads if a.sinks else 0) + (a.q_rank or 0) + (a.kv_rank or 0)
    if a.qk_norm:
        found += 2 * a.qk_dim if a.qk_norm == "head" else (a.num_heads + a.num_kv_heads) * a.qk_dim
    if isinstance(layer.feed_forward, MoE) and layer.feed_forward.selection_bias:
        found += layer.feed_forward.num_experts
    return found


@functools.cache
def _layer_products_params(layer: Layer, d: int) -> int:
    return sum(product.weights + product.biases for product in products(layer, d))


def layer_params(model: Model, layer: Layer) -> int:
    """All numbers of a layer."""
    return _layer_products_params(layer, model.d_model) + norm_params(model, layer)


def check_model(model: Model) -> None:
    """Refuses sizes that cannot be.

    Raises:
      InputError: naming the size and what would be legal.
    """
    for layer in set(model.layers):
        a, f = layer.attention, layer.feed_forward
        if a.num_heads % a.num_kv_heads:
            raise InputError(f"model {model.name}: num_kv_heads={a.num_kv_heads} does not divide num_heads={a.num_heads}")
        if isinstance(f, MoE) and f.top_k > f.num_experts:
            raise InputError(f"model {model.name}: top_k={f.top_k} exceeds num_experts={f.num_experts}")
    if not model.layers:
        raise InputError(f"model {model.name}: num_layers=0: needs at least one layer")
