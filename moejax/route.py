"""From tokens to a Routing: logits, what the call's context allows, and the router.

t: tokens on this shard, d: model width, k: experts per token, E: experts in the layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from moejax import axes as ax
from moejax.config import MoEConfig
from moejax.routing import MASKED, LoadState, Routing, Tokens, pick, rank


def route(
    x: Float[Array, "t d"],
    router: Float[Array, "d E"],
    state: LoadState | None,
    cfg: MoEConfig,
    tokens: Tokens | None = None,
    router_noise: Float[Array, "d E"] | None = None,
) -> Routing:
    """Routes in float32 at the highest matmul precision: bf16 logits flip near-tied experts.

    Args:
      x: [t, d].
      router: [d, E].
      state: the router's, or None.
      cfg: the layer.
      tokens: what is known of the tokens; None: nothing, and the router decides alone.
      router_noise: [d, E], the second matrix of a router that has one.
    """
    x = x.astype(jnp.float32)
    if tokens is None:
        return cfg.router_rule(_logits(x, router), cfg.top_k, state, None)
    if cfg.jitter and tokens.context.train:
        x = x * _jitter(x.shape[1], cfg.jitter, tokens)
    if router_noise is not None:
        tokens = dataclasses.replace(tokens, noise_logits=_logits(x, router_noise))
    logits, allowed = checkpoint_name(_logits(x, router), "moe/route"), tokens.context.expert_mask
    routing = _route_where(logits, state, cfg, tokens, allowed)
    budget = tokens.context.expert_budget
    if budget is None or tokens.context.train:
        return routing
    inside = _best_experts(routing.probs, tokens, budget)
    return _route_where(
        logits, state, cfg, tokens, jnp.broadcast_to(inside, logits.shape) if allowed is None else allowed & inside
    )


def _logits(x: Float[Array, "t d"], router: Float[Array, "d E"]) -> Float[Array, "t E"]:
    return jnp.dot(x, router.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _jitter(width: int, jitter: float, tokens: Tokens) -> Float[Array, "t d"]:
    draw = lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (width,), minval=1 - jitter, maxval=1 + jitter)
    return jax.vmap(draw)(tokens.keys(f"jitter={jitter}"))


def _route_where(
    logits: Float[Array, "t E"], state, cfg: MoEConfig, tokens: Tokens, allowed: Bool[Array, "t E"] | None
) -> Routing:
    """Routes among the allowed experts. Tokens that may go nowhere are routed as if anywhere, and none of it is used."""
    if allowed is None:
        return _as_recorded(cfg.router_rule(logits, cfg.top_k, state, tokens), tokens)
    somewhere = allowed | ~allowed.any(-1, keepdims=True)
    tokens = dataclasses.replace(tokens, allowed=somewhere)
    routing = _as_recorded(cfg.router_rule(jnp.where(somewhere, logits, MASKED), cfg.top_k, state, tokens), tokens)
    used = pick(allowed.astype(jnp.float32), routing.expert) > 0
    used = used if routing.used is None else used & routing.used
    return dataclasses.replace(routing, used=used, weight=jnp.where(used, routing.weight, 0))


def _as_recorded(routing: Routing, tokens: Tokens) -> Routing:
    """Without the choices that a replayed record does not use."""
    replay = tokens.context.replay
    if replay is None:
        return routing
    used = replay >= 0 if routing.used is None else routing.used & (replay >= 0)
    return dataclasses.replace(routing, used=used, weight=jnp.where(used, routing.weight, 0))


def _best_experts(probs: Float[Array, "t E"], tokens: Tokens, budget: int) -> Bool[Array, "E"]:
    """The experts of the largest summed scores over the valid tokens of all shards, ties to the lower one."""
    total = ax.sum_over(jnp.where(tokens.valid[:, None], probs, 0).sum(0), tokens.axes)
    return (rank(total, budget)[:, None] == jnp.arange(probs.shape[-1])).any(0)
