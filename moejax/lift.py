"""as_experts: any user's module as the experts of a MoE layer.

E: experts in the layer, e: experts on this shard, r: rows of an expert, d: model width.
"""

from collections.abc import Callable
from typing import cast

import flax.linen as nn
import jax
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, Bool, Float

from moejax.axes import AxisRules, current_mesh
from moejax.config import EXCHANGES, MoEConfig
from moejax.context import RoutingContext
from moejax.layer import RouterState, check_layer, init_param, moe, param_shapes
from moejax.linen import router_state
from moejax.params import born_sharded

MakeExpert = Callable[[nnx.Rngs], nnx.Module]


def as_experts(
    module: nn.Module | MakeExpert, cfg: MoEConfig, *, rules: AxisRules = AxisRules(), rngs: nnx.Rngs | None = None
) -> "LinenExperts | NnxExperts":
    """Lifts a module into the sharded experts of a MoE layer.

    Args:
      module: one expert: a linen module, or a function from nnx.Rngs to an nnx module. It maps rows [r, d_model] to rows
        [r, d_model], each by itself, and keeps nothing but parameters. Empty rows are zeros: what it makes of
        them is not used, but its gradient there must be finite (a norm needs its epsilon).
      cfg: the layer. d_ff and activation are those of its shared experts, if it has any.
      rules: logical axes to mesh axes. Each expert lives whole on its shard.
      rngs: for an nnx module, a stream `params`.

    Returns:
      A linen or an nnx module, called as `MoELayer` is: (x [batch, seq, d_model], valid) -> (y, RoutingStats).

    Raises:
      ValueError: for pools and "ragged", whose rows are no cells, for a mesh that splits experts over a tensor axis, or a
        module of neither kind.
    """
    if isinstance(module, nn.Module):
        return LinenExperts(module, cfg, rules)
    if not callable(module) or rngs is None:
        raise ValueError(f"module={module!r}, rngs={rngs!r}: needs a linen module, or an nnx constructor and rngs")
    return NnxExperts(module, cfg, rules=rules, rngs=rngs)


class NnxExperts(nnx.Module):
    """A MoE layer whose experts are E of a user's nnx module, stacked and sharded along their first axis."""

    def __init__(self, make: MakeExpert, cfg: MoEConfig, *, rules: AxisRules, rngs: nnx.Rngs):
        """Args: make, one expert; cfg, the layer; rules, logical axes to mesh axes; rngs, a stream `params`."""
        _check(cfg, rules)
        self.cfg, self.rules = cfg, rules
        for name, (shape, logical) in _own_shapes(cfg).items():
            setattr(self, name, born_sharded(init_param, rngs.params(), shape, cfg.param_dtype, logical, rules))
        self.experts = nnx.vmap(make)(nnx.Rngs(rngs.params()).split(cfg.num_experts))
        _check_only_params(self.experts)
        nnx.update(self.experts, jax.tree.map(lambda leaf: _place(leaf, rules), nnx.state(self.experts)))
        self.router_state = RouterState(cfg.router_rule.init_state(cfg.num_experts))

    def __call__(
        self,
        x: Float[Array, "b s d"],
        valid: Bool[Array, "b s"] | None = None,
        context: RoutingContext | None = None,
    ):
        """x: [batch, seq, d_model]; valid: [batch, seq] or None; context or None -> (y [batch, seq, d_model], RoutingStats)."""
        graphdef, stacked = nnx.split(self.experts)
        params = {name: getattr(self, name)[...] for name in _own_shapes(self.cfg)}
        apply = lambda expert, rows: nnx.merge(graphdef, expert)(rows)
        state = self.router_state.get_value()
        params["experts"] = stacked
        return moe(params, x, valid, state, cfg=self.cfg, rules=self.rules, apply_expert=apply, context=context)


class LinenExperts(nn.Module):
    """A MoE layer whose experts are E of a user's linen module, stacked and sharded along their first axis.

    Attributes:
      expert: one expert.
      cfg: the layer.
      rules: logical axes to mesh axes.
    """

    expert: nn.Module
    cfg: MoEConfig
    rules: AxisRules = AxisRules()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b s d"],
        valid: Bool[Array, "b s"] | None = None,
        context: RoutingContext | None = None,
    ):
        """x: [batch, seq, d_model]; valid: [batch, seq] or None; context or None -> (y [batch, seq, d_model], RoutingStats)."""
        cfg, rules, mesh = self.cfg, self.rules, current_mesh()
        _check(cfg, rules)
        params = {}
        for name, (shape, logical) in _own_shapes(cfg).items():
            init = nn.with_partitioning(init_param, tuple(rules.spec(logical, mesh)))
            params[name] = self.param(name, init, shape, cfg.param_dtype)
        expert = self.expert.clone(parent=None)
        row = jax.ShapeDtypeStruct((1, cfg.d_model), cfg.dtype)

        def stacked(key):
            init = lambda key: nn.meta.unbox(expert.lazy_init(key, row)["params"])
            values = jax.vmap(init)(jax.random.split(key, cfg.num_experts))
            names = lambda leaf: tuple(rules.spec(("expert", *[None] * (leaf.ndim - 1)), mesh))
            return jax.tree.map(lambda leaf: nn.Partitioned(_place(leaf, rules), names(leaf)), values)

        params["experts"] = self.param("experts", stacked)
        apply = lambda weights, rows: cast(Array, expert.apply({"params": weights}, rows))
        state = router_state(self, cfg)
        return moe(params, x, valid, state, cfg=cfg, rules=rules, apply_expert=apply, context=context)


def _check(cfg: MoEConfig, rules: AxisRules) -> None:
    if cfg.capacity != "cell":
        raise ValueError(f"capacity={cfg.capacity!r}: lifted experts work on cells; legal is 'cell'")
    if cfg.exchange == "ragged":
        legal = ", ".join(name for name in EXCHANGES if name != "ragged")
        raise ValueError(f"exchange='ragged': lifted experts work on cells; legal are {legal}")
    for name in ("expert_sizes", "num_slots"):
        if getattr(cfg, name) is not None:
            raise ValueError(f"{name}={getattr(cfg, name)!r}: lifted experts are alike and have a place each; legal is None")
    axes = check_layer(cfg, rules, current_mesh())
    if axes.mlp:
        raise ValueError(f"mlp axes {axes.mlp!r}: a lifted expert is whole on its shard; legal is AxisRules(mlp=None)")


def _check_only_params(experts: nnx.Module) -> None:
    others = sorted({type(leaf).__name__ for _, leaf in nnx.to_flat_state(nnx.state(experts, nnx.Not(nnx.Param)))})
    if others:
        raise ValueError(f"module keeps {', '.join(others)}: a lifted expert may keep nnx.Param only")


def _own_shapes(cfg: MoEConfig):
    """The layer's parameters besides the lifted experts."""
    return {name: found for name, found in param_shapes(cfg).items() if not name.startswith("expert_")}


def _place(leaf: Array, rules: AxisRules) -> Array:
    """[E, ...] laid out over the expert axes of the current mesh."""
    mesh = current_mesh()
    if mesh.empty:
        return leaf
    spec = rules.spec(("expert", *[None] * (leaf.ndim - 1)), mesh)
    if not isinstance(leaf, Tracer):
        return jax.device_put(leaf, NamedSharding(jax.sharding.get_mesh(), spec))
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(leaf, spec) if explicit else lax.with_sharding_constraint(leaf, spec)
