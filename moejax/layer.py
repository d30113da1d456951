"""MoELayer (flax.nnx) and `moe`: the line spread over a mesh.

Shape legend. T: tokens of the whole batch, d: model width, f: expert width, E: experts in the layer.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from moejax import axes as ax
from moejax.axes import AxisRules, ShardAxes
from moejax.config import MoEConfig
from moejax.context import RoutingContext
from moejax.experts import LOGICAL_AXES, expert_shapes
from moejax.lending import axes_of
from moejax.line import ApplyExpert, Line
from moejax.params import Init, born_sharded
from moejax.placement import ExpertPlacement, ExpertTable
from moejax.routing import LoadState, TwoMatrices
from moejax.stats import RoutingStats

# By parameter: its shape and its logical axes.
ParamShapes: TypeAlias = dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


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
            init = param_init(cfg, name)
            setattr(self, name, born_sharded(init, rngs.params(), shape, cfg.param_dtype, logical, rules))
        self.router_state = RouterState(cfg.router_rule.init_state(cfg.num_experts))
        if cfg.num_slots is not None:
            self.placement = RouterState(first_table(cfg))

    def __call__(
        self,
        x: Float[Array, "b s d"],
        valid: Bool[Array, "b s"] | None = None,
        context: RoutingContext | None = None,
    ):
        """Routes each token through its experts.

        Args:
          x: [batch, seq, d_model].
          valid: [batch, seq], False for padding: it takes no capacity, adds to no loss, and gets zeros. None: all valid.
          context: what the call says of its tokens and their routing; None: `RoutingContext()`.

        Returns:
          (y [batch, seq, d_model] in the dtype of x, RoutingStats).
        """
        params = {name: getattr(self, name)[...] for name in param_shapes(self.cfg)}
        state = self.router_state.get_value()
        if self.cfg.num_slots is not None:
            context = with_table(context, self.placement.get_value())
        return moe(params, x, valid, state, cfg=self.cfg, rules=self.rules, context=context)


def param_shapes(cfg: MoEConfig) -> ParamShapes:
    """Each parameter's shape and logical axes, by name: router, expert_up ..., shared_up ...; of groups expert_0_up ..."""
    found: ParamShapes = {"router": ((cfg.d_model, cfg.num_experts), (None, None))}
    if isinstance(cfg.router_rule, TwoMatrices):
        found["router_noise"] = found["router"]
    for g, group in enumerate(cfg.expert_groups):
        prefix = "expert" if cfg.expert_sizes is None else f"expert_{g}"
        for name, shape in expert_shapes(*group, cfg.activation).items():
            found[f"{prefix}_{name}"] = (shape, LOGICAL_AXES[name])
    if cfg.num_shared_experts:
        width = cfg.num_shared_experts * cfg.d_ff
        for name, shape in expert_shapes(1, cfg.d_model, width, cfg.activation).items():
            found[f"shared_{name}"] = (shape, (None, *LOGICAL_AXES[name][1:]))
    return found


def init_param(key: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Truncated normal of standard deviation 1/sqrt(fan in); fan in is the second last dimension."""
    return jax.nn.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))(key, shape, dtype)


@functools.cache
def param_init(cfg: MoEConfig, name: str) -> Init:
    """What makes the parameter of that name; replicas of an expert begin alike."""
    if cfg.num_slots is None or not name.startswith("expert_"):
        return init_param
    expert_of = first_placement(cfg).expert_of
    return lambda key, shape, dtype: init_param(key, (cfg.num_experts, *shape[1:]), dtype)[jnp.asarray(expert_of)]


def first_placement(cfg: MoEConfig) -> ExpertPlacement:
    """Where the experts of a new layer are."""
    return ExpertPlacement.even(cfg.num_experts, cfg.num_places)


def first_table(cfg: MoEConfig) -> ExpertTable:
    """The same, for the devices."""
    return first_placement(cfg).table()


def with_table(context: RoutingContext | None, table: ExpertTable) -> RoutingContext:
    """The context with the layer's own table, unless the call brought one."""
    context = RoutingContext() if context is None else context
    return context if context.placement is not None else dataclasses.replace(context, placement=table)


def check_layer(cfg: MoEConfig, rules: AxisRules, mesh) -> ShardAxes:
    """The layer's axes on the mesh.

    Raises:
      ValueError: where a mesh axis does not divide the dimension that the rules shard over it.
    """
    axes = rules.resolve(mesh)
    name = "num_experts" if cfg.num_slots is None else "num_slots"
    groups = 1 if cfg.expert_sizes is None else len(cfg.expert_sizes)
    ax.check_divides(name if groups == 1 else "experts of each size", cfg.num_places // groups, axes.expert, mesh)
    ax.check_divides("d_model", cfg.d_model, axes.embed, mesh)
    for size in (cfg.d_ff, *(cfg.expert_sizes or ())):
        ax.check_divides("d_ff" if size == cfg.d_ff else "expert_sizes", size, axes.mlp, mesh)
    if cfg.overlap:
        ax.check_divides("d_model", cfg.d_model, axes.embed + axes.mlp, mesh)
    if cfg.num_senders is not None:
        ax.check_divides("num_senders", cfg.num_senders, axes.tokens, mesh)
    if cfg.capacity == "pool" or (cfg.receive_factor is not None and cfg.overflow == "drop"):
        _check_groups(cfg, axes, mesh)
    if cfg.rebalance is not None:
        _check_domain(cfg, axes, mesh)
    one_level = len(axes.expert) == 1 and not axes.mlp
    if cfg.exchange == "hierarchical" and (one_level or len(axes.expert) > 2):
        raise ValueError(
            f"exchange='hierarchical': needs two expert axes (slow, fast), or one and an mlp axis (fast, over which tokens "
            f"are replicated); on this mesh the rules give expert {axes.expert!r}, mlp {axes.mlp!r}"
        )
    return axes


def _check_domain(cfg: MoEConfig, axes: ShardAxes, mesh) -> None:
    """The axes that experts are lent along are the last ones that they are sharded over."""
    assert cfg.rebalance is not None
    names, size = ax.as_tuple(cfg.rebalance.axis), cfg.rebalance.num_devices
    if not axes.expert:
        group = cfg.num_destinations or 1
        if size is not None and group % size:
            raise ValueError(f"rebalance num_devices={size} does not divide num_destinations={group}")
        return
    present = axes_of(cfg.rebalance, axes.expert)
    unknown = [name for name in names if mesh.shape.get(name) != 1 and name not in axes.expert]
    if unknown or present != axes.expert[len(axes.expert) - len(present) :]:
        raise ValueError(f"rebalance axis={cfg.rebalance.axis!r}: legal are the last of the expert axes {axes.expert!r}")
    if present and size not in (None, ax.mesh_size(mesh, present)):
        raise ValueError(f"rebalance num_devices={size}: the mesh has {ax.mesh_size(mesh, present)} along {present!r}")


def _check_groups(cfg: MoEConfig, axes: ShardAxes, mesh) -> None:
    """A destination with a bound serves n consecutive senders: those of one expert group on a mesh that has expert axes."""
    what = "pools" if cfg.capacity == "pool" else "receivers with a bound"
    shards = ax.mesh_size(mesh, axes.tokens)
    n = cfg.num_destinations or ax.mesh_size(mesh, axes.expert)
    senders = cfg.num_senders or shards
    groups = 1 if cfg.expert_sizes is None else len(cfg.expert_sizes)
    if cfg.num_places // groups % n:
        what = "num_slots" if cfg.num_slots else "num_experts" if groups == 1 else "experts of each size"
        raise ValueError(f"num_destinations={n} does not divide {what}={cfg.num_places // groups}")
    if not axes.expert:
        if senders // shards % n:
            raise ValueError(f"num_senders={senders} over {shards} token shards: each needs a multiple of {n} destinations")
        return
    if n != ax.mesh_size(mesh, axes.expert):
        raise ValueError(f"num_destinations={n}: the mesh has {ax.mesh_size(mesh, axes.expert)} expert shards")
    if senders != shards:
        raise ValueError(f"num_senders={senders}: {what} need one sender per token shard, {shards}")
    if axes.tokens[-len(axes.expert) :] != axes.expert:
        raise ValueError(f"batch axes {axes.tokens!r}: {what} need the expert axes {axes.expert!r} last")


def moe(
    params: dict[str, Any],
    x: Float[Array, "b s d"],
    valid: Bool[Array, "b s"] | None,
    state: LoadState | None,
    *,
    cfg: MoEConfig,
    rules: AxisRules = AxisRules(),
    apply_expert: ApplyExpert | None = None,
    context: RoutingContext | None = None,
) -> tuple[Float[Array, "b s d"], RoutingStats]:
    """The layer as a function: the per-shard line under a shard_map over whatever mesh axes are not manual yet.

    Inside a user's own shard_map the axes that are manual already are used as they are: x and the parameters are then
    this shard's parts, as the rules would split them.

    Args:
      params: by name, as `param_shapes` says; with `apply_expert`, "experts" in place of the expert weights.
      x: [batch, seq, d_model].
      valid: [batch, seq], False for padding; None: all valid.
      state: the router's, or None.
      cfg: the layer.
      rules: logical axes to mesh axes.
      apply_expert: (one expert's weights, rows [r, d]) -> rows [r, d]: experts of another kind, whose weights, a pytree
        with a leading axis [E] in each leaf, are params["experts"].
      context: what the call says of its tokens and their routing; None: `RoutingContext()`.

    Raises:
      ValueError: for a width other than cfg.d_model, or a mesh that does not divide the layer.
    """
    mesh = ax.current_mesh()
    axes = check_layer(cfg, rules, mesh)
    if x.ndim != 3 or x.shape[-1] != cfg.d_model:
        raise ValueError(f"x of shape {x.shape}: needs [batch, seq, d_model={cfg.d_model}]")
    context = RoutingContext() if context is None else context
    context.check(x.shape[:2], cfg.num_experts, cfg.top_k, cfg.choices)
    _check_table(cfg, context.placement)
    _check_call(params, x, valid, cfg, whole=not mesh.manual_axes and apply_expert is None)
    auto = tuple(name for name in axes.all if name not in mesh.manual_axes)
    tokens = tuple(name for name in axes.tokens if name in auto)
    num_senders = cfg.num_senders or ax.mesh_size(mesh, axes.tokens)
    num_own = num_senders // ax.mesh_size(mesh, axes.tokens)
    line = Line(cfg, axes, num_own, x.shape[1], frozenset(mesh.manual_axes), apply_expert)
    valid = ax.vary_over(jnp.ones(x.shape[:2], bool), sorted(ax.varying(x))) if valid is None else valid
    logical = {name: axes for name, (_, axes) in param_shapes(cfg).items()} | {"experts": ("expert",)}
    param_specs = {name: _auto_part(rules, logical[name], auto) for name in params}
    flat = _Flat(ax.mesh_size(mesh, tokens) * num_own, P(tokens), _explicit(mesh, auto))
    context = context.flat(flat.split, x.shape[:2], cfg.num_experts)
    args = (params, flat.split(x), flat.split(valid), state, context)
    if not auto:
        y, stats, expert = line(*args)
    else:
        in_specs = (param_specs, flat.spec, flat.spec, P(), context.specs(flat.spec))
        # Up to jax 0.12 a nested shard_map cannot hand residuals to its backward: they name the outer, manual axes.
        line = jax.checkpoint(line) if mesh.manual_axes else line
        out_specs = flat.spec, P(), flat.spec if context.record else None
        run = jax.shard_map(line, in_specs=in_specs, out_specs=out_specs, axis_names=set(auto))
        y, stats, expert = run(*flat.place(args, in_specs))
    return flat.join(y, x), stats if expert is None else dataclasses.replace(stats, expert=flat.join(expert, x))


def _check_table(cfg: MoEConfig, table: ExpertTable | None) -> None:
    if cfg.num_slots is None or table is None:
        if cfg.num_slots is not None or table is not None:
            given = None if table is None else "a table"
            raise ValueError(f"context.placement={given}: num_slots={cfg.num_slots}; needs a table with slots, and only then")
        return
    shape = (cfg.num_experts, cfg.num_slots - cfg.num_experts + 1)
    if table.slots.shape != shape:
        raise ValueError(f"context.placement of shape {table.slots.shape}: num_slots={cfg.num_slots} needs {shape}")


def _check_call(params, x, valid, cfg, whole: bool) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating) or 0 in x.shape:
        raise ValueError(f"x of dtype {x.dtype} and shape {x.shape}: needs floating-point numbers, and some")
    if valid is not None and (valid.shape != x.shape[:2] or valid.dtype != bool):
        raise ValueError(f"valid of dtype {valid.dtype} and shape {valid.shape}: needs bool [batch, seq] of x, {x.shape[:2]}")
    if not whole:
        return
    needed, given = {name: shape for name, (shape, _) in param_shapes(cfg).items()}, jax.tree.map(jnp.shape, params)
    wrong = [name for name in needed.keys() | given.keys() if needed.get(name) != given.get(name)]
    if wrong:
        name = min(wrong)
        raise ValueError(f"params[{name!r}] of shape {given.get(name)}: the config's is {needed.get(name)}")


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

    def place(self, args: tuple, specs: tuple) -> tuple:
        if not self.explicit:
            return args
        return jax.tree.map(lambda spec, part: jax.tree.map(lambda leaf: reshard(leaf, spec), part), specs, args)

    def join(self, y, like):
        num_tokens, shape = like.shape[0] * like.shape[1], (*like.shape[:2], y.shape[-1])
        if not self.explicit:
            return y[:num_tokens].reshape(shape)
        y = reshard(y, self.spec if like.shape[0] % self.multiple == 0 else P())
        return reshard(y[:num_tokens].reshape(shape), jax.typeof(like).sharding.spec)
