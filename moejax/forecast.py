"""What lending experts would do to recorded routing: whether it pays, before anything is compiled for a mesh.

N: devices that share the experts, t: tokens of one, k: experts per token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.config import MoEConfig
from moejax.experts import expert_bytes
from moejax.lending import domain_of, held_rows, lend, lent_config
from moejax.pytree import pytree
from moejax.routing import Routing


@pytree
class Forecast:
    """One micro-batch.

    Attributes:
      rows_before: [N] rows that each device would work on if nothing were dropped and nothing lent.
      rows_after: [N] the same with experts lent.
      num_dropped_before: rows that the config's pools drop, nothing lent.
      num_dropped_after: those that they drop with experts lent.
      num_moved_experts: weights of an expert that go to another device and are used there.
      moved_bytes: of those, one way.
    """

    rows_before: Int[Array, "N"]
    rows_after: Int[Array, "N"]
    num_dropped_before: Int[Array, ""]
    num_dropped_after: Int[Array, ""]
    num_moved_experts: Int[Array, ""]
    moved_bytes: Float[Array, ""]

    @property
    def straggler_before(self) -> Float[Array, ""]:
        """max - mean of the rows before."""
        return self.rows_before.max() - self.rows_before.mean()

    @property
    def straggler_after(self) -> Float[Array, ""]:
        """max - mean of the rows after."""
        return self.rows_after.max() - self.rows_after.mean()


def forecast(expert: Int[Array, "N t k"], cfg: MoEConfig) -> Forecast:
    """Plans the loans of one micro-batch and counts; no token is moved and no expert works.

    Args:
      expert: [N, t, k] int32, what every token of every device chose.
      cfg: a layer with pools and a `rebalance`.

    Raises:
      ValueError: for a config without them, a shape that is not its, or domains that do not divide the devices.
    """
    if cfg.rebalance is None or cfg.capacity != "pool":
        raise ValueError(f"rebalance={cfg.rebalance!r}, capacity={cfg.capacity!r}: needs a RebalanceConfig and 'pool'")
    num_devices, _, top_k = expert.shape
    if top_k != cfg.top_k or cfg.num_experts % num_devices or num_devices % (cfg.rebalance.num_devices or num_devices):
        raise ValueError(
            f"expert of shape {expert.shape}: needs [N, t, top_k={cfg.top_k}] with N devices that divide num_experts="
            f"{cfg.num_experts} and consist of domains of {cfg.rebalance.num_devices or num_devices}"
        )
    return _forecast(expert, dataclasses.replace(cfg, num_destinations=num_devices))


@functools.partial(jax.jit, static_argnums=1)
def _forecast(expert, cfg):
    assert cfg.rebalance is not None
    (n, t, k), valid = expert.shape, jnp.ones(expert.shape[0] * expert.shape[1], bool)
    zeros = jnp.zeros((n * t, cfg.num_experts))
    routing = Routing(expert.reshape(-1, k), jnp.ones((n * t, k)), zeros, zeros)
    domain = domain_of(cfg, ())
    lending = lend(routing, valid, n, domain, cfg.rebalance, ())
    before = held_rows(routing, valid, n, dataclasses.replace(cfg, level_loads=None), n, ())
    after = held_rows(lending.routing(routing), valid, n, lent_config(cfg, domain), n, ())
    lanes = (lending.lane < domain.num_own).sum(dtype=jnp.int32)
    device = lending.seat // domain.device_seats
    return Forecast(
        rows_before=lending.loads.reshape(n, -1).sum(1),
        rows_after=(device[..., None] == jnp.arange(n)).sum((0, 1), dtype=jnp.int32),
        num_dropped_before=n * t * k - before.sum(),
        num_dropped_after=n * t * k - after.sum(),
        num_moved_experts=lanes,
        moved_bytes=lanes.astype(jnp.float32) * expert_bytes(cfg.d_model, cfg.d_ff, cfg.activation, cfg.dtype),
    )
