"""Routing by a hash of the token's id: nothing is learnt, nothing collapses."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from moejax.routing import LoadState, Routing, Tokens, choose


@dataclasses.dataclass(frozen=True)
class Hash:
    """Hash layers (Roller et al. 2021, arXiv 2106.04426): experts are a fixed random function of the token's id.

    Every (id, expert) pair has a hash, and a token takes the k experts of the highest ones, each with weight 1/k. So choices
    are distinct, and growing the layer moves only the tokens that a new expert wins. The router's matrix has no part in it.

    Attributes:
      seed: of the hashes, 0 to 2**32 - 1. Give layers different ones.
    """

    seed: int = 0

    by_token_id = True

    def __post_init__(self):
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r}: needs a whole number from 0 to 2**32 - 1")

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by `RoutingContext.token_ids`.

        Raises:
          ValueError: where the context has none.
        """
        ids = None if tokens is None else tokens.context.token_ids
        if ids is None:
            raise ValueError("context.token_ids=None: router 'hash' goes by them; needs RoutingContext(token_ids=...)")
        expert = choose(hashes(ids, logits.shape[-1], self.seed), top_k, tokens)
        chosen = (expert[:, :, None] == jnp.arange(logits.shape[-1])).any(1)
        return Routing(expert, jnp.full(expert.shape, 1 / top_k, jnp.float32), logits, chosen / jnp.float32(top_k))


def hashes(ids: Int[Array, "t"], num_experts: int, seed: int) -> Float[Array, "t E"]:
    """[t, E] whole numbers below 2**24, exact in float32: the high bits of a mix of (id, expert, seed)."""
    expert = jnp.arange(num_experts, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    mixed = _mix(ids.astype(jnp.uint32)[:, None] + _mix(expert + jnp.uint32(seed)))
    return (mixed >> 8).astype(jnp.float32)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection of 32 bits of which each output bit depends on every input bit (Wellons, "lowbias32")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
