"""MoELayer (flax.nnx) and `moe`, the line from tokens to outputs that every front end shares.

Shape legend. T: tokens of the whole batch, t: tokens on this shard, k: experts per token, d: model width, f: expert width,
E: experts in the layer, e: experts on this shard.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moejax import axes as ax
from moejax.axes import AxisRules, ShardAxes
from moejax.config import MoEConfig
from moejax.exchange import EXCHANGES, Wire
from moejax.exchange.choose import choose_exchange
from moejax.experts import LOGICAL_AXES, GroupedExperts, expert_shapes
from moejax.losses import load_balance_loss, router_z_loss
from moejax.params import born_sharded
from moejax.plan import DispatchPlan, make_plan
from moejax.pool import PoolPlan, make_pool_plan
from moejax.router import BiasState
from moejax.stats import RoutingStats

logger = logging.getLogger(__name__)


class RouterState(nnx.Variable):
    """A router's state between optimizer steps (a bias, queues): not a parameter, and no forward pass changes it."""


class MoELayer(nnx.Module):
    """A mixture-of-experts feed-forward layer for flax.nnx models.

    Under `jax.set_mesh(mesh)` its parameters are born sharded over the mesh, and a call spreads the work over it.
    """

    def __init__(self, cfg: MoEConfig, *, rules: AxisRules = AxisRules(), rngs: nnx.Rngs):
        """Args: cfg, the layer; rules, logical axes to mesh axes; rngs, a stream `params`.

        Raises:
          ValueError: where the mesh does not divide the layer (see `check_layer`).
        """
        check_layer(cfg, rules, ax.current_mesh())
        self.cfg, self.rules = cfg, rules
        for name, (shape, logical) in param_shapes(cfg).items():
            setattr(self, name, born_sharded(init_param, rngs.params(), shape, cfg.param_dtype, logical, rules))
        self.router_state = RouterState(cfg.router_rule.init_state(cfg.num_experts))

    def __call__(self, x: Float[Array, "b s d"], valid: Bool[Array, "b s"] | None = None):
        """Routes each token through its experts.

        Args:
          x: [batch, seq, d_model].
          valid: [batch, seq], False for padding: it takes no capacity, adds to no loss, and gets zeros. None: all valid.

        Returns:
          (y [batch, seq, d_model] in the dtype of x, RoutingStats).
        """
        params = {name: getattr(self, name)[...] for name in param_shapes(self.cfg)}
        return moe(params, x, valid, self.router_state.get_value(), cfg=self.cfg, rules=self.rules)


def param_shapes(cfg: MoEConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Each parameter's shape and logical axes, by name: router, expert_up ..., shared_up ..."""
    found = {"router": ((cfg.d_model, cfg.num_experts), (None, None))}
    for name, shape in expert_shapes(cfg.num_experts, cfg.d_model, cfg.d_ff, cfg.activation).items():
        found[f"expert_{name}"] = (shape, LOGICAL_AXES[name])
    if cfg.num_shared_experts:
        width = cfg.num_shared_experts * cfg.d_ff
        for name, shape in expert_shapes(1, cfg.d_model, width, cfg.activation).items():
            found[f"shared_{name}"] = (shape, (None, *LOGICAL_AXES[name][1:]))
    return found


def init_param(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Truncated normal of standard deviation 1/sqrt(fan in); fan in is the second last dimension."""
    return jax.nn.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))(key, shape, dtype)


def check_layer(cfg: MoEConfig, rules: AxisRules, mesh) -> ShardAxes:
    """The layer's axes on the mesh.

    Raises:
      ValueError: where a mesh axis does not divide the dimension that the rules shard over it.
    """
    axes = rules.resolve(mesh)
    ax.check_divides("num_experts", cfg.num_experts, axes.expert, mesh)
    ax.check_divides("d_model", cfg.d_model, axes.embed, mesh)
    ax.check_divides("d_ff", cfg.d_ff, axes.mlp, mesh)
    if cfg.num_senders is not None:
        ax.check_divides("num_senders", cfg.num_senders, axes.tokens, mesh)
    if cfg.capacity == "pool":
        _check_pool(cfg, axes, mesh)
    if cfg.exchange == "hierarchical" and len(axes.expert) not in (0, 2):
        raise ValueError(f"exchange='hierarchical': needs two expert axes (slow, fast), the rules give {axes.expert!r}")
    return axes


def _check_pool(cfg: MoEConfig, axes: ShardAxes, mesh) -> None:
    """A pool's receivers serve n consecutive senders each: those of one expert group on a mesh that has expert axes."""
    shards = ax.mesh_size(mesh, axes.tokens)
    n = cfg.num_destinations or ax.mesh_size(mesh, axes.expert)
    senders = cfg.num_senders or shards
    if cfg.num_experts % n:
        raise ValueError(f"num_destinations={n} does not divide num_experts={cfg.num_experts}")
    if not axes.expert:
        if senders // shards % n:
            raise ValueError(f"num_senders={senders} over {shards} token shards: each needs a multiple of {n} destinations")
        return
    if n != ax.mesh_size(mesh, axes.expert):
        raise ValueError(f"num_destinations={n}: the mesh has {ax.mesh_size(mesh, axes.expert)} expert shards")
    if senders != shards:
        raise ValueError(f"num_senders={senders}: pools need one sender per token shard, {shards}")
    if axes.tokens[-len(axes.expert) :] != axes.expert:
        raise ValueError(f"batch axes {axes.tokens!r}: pools need the expert axes {axes.expert!r} last")


def moe(
    params: dict[str, Array],
    x: Float[Array, "b s d"],
    valid: Bool[Array, "b s"] | None,
    state: BiasState | None,
    *,
    cfg: MoEConfig,
    rules: AxisRules = AxisRules(),
) -> tuple[Float[Array, "b s d"], RoutingStats]:
    """The layer as a function of its parameters by name (see `param_shapes`): the per-shard line under a shard_map over whatever mesh axes are not manual yet.

    Inside a user's own shard_map the axes that are manual already are used as they are: x and the parameters are then
    this shard's parts, as the rules would split them.

    Raises:
      ValueError: for a width other than cfg.d_model, or a mesh that does not divide the layer.
    """
    mesh = ax.current_mesh()
    axes = check_layer(cfg, rules, mesh)
    if x.ndim != 3 or x.shape[-1] != cfg.d_model:
        raise ValueError(f"x of shape {x.shape}: needs [batch, seq, d_model={cfg.d_model}]")
    if valid is not None and valid.shape != x.shape[:2]:
        raise ValueError(f"valid of shape {valid.shape}: needs [batch, seq] of x, {x.shape[:2]}")
    auto = tuple(name for name in axes.all if name not in mesh.manual_axes)
    tokens = tuple(name for name in axes.tokens if name in auto)
    num_senders = cfg.num_senders or ax.mesh_size(mesh, axes.tokens)
    line = _Line(cfg, axes, num_senders // ax.mesh_size(mesh, axes.tokens), x.shape[1], frozenset(mesh.manual_axes))
    valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
    specs = ({name: _auto_part(rules, logical, auto) for name, (_, logical) in param_shapes(cfg).items()}, P(tokens), P())
    flat = _Flat(ax.mesh_size(mesh, tokens) * line.num_senders, specs[1], _explicit(mesh, auto))
    args = (params, flat.split(x), flat.split(valid), state)
    if not auto:
        y, stats = line(*args)
    else:
        in_specs = (specs[0], specs[1], specs[1], specs[2])
        # Up to jax 0.12 a nested shard_map cannot hand residuals to its backward: they name the outer, manual axes.
        line = jax.checkpoint(line) if mesh.manual_axes else line
        run = jax.shard_map(line, in_specs=in_specs, out_specs=(specs[1], specs[2]), axis_names=set(auto))
        y, stats = run(*flat.place(args, in_specs))
    return flat.join(y, x), stats


def _auto_part(rules: AxisRules, logical: tuple[str | None, ...], auto: tuple[str, ...]) -> P:
    """The spec of a parameter over the axes that are not manual yet."""
    return P(*(tuple(a for a in ax.as_tuple(getattr(rules, name)) if a in auto) if name else None for name in logical))


def _explicit(mesh, auto: tuple[str, ...]) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(types[name] == AxisType.Explicit for name in auto)


@dataclasses.dataclass(frozen=True)
class _Flat:
    """[batch, seq, ...] <-> [T, ...] with T padded to a multiple, and, on Explicit meshes, the shardings stated."""

    multiple: int
    spec: P
    explicit: bool

    def split(self, x):
        batch, seq = x.shape[:2]
        even = batch % self.multiple == 0
        if self.explicit:
            x = reshard(x, self.spec if even else P())
        x = x.reshape(batch * seq, *x.shape[2:])
        pad = -(batch * seq) % self.multiple
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) if pad else x

    def place(self, args, specs):
        if not self.explicit:
            return args
        return jax.tree.map(lambda spec, part: jax.tree.map(lambda leaf: reshard(leaf, spec), part), specs, args)

    def join(self, y, like):
        num_tokens = like.shape[0] * like.shape[1]
        if not self.explicit:
            return y[:num_tokens].reshape(like.shape)
        y = reshard(y, self.spec if like.shape[0] % self.multiple == 0 else P())
        return reshard(y[:num_tokens].reshape(like.shape), jax.typeof(like).sharding.spec)


@dataclasses.dataclass(frozen=True)
class _Line:
    """The per-shard line: route, plan, cross, combine."""

    cfg: MoEConfig
    axes: ShardAxes
    num_senders: int
    seq: int
    manual: frozenset[str]

    def __call__(self, params: dict[str, Array], x, valid, state):
        cfg, axes = self.cfg, self.axes
        x = jnp.where(valid[:, None], x, 0)
        with jax.named_scope("moe/route"):
            routing = route(x, params["router"], state, cfg)
            plan = self.plan(routing, valid)
        inside = ax.vary_over(x, axes.mlp).astype(cfg.dtype)
        plan = dataclasses.replace(plan, weight=ax.vary_over(plan.weight, axes.mlp))
        experts = _grouped(params, "expert", cfg, axes)
        exchange = EXCHANGES[cfg.capacity, self.exchange(x.shape[0])]
        y, num_rows = exchange(inside, plan, experts, Wire(axes.expert, cfg.codecs, cfg.num_chunks))
        if cfg.num_shared_experts:
            with jax.named_scope("moe/shared"):
                shared = _grouped(params, "shared", cfg, axes)(inside[None])[0]
                # Zeros already; the mask keeps a padded row's cotangent, whatever it is, out of the weights' gradients.
                y += jnp.where(valid[:, None], shared, 0)
        y = ax.sum_over(y, axes.mlp).astype(x.dtype)
        return y, self.stats(routing, plan, valid, num_rows)

    def exchange(self, num_tokens: int) -> str:
        """The name of the exchange; `auto` is resolved here and says why in the log."""
        cfg = self.cfg
        if num_tokens % cfg.num_chunks:
            legal = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
            raise ValueError(
                f"num_chunks={cfg.num_chunks} does not divide the {num_tokens} tokens of a shard: "
                f"legal are {', '.join(map(str, legal))}"
            )
        if cfg.exchange != "auto":
            return cfg.exchange
        choice = choose_exchange(cfg, num_tokens, self.num_senders, ax.axis_size(self.axes.expert))
        logger.info("%s", choice)
        return choice.name

    def plan(self, routing, valid) -> DispatchPlan | PoolPlan:
        """Who is dropped and where the others go; a PoolPlan has a leading axis of senders."""
        cfg, tokens = self.cfg, valid.shape[0] // self.num_senders
        if cfg.capacity == "cell":
            rows = cfg.cell_rows(tokens)
            return make_plan(routing, valid, cell_rows=rows, num_senders=self.num_senders, drop_by=cfg.drop_by)
        rule = cfg.pool_rule(tokens, ax.axis_size(self.axes.expert) if self.axes.expert else None)
        split = lambda leaf: leaf.reshape(self.num_senders, tokens, *leaf.shape[1:])
        return jax.vmap(lambda *sender: make_pool_plan(*sender, rule))(*jax.tree.map(split, (routing, valid)))

    def stats(self, routing, plan, valid, num_rows) -> RoutingStats:
        cfg, axes = self.cfg, self.axes
        aux = load_balance_loss(
            routing, valid, scope=cfg.loss_scope, axes=axes.tokens, sequence=self.sequences(valid.shape[0])
        )
        total = lambda counts: counts.reshape(-1, cfg.num_experts).sum(0)
        routed, kept, worked = ax.sum_over((total(plan.routed), total(plan.kept), num_rows), axes.tokens)
        return RoutingStats(
            aux_loss=aux,
            z_loss=router_z_loss(routing, valid, axes.tokens),
            tokens_per_expert=routed,
            num_assignments=routed.sum(),
            num_dropped=routed.sum() - worked,
            num_dropped_at_receiver=kept.sum() - worked,
            token_straggler=_straggler(num_rows, axes.tokens),
        )

    def sequences(self, t: int) -> tuple[Array, int]:
        """Each token's sequence over all shards [t], and how many there are: padding ends each manual shard's own."""
        outer = tuple(name for name in self.axes.tokens if name in self.manual)
        inner = tuple(name for name in self.axes.tokens if name not in self.manual)
        count = -(-t * ax.axis_size(inner) // self.seq)
        position = ax.axis_index(inner) * t + jnp.arange(t)
        return ax.axis_index(outer) * count + position // self.seq, count * ax.axis_size(outer)


def route(x: Float[Array, "t d"], router: Float[Array, "d E"], state: BiasState | None, cfg: MoEConfig):
    """Routes in float32 at the highest matmul precision: bf16 logits flip near-tied experts."""
    logits = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return cfg.router_rule(checkpoint_name(logits, "moe/route"), cfg.top_k, state)


def _straggler(num_rows, axes: tuple[str, ...]):
    """max - mean over devices of the rows that each one's experts take."""
    rows = num_rows.astype(jnp.float32)
    return lax.pmax(rows, axes) - lax.pmean(rows, axes) if axes else jnp.zeros_like(rows)


def _grouped(params: dict[str, Array], prefix: str, cfg: MoEConfig, axes: ShardAxes) -> GroupedExperts:
    """This shard's experts, whole in width d and in the compute dtype.

    Marked as varying over the token axes before the cast, so that gradients are summed over them in param_dtype.
    """

    def ready(name):
        weights = params.get(f"{prefix}_{name}")
        if weights is None:
            return None
        weights = ax.vary_over(weights, axes.tokens).astype(cfg.dtype)
        if not axes.embed:
            return weights
        return lax.all_gather(weights, axes.embed, axis=LOGICAL_AXES[name].index("embed"), tiled=True)

    return GroupedExperts(activation=cfg.activation, **{name: ready(name) for name in LOGICAL_AXES})
