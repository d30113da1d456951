"""Sticky experts: a token prefers those of the token before it."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moejax import axes as ax
from moejax.routing import LoadState, Routing, Tokens, allow, check_flag, check_number, rank, sequences, settle, softmax_weights


@dataclasses.dataclass(frozen=True)
class Sticky:
    """Softmax routing with a reuse bias (temporally extended MoE): fewer switches, so fewer experts to fetch when decoding.

    A token's logits get `bonus` for the experts that the last valid token of its sequence before it chose, for the selection
    alone; weights are those of `Softmax`. Causal: nothing depends on later tokens. The selection runs along the sequence, one
    small step a token. `RoutingStats.measured["switch_rate"]` says how often experts change.

    Attributes:
      bonus: what reuse is worth, in logits.
      renormalise: divide the k weights by their sum.
    """

    bonus: float = 1.0
    renormalise: bool = True

    whole_sequences = True

    def __post_init__(self):
        check_number("bonus", self.bonus)
        check_flag("renormalise", self.renormalise)

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits, ties to the lower expert; without tokens, they are one sequence."""
        (t, num_experts), seq = logits.shape, len(logits) if tokens is None else tokens.seq
        valid = jnp.ones(t, bool) if tokens is None else tokens.valid
        expert = self._walk(sequences(lax.stop_gradient(allow(logits, tokens)), seq), sequences(valid, seq), top_k)
        expert = settle(expert.reshape(-1, top_k)[:t], num_experts, tokens)
        weight, probs = softmax_weights(logits, expert, self.renormalise)
        return Routing(expert, weight, logits, probs)

    def measure(self, routing: Routing, tokens: Tokens) -> dict[str, tuple[Array, Array]]:
        """{"switch_rate": ...}, see `switch_rate`."""
        return {"switch_rate": _switches(sequences(routing.expert, tokens.seq), sequences(tokens.valid, tokens.seq))}

    def _walk(self, scores: Float[Array, "n s E"], valid: Bool[Array, "n s"], top_k: int) -> Int[Array, "n s k"]:
        """The choices of all sequences, position by position."""

        def step(last, position):
            now, counts = position
            expert = rank(now + self.bonus * last, top_k)
            chosen = (expert[:, :, None] == jnp.arange(now.shape[-1])).any(1)
            return jnp.where(counts[:, None], chosen, last), expert

        none = jnp.zeros((scores.shape[0], scores.shape[2]), bool)
        none = ax.vary_over(none, tuple(ax.varying(scores) | ax.varying(valid)))
        return lax.scan(step, none, (scores.swapaxes(0, 1), valid.T))[1].swapaxes(0, 1)


def switch_rate(expert: Int[Array, "b s k"], valid: Bool[Array, "b s"] | None = None) -> Float[Array, ""]:
    """The mean share of a token's experts that the token before it did not use; 0 where no valid token follows another.

    Args:
      expert: [batch, seq, k], as `Routing.expert`.
      valid: [batch, seq] which tokens count; None: all.
    """
    total, count = _switches(expert, jnp.ones(expert.shape[:2], bool) if valid is None else valid)
    return total / jnp.maximum(count, 1)


def _switches(expert: Int[Array, "b s k"], valid: Bool[Array, "b s"]) -> tuple[Float[Array, ""], Int[Array, ""]]:
    new = (expert[:, 1:, :, None] != expert[:, :-1, None, :]).all(-1).mean(-1)
    follows = valid[:, 1:] & valid[:, :-1]
    return jnp.where(follows, new, 0).sum(), follows.sum()
