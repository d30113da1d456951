"""Balanced assignment by Sinkhorn's iteration, within each sequence."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moejax import axes as ax
from moejax.routing import LoadState, Routing, Tokens, check_flag, check_number, check_whole, choose, sequences, softmax_weights


@dataclasses.dataclass(frozen=True)
class Sinkhorn:
    """Selection by optimal transport (S-BASE, Clark et al. 2022, arXiv 2202.01169): every expert gets equal mass of a sequence.

    The logits of a sequence's valid tokens, over a temperature, are scaled in turn so that tokens have equal mass and experts
    have equal mass; each token takes its k largest shares. Weights are softmax probabilities of the logits themselves, and
    the iteration has no gradient. In training a token's choice depends on later tokens of its sequence: what the balance
    says of them leaks, as it does wherever experts choose. At evaluation choices are the plain, causal top k.

    Attributes:
      num_iterations: of tokens, then experts.
      temperature: of the transport: lower follows the logits more and converges more slowly.
      renormalise: divide the k weights by their sum; for k = 1 that leaves the router without gradient.
    """

    num_iterations: int = 16
    temperature: float = 1.0
    renormalise: bool = False

    whole_sequences = True

    def __post_init__(self):
        check_whole("num_iterations", self.num_iterations)
        check_number("temperature", self.temperature, above=True)
        check_flag("renormalise", self.renormalise)

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; without tokens, they are one sequence in training."""
        scores = lax.stop_gradient(logits) / self.temperature
        if tokens is None or tokens.context.train:
            seq = len(logits) if tokens is None else tokens.seq
            valid = jnp.ones(len(logits), bool) if tokens is None else tokens.valid
            shifted = jax.vmap(self._balanced)(sequences(scores, seq), sequences(valid, seq))
            scores = shifted.reshape(-1, logits.shape[-1])[: len(logits)]
        expert = choose(scores, top_k, tokens)
        weight, probs = softmax_weights(logits, expert, self.renormalise)
        return Routing(expert, weight, logits, probs)

    def _balanced(self, scores: Float[Array, "s E"], valid: Bool[Array, "s"]) -> Float[Array, "s E"]:
        """Scores plus each expert's potential: the logarithm of the transport, up to a constant of each token."""
        equal = jnp.log(jnp.maximum(valid.sum(), 1) / scores.shape[-1])

        def iterate(_, potential):
            token = -jax.nn.logsumexp(scores + potential, axis=-1)
            mass = jax.nn.logsumexp(scores + token[:, None], axis=0, where=valid[:, None])
            return jnp.where(valid.any(), equal - mass, potential)

        start = ax.vary_over(jnp.zeros(scores.shape[-1], scores.dtype), tuple(ax.varying(scores) | ax.varying(valid)))
        return scores + lax.fori_loop(0, self.num_iterations, iterate, start)
