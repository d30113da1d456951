"""The same MoE layer for flax.linen models: `init`, `apply`, losses returned in the stats."""

import functools

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float

from moejax.axes import AxisRules, current_mesh
from moejax.config import MoEConfig
from moejax.context import RoutingContext
from moejax.layer import check_layer, first_table, moe, param_init, param_shapes, with_table
from moejax.stats import RoutingStats


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer for flax.linen models.

    Parameters are boxed as `nn.Partitioned` with the mesh axes of the rules on the current mesh, so that
    `nn.get_partition_spec(variables)` gives their layout for `jit(init, out_shardings=...)`. A router's state is in the
    collection "router_state"; no forward pass changes it (see `moejax.update_router`).

    Attributes:
      cfg: the layer.
      rules: logical axes to mesh axes.
    """

    cfg: MoEConfig
    rules: AxisRules = AxisRules()

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b s d"],
        valid: Bool[Array, "b s"] | None = None,
        context: RoutingContext | None = None,
    ) -> tuple[Float[Array, "b s d"], RoutingStats]:
        """Routes each token through its experts.

        Args:
          x: [batch, seq, d_model].
          valid: [batch, seq], False for padding: it takes no capacity, adds to no loss, and gets zeros. None: all valid.
          context: what the call says of its tokens and their routing; None: `RoutingContext()`.

        Returns:
          (y [batch, seq, d_model] in the dtype of x, RoutingStats).

        Raises:
          ValueError: where the mesh does not divide the layer, or x has another width.
        """
        cfg, rules, mesh = self.cfg, self.rules, current_mesh()
        check_layer(cfg, rules, mesh)
        params = {}
        for name, (shape, logical) in param_shapes(cfg).items():
            make = functools.partial(_init, param_init(cfg, name))
            init = nn.with_partitioning(make, tuple(rules.spec(logical, mesh)))
            params[name] = self.param(name, init, shape, cfg.param_dtype, rules.spec(logical, mesh))
        if cfg.num_slots is not None:
            context = with_table(context, self.variable("router_state", "placement", first_table, cfg).value)
        return moe(params, x, valid, router_state(self, cfg), cfg=cfg, rules=rules, context=context)


def router_state(module: nn.Module, cfg: MoEConfig):
    """The module's router state, in its collection "router_state"; None for a router that keeps none."""
    if cfg.router_rule.init_state(cfg.num_experts) is None:
        return None
    return module.variable("router_state", "state", cfg.router_rule.init_state, cfg.num_experts).value


def _init(make, key, shape, dtype, spec):
    """Laid out where it is made: flax constrains a boxed parameter only when it is read."""
    value, mesh = make(key, shape, dtype), current_mesh()
    if mesh.empty:
        return value
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(value, spec) if explicit else jax.lax.with_sharding_constraint(value, spec)
