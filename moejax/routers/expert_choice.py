"""Experts choose tokens, within each sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax.routing import (
    LoadState,
    Routing,
    Tokens,
    allow,
    check_flag,
    check_number,
    check_whole,
    pick,
    sequences,
    settle,
)


@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """Each expert takes its best tokens (Zhou et al. 2022, arXiv 2202.09368): even load, no loss needed for it.

    In a sequence of v valid tokens expert e takes the floor((v * top_k + E - 1 - e) / E) tokens of its highest softmax
    probability, ties to the earlier one: v * top_k pairs in all. A token may be taken by any number of experts, or none.

    Caveat: whether an expert takes a token depends on later tokens of the sequence, so a causal language model trained so
    reads the future through its routing, and cannot decode as it was trained. With `causal=True` it does not: token by token,
    an expert takes those that are among that many best ones *so far*, as good as an earlier one counting as better, as long as
    it has taken fewer than that many. It takes at most as many as the plain rule. Encoders need no such care.

    Attributes:
      causal: choose by earlier tokens of the sequence alone. A comparison of every two of its tokens for each expert.
      max_experts: of one token at most; where more want it, the most probable ones have it. None: all of them. The work of
        dispatch and combine grows with it.
      scale: factor on the weights, which are the softmax probabilities.
    """

    causal: bool = False
    max_experts: int | None = None
    scale: float = 1.0

    whole_sequences = True

    def __post_init__(self):
        check_flag("causal", self.causal)
        check_number("scale", self.scale)
        if self.max_experts is not None:
            check_whole("max_experts", self.max_experts)

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where a token may not have its top k."""
        if self.max_experts is not None and not top_k <= self.max_experts <= num_experts:
            raise ValueError(f"max_experts={self.max_experts}: needs top_k={top_k} to num_experts={num_experts}, or None")

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def most_choices(self, num_experts: int, top_k: int) -> int:
        """Experts of one token at most."""
        return self.max_experts or num_experts

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; without tokens, they are one sequence."""
        (t, num_experts), seq = logits.shape, len(logits) if tokens is None else tokens.seq
        valid = jnp.ones(t, bool) if tokens is None else tokens.valid
        # By logarithms: probabilities below the smallest float would all tie.
        scores = sequences(lax.stop_gradient(allow(jax.nn.log_softmax(logits), tokens)), seq)  # [n, s, E]
        counts = sequences(valid, seq)
        quota = _quota(counts, num_experts, top_k)
        wanted = counts[:, :, None] & jnp.isfinite(scores)
        taken = _causal(scores, wanted, quota) if self.causal else _best(scores, wanted, quota)
        flat = lambda values: values.reshape(-1, num_experts)[:t]
        expert, used = self._by_token(flat(taken), flat(scores), top_k, tokens)
        probs = jax.nn.softmax(logits)
        weight = jnp.where(used, pick(probs, expert) * self.scale, 0)
        token = _by_expert(taken, scores, -(-seq * top_k // num_experts), t)
        return Routing(expert, weight, logits, probs, used=used, token=token)

    def _by_token(
        self, taken: Bool[Array, "t E"], scores: Float[Array, "t E"], top_k: int, tokens: Tokens | None
    ) -> tuple[Int[Array, "t k"], Bool[Array, "t k"]]:
        """Each token's experts, most probable first, and which of them have it."""
        num_experts = scores.shape[-1]
        k = self.most_choices(num_experts, top_k)
        values, expert = lax.top_k(jnp.where(taken, scores, -jnp.inf), k)
        used = jnp.isfinite(values)
        if tokens is not None and tokens.context.replay is not None:
            used = tokens.context.replay >= 0
        elif tokens is not None and tokens.context.force_balance:
            place = jnp.arange(k, dtype=jnp.int32)
            return (tokens.position[:, None] * top_k + place) % num_experts, jnp.broadcast_to(place < top_k, used.shape)
        return settle(expert.astype(jnp.int32), num_experts, tokens), used


def _quota(valid: Bool[Array, "n s"], num_experts: int, top_k: int) -> Int[Array, "n s E"]:
    """How many tokens each expert may have taken of a sequence up to each of its tokens: top_k for each valid one in all."""
    pairs = jnp.cumsum(valid, 1, dtype=jnp.int32)[:, :, None] * top_k
    return (pairs + num_experts - 1 - jnp.arange(num_experts, dtype=jnp.int32)) // num_experts


def _best(scores, wanted, quota) -> Bool[Array, "n s E"]:
    """The whole sequence's best, as many as its last quota. Two sorts: ranks are the inverse of the order."""
    index = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :, None], scores.shape)
    order = lax.sort((-jnp.where(wanted, scores, -jnp.inf), index), dimension=1, num_keys=1, is_stable=True)[1]
    place = lax.sort((order, index), dimension=1, num_keys=1)[1]
    return wanted & (place < quota[:, -1:])


def _causal(scores, wanted, quota) -> Bool[Array, "n s E"]:
    """Among the best so far, and no more than the quota so far."""
    s = scores.shape[1]
    earlier = jnp.arange(s)[:, None] < jnp.arange(s)  # [i, t]
    before = (scores[:, :, None] > scores[:, None]) & wanted[:, :, None] & earlier[None, :, :, None]
    good = wanted & (before.sum(1, dtype=jnp.int32) < quota)
    # Counts follow count = min(count before + good, quota), whose closed form is a running minimum.
    total = jnp.cumsum(good, 1, dtype=jnp.int32)
    count = total + jnp.minimum(lax.cummin(quota - total, axis=1), 0)
    return good & (count > jnp.pad(count[:, :-1], ((0, 0), (1, 0), (0, 0))))


def _by_expert(taken, scores, most: int, t: int) -> Int[Array, "E c"]:
    """The tokens that each expert takes of each sequence, best first, `most` of each; t where there are fewer."""
    n, s, num_experts = scores.shape
    values, place = lax.top_k(jnp.where(taken, scores, -jnp.inf).swapaxes(1, 2), min(most, s))  # [n, E, c]
    token = jnp.where(jnp.isfinite(values), place + jnp.arange(n)[:, None, None] * s, t)
    return token.swapaxes(0, 1).reshape(num_experts, -1).astype(jnp.int32)
