"""The decoder: attention, norms, dense or MoE feed-forwards; enough to train and to sample from.

Shape legend. b: sequences, s: tokens of a sequence, d: model width, h: query heads, n: key-value heads, q: head width,
f: hidden width, V: vocabulary, L: layers of a stack.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.axes import AxisRules
from moejax.checks import float_dtype, one_of, positive, true_or_false
from moejax.config import ACTIVATIONS, MoEConfig
from moejax.context import RoutingContext
from moejax.experts import LOGICAL_AXES, NONLINEARITY, GroupedExperts, expert_shapes
from moejax.layer import MoELayer, check_layer, init_param
from moejax.narrow import narrow_einsum
from moejax.params import born_sharded
from moejax.remat import REMAT_POLICIES
from moejax.ring_feed_forward import feed_forward_over_mesh
from moejax.routing import ByTokenId
from moejax.stats import RoutingStats


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A pre-norm decoder with rotary positions and grouped-query attention.

    The first `num_dense_layers` layers have dense feed-forwards; of the rest every `moe_every`-th one is a MoE layer.

    Args:
      vocab_size: V, token ids are 0 to V - 1.
      num_layers: layers in all.
      d_model: width of a token.
      num_heads: query heads.
      num_kv_heads: key-value heads; divides num_heads.
      d_ff: hidden width of the dense feed-forwards.
      moe: the MoE layers, or None for a dense model. Its d_model must be this one's.
      num_dense_layers: how many of the first layers are dense though `moe` is given.
      moe_every: 1 makes every later layer MoE, 2 every second one.
      head_dim: width of a head, even; None: d_model / num_heads.
      rope_theta: base of the rotary angles.
      norm_eps: added to the mean square in RMSNorm.
      qk_norm: RMSNorm over each head of queries and keys.
      tie_embeddings: the logits use the embedding's table.
      activation: of the dense feed-forwards, as in MoEConfig.
      overlap: the dense feed-forwards' products over embed (FSDP) and mlp (tensor) axes as rings (`moejax.overlapped`), the
        tokens between attention and feed-forward divided over the mlp axes; where the mesh has neither, the plain
        products. The MoE layers have their own, `moe.overlap`.
      remat: what a layer keeps for its backward, a name from `moejax.remat.REMAT_POLICIES`: "none" recomputes nothing, "full"
        recomputes the layer, "dots" keeps dense matrix products; of a MoE layer "received" keeps the rows that arrived at
        their experts, "exchange" those and the rows that came back, so that none crosses twice, "experts" also what no
        expert product can then be done again for, and "offload" what "exchange" keeps, in the host's memory.
      dtype: of the products; norms, softmax, router and logits are float32.
      param_dtype: that parameters are kept in.

    Raises:
      ValueError: for an impossible value, naming it and the legal ones.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    moe: MoEConfig | None = None
    num_dense_layers: int = 0
    moe_every: int = 1
    head_dim: int | None = None
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = True
    activation: str = "swiglu"
    overlap: bool = False
    remat: str = "none"
    dtype: str = "bfloat16"
    param_dtype: str = "float32"

    def __post_init__(self):
        for field in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "moe_every"):
            positive(field, getattr(self, field))
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("remat", self.remat, REMAT_POLICIES)
        float_dtype("dtype", self.dtype)
        float_dtype("param_dtype", self.param_dtype)
        self._check_kinds()
        self._check_heads()
        self._check_moe()

    def _check_kinds(self):
        for field in ("rope_theta", "norm_eps"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{field}={value!r}: needs a finite number above 0")
        for field in ("qk_norm", "tie_embeddings", "overlap"):
            true_or_false(field, getattr(self, field))
        if self.head_dim is not None:
            positive("head_dim", self.head_dim)
        if type(self.num_dense_layers) is not int:
            raise ValueError(f"num_dense_layers={self.num_dense_layers!r}: needs a whole number")
        if self.moe is not None and not isinstance(self.moe, MoEConfig):
            raise ValueError(f"moe={self.moe!r}: needs a MoEConfig or None")

    def _check_heads(self):
        if self.head_dim is None and self.d_model % self.num_heads:
            low = self.d_model // self.num_heads * self.num_heads
            near = " or ".join(str(n) for n in (low, low + self.num_heads) if n)
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: nearest {near}")
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: "
                f"legal are {', '.join(map(str, legal))}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim={self.head_width}: rotary positions need an even number")

    def _check_moe(self):
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers}: needs 0 to num_layers={self.num_layers}")
        if self.moe is None:
            return
        if self.moe.d_model != self.d_model:
            raise ValueError(f"moe.d_model={self.moe.d_model}: must be the model's d_model={self.d_model}")
        if (self.num_layers - self.num_dense_layers) % self.moe_every:
            raise ValueError(
                f"moe_every={self.moe_every} does not divide the {self.num_layers - self.num_dense_layers} layers "
                f"after num_dense_layers={self.num_dense_layers}"
            )

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def stacks(self) -> tuple[tuple[int, tuple[bool, ...]], ...]:
        """The layers as scans: (repeats, for each layer of the repeated group whether it is MoE)."""
        dense = self.num_layers if self.moe is None else self.num_dense_layers
        group = (False,) * (self.moe_every - 1) + (True,)
        stacks = ((dense, (False,)), ((self.num_layers - dense) // self.moe_every, group))
        return tuple((repeats, kinds) for repeats, kinds in stacks if repeats)

    @property
    def num_moe_layers(self) -> int:
        """How many layers are MoE layers."""
        return sum(repeats * sum(kinds) for repeats, kinds in self.stacks)


def check_model(cfg: TransformerConfig, rules: AxisRules, mesh) -> None:
    """Raises ValueError where the mesh's axes are not Auto, or do not divide what the rules shard over them."""
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(f"mesh axis types {mesh.axis_types}: the Transformer needs Auto axes (a MoELayer takes both)")
    for name, size, logical in (
        ("d_model", cfg.d_model, "embed"),
        ("d_ff", cfg.d_ff, "mlp"),
        ("num_heads", cfg.num_heads, "heads"),
        ("num_kv_heads", cfg.num_kv_heads, "heads"),
        ("vocab_size", cfg.vocab_size, "vocab"),
    ):
        ax.check_divides(name, size, rules.axes(logical, mesh), mesh)
    if cfg.overlap:
        rules.resolve(mesh)
    if cfg.moe is not None:
        check_layer(cfg.moe, rules, mesh)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions, within each segment."""

    def __init__(self, cfg: TransformerConfig, *, rules: AxisRules, rngs: nnx.Rngs):
        """Args: cfg, the model; rules, logical axes to mesh axes; rngs, a stream `params`."""
        self.cfg, self.rules = cfg, rules
        d, h, n, q = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_width

        def weights(heads):
            return born_sharded(_heads_in, rngs.params(), (d, heads, q), cfg.param_dtype, ("embed", "heads", None), rules)

        self.query, self.key, self.value = weights(h), weights(n), weights(n)
        out = ("heads", None, "embed")
        self.out = born_sharded(_heads_out, rngs.params(), (h, q, d), cfg.param_dtype, out, rules)
        if cfg.qk_norm:
            self.query_norm, self.key_norm = norm(cfg, q, rngs), norm(cfg, q, rngs)

    def __call__(self, x: Float[Array, "b s d"], segment_ids, positions) -> Float[Array, "b s d"]:
        """x: [b, s, d]; segment_ids: [b, s] int32 or None, tokens see their own segment only; positions: [b, s] int32."""
        query, key, value = (narrow_einsum("bsd,dhq->bshq", x, weights[...]) for weights in (self.query, self.key, self.value))
        if self.cfg.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = (rotate(heads, positions, self.cfg.rope_theta) for heads in (query, key))
        mask = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        seen = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
        return sum_parts(narrow_einsum("bshq,hqd->bsd", seen, self.out[...]), self.rules, "heads")


def rotate(heads: Float[Array, "b s h q"], positions: Int[Array, "b s"], theta: float) -> Float[Array, "b s h q"]:
    """Rotary positions (Su et al. 2021), in float32: pairs (i, i + q/2) of each head turn by position / theta**(2i/q)."""
    half = heads.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions[:, :, None] * frequency)[:, :, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)


class FeedForward(nnx.Module):
    """The dense feed-forward: one expert that every token goes through, partitioned by the compiler or, by option, in rings."""

    def __init__(self, cfg: TransformerConfig, *, rules: AxisRules, rngs: nnx.Rngs):
        """Args: cfg, the model; rules, logical axes to mesh axes; rngs, a stream `params`."""
        self.cfg, self.rules = cfg, rules
        for name, shape in expert_shapes(1, cfg.d_model, cfg.d_ff, cfg.activation).items():
            logical = (None, *LOGICAL_AXES[name][1:])
            setattr(self, name, born_sharded(init_param, rngs.params(), shape, cfg.param_dtype, logical, rules))

    def __call__(self, x: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """[b, s, d] -> [b, s, d], token by token."""
        named: dict[str, Any] = {"gate": None} | {
            name: getattr(self, name)[...] for name in LOGICAL_AXES if hasattr(self, name)
        }
        if self.cfg.overlap:
            weights = jax.tree.map(lambda stacked: stacked[0], (named["gate"], named["up"], named["down"]))
            return feed_forward_over_mesh(x, weights, NONLINEARITY[self.cfg.activation], self.rules)
        experts = GroupedExperts(activation=self.cfg.activation, **named)
        return sum_parts(experts(x.reshape(1, -1, x.shape[-1])).reshape(x.shape), self.rules, "mlp")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), dense or MoE."""

    def __init__(self, cfg: TransformerConfig, is_moe: bool, *, rules: AxisRules, rngs: nnx.Rngs):
        """Args: cfg, the model; is_moe, which feed-forward; rules, logical axes to mesh axes; rngs, a stream `params`."""
        self.rules, self.in_rings = rules, cfg.overlap and not is_moe
        self.attention_norm = norm(cfg, cfg.d_model, rngs)
        self.attention = Attention(cfg, rules=rules, rngs=rngs)
        self.feed_forward_norm = norm(cfg, cfg.d_model, rngs)
        moe = cfg.moe if is_moe else None
        if moe is not None:
            self.feed_forward = MoELayer(moe, rules=rules, rngs=rngs)
        else:
            self.feed_forward = FeedForward(cfg, rules=rules, rngs=rngs)

    def __call__(self, x, segment_ids, positions, context=None) -> tuple[Float[Array, "b s d"], RoutingStats | None]:
        """x: [b, s, d], this layer's context -> ([b, s, d], the MoE layer's stats or None). Segment 0 is padding."""
        x += self.attention(self.attention_norm(x), segment_ids, positions)
        # Between attention and a feed-forward of rings tokens are divided as its first product takes them.
        x = constrain(x, self.rules, ("batch", "mlp", None) if self.in_rings else ("batch", None, None))
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, FeedForward):
            return constrain(x + self.feed_forward(normed), self.rules), None
        y, stats = self.feed_forward(normed, None if segment_ids is None else segment_ids > 0, context)
        return constrain(x + y, self.rules), stats


class Group(nnx.Module):
    """The blocks that one turn of a scan runs."""

    def __init__(self, cfg: TransformerConfig, kinds: tuple[bool, ...], *, rules: AxisRules, rngs: nnx.Rngs):
        """Args: cfg, the model; kinds, for each block whether it is MoE; rules; rngs, a stream `params`."""
        self.blocks = nnx.List([Block(cfg, is_moe, rules=rules, rngs=rngs) for is_moe in kinds])

    def __call__(self, x, segment_ids, positions, context=None):
        """x: [b, s, d] -> ([b, s, d], stats of the group's MoE block or None)."""
        stats = None
        for block in self.blocks:
            x, stats = block(x, segment_ids, positions, context)
        return x, stats


class Transformer(nnx.Module):
    """The decoder. Layers are stacked and scanned, so compile time does not grow with their number.

    Under `jax.set_mesh(mesh)` parameters are laid out over the mesh; `moejax.step.init_state` makes them so that no
    device ever holds more than its part.
    """

    def __init__(self, cfg: TransformerConfig, *, rules: AxisRules = AxisRules(), rngs: nnx.Rngs):
        """Args: cfg, the model; rules, logical axes to mesh axes; rngs, a stream `params`.

        Raises:
          ValueError: where a mesh axis does not divide the model.
        """
        check_model(cfg, rules, ax.current_mesh())
        self.cfg, self.rules = cfg, rules
        table = (cfg.vocab_size, cfg.d_model)
        self.embedding = born_sharded(_table, rngs.params(), table, cfg.param_dtype, ("vocab", "embed"), rules)
        self.stacks = nnx.List([_stack(cfg, repeats, kinds, rules, rngs) for repeats, kinds in cfg.stacks])
        self.norm = norm(cfg, cfg.d_model, rngs)
        if not cfg.tie_embeddings:
            self.head = born_sharded(_table, rngs.params(), table, cfg.param_dtype, ("vocab", "embed"), rules)

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        segment_ids: Int[Array, "b s"] | None = None,
        positions: Int[Array, "b s"] | None = None,
        context: RoutingContext | None = None,
    ) -> tuple[Float[Array, "b s V"], RoutingStats | None]:
        """The next token's logits at every position.

        Args:
          tokens: [b, s] int32.
          segment_ids: [b, s] int32; tokens attend within their own segment, and segment 0 is padding. None: one segment.
          positions: [b, s] int32, rotary positions; None: 0 to s - 1.
          context: what the call says of all MoE layers' routing. Each gets a key of its own out of `key`; `replay` and `batch`
            have a leading axis over them, as the stats have; `token_ids` are `tokens` unless given.

        Returns:
          (logits [b, s, V] float32, RoutingStats with a leading axis over the MoE layers, None for a dense model).
        """
        return self.together([(tokens, segment_ids, positions, context)])[0]

    def together(self, batches: Sequence[Sequence]) -> list[tuple[Array, RoutingStats | None]]:
        """What a call says of each of several batches, which go through each layer side by side.

        No batch waits for another, so what one sends over the expert axis can cross while another one's attention or
        experts work (NestPipe, 2604.06956), forward and backward. All their activations are held at once.

        Args:
          batches: for each its (tokens, segment_ids, positions, context), as in a call.

        Returns:
          (logits, stats) of each, as of a call.
        """
        # Looked up whole in width: XLA replicates the result of a lookup in a table that is split there.
        table = constrain(self.embedding[...].astype(self.cfg.dtype), self.rules, ("vocab", None))
        xs = tuple(constrain(table[tokens], self.rules) for tokens, *_ in batches)
        where = [(segments, _positions(tokens) if at is None else at) for tokens, segments, at, _ in batches]
        contexts = [self._context(tokens, context) for tokens, _, _, context in batches]
        stats = (None,) * len(xs)
        for stack, (_, kinds) in zip(self.stacks, self.cfg.stacks, strict=True):
            xs, found = _scan(stack, xs, where, contexts if any(kinds) else None, self.cfg)
            stats = found if found[0] is not None else stats
        table = (self.embedding if self.cfg.tie_embeddings else self.head)[...].astype(self.cfg.dtype)
        logits = [jnp.einsum("bsd,vd->bsv", self.norm(x), table, preferred_element_type=jnp.float32) for x in xs]
        return list(zip(logits, stats, strict=True))

    def _context(self, tokens, context: RoutingContext | None) -> RoutingContext:
        context = RoutingContext() if context is None else context
        if self.cfg.moe is None or context.token_ids is not None or not isinstance(self.cfg.moe.router_rule, ByTokenId):
            return context
        return dataclasses.replace(context, token_ids=tokens)


def sum_parts(x: Array, rules: AxisRules, logical: str) -> Array:
    """Adds up what shards along a logical axis made of their parts, where its mesh axes are manual, as in a pipeline's program;
    where they are not, the compiler does."""
    mesh = ax.current_mesh()
    return ax.sum_over(x, [name for name in rules.axes(logical, mesh) if name in mesh.manual_axes])


def _positions(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


def _stack(cfg, repeats, kinds, rules, rngs):
    """`repeats` groups with every parameter stacked along a new first axis, which is never sharded."""

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def make(keys):
        return Group(cfg, kinds, rules=rules, rngs=nnx.Rngs(params=keys))

    return make(jax.random.split(rngs.params(), repeats))


def _scan(stack, xs, where, contexts, cfg):
    """A stack's layers over each of the batches xs; `where` has the segments and positions of each, `contexts` the contexts,
    where the layers route."""
    graphdef, state = nnx.split(stack)
    own = [context.by_layer(cfg.num_moe_layers) for context in contexts or ()]

    def body(xs, layer):
        weights, own = layer
        group = nnx.merge(graphdef, weights)
        here = [dataclasses.replace(c, **fields) for c, fields in zip(contexts or (), own, strict=True)] or [None] * len(xs)
        found = [group(x, *rest, context) for x, rest, context in zip(xs, where, here, strict=True)]
        return tuple(x for x, _ in found), tuple(stats for _, stats in found)

    if cfg.remat != "none":
        body = jax.checkpoint(body, policy=REMAT_POLICIES[cfg.remat], prevent_cse=False)
    return lax.scan(body, xs, (state, own))


def constrain(x: Array, rules: AxisRules, logical: tuple[str | None, ...] = ("batch", None, None)) -> Array:
    """States how x is sharded, where the mesh's axes are Auto and divide it (on Explicit axes its type says so)."""
    mesh = ax.current_mesh()
    axes = [rules.axes(name, mesh) for name in logical]
    named = [name for dim in axes for name in dim]
    auto = all(mesh.axis_types[mesh.axis_names.index(name)] == AxisType.Auto for name in named)
    if mesh.empty or not auto or any(size % ax.mesh_size(mesh, dim) for size, dim in zip(x.shape, axes, strict=True)):
        return x
    return lax.with_sharding_constraint(x, rules.spec(logical, mesh))


def norm(cfg: TransformerConfig, width: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """An RMSNorm of the model's."""
    return nnx.RMSNorm(width, epsilon=cfg.norm_eps, dtype=cfg.dtype, param_dtype=cfg.param_dtype, rngs=rngs)


def _heads_in(key, shape, dtype):
    return jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))(key, shape, dtype)


def _heads_out(key, shape, dtype):
    return jax.nn.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)(key, shape, dtype)


def _table(key, shape, dtype):
    """Standard deviation 1/sqrt(d): logits of a normalised token start with a variance near 1."""
    return jax.random.normal(key, shape, dtype) * shape[-1] ** -0.5
