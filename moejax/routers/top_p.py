"""As many experts as it takes: top-p routing."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.routing import LoadState, Routing, Tokens, check_flag, check_number, choose, softmax_weights


@dataclasses.dataclass(frozen=True)
class TopP:
    """The fewest experts whose probabilities reach p (Huang et al. 2024, arXiv 2403.07652); hard tokens take more.

    A token has k choices at most; those beyond what it needs are not used: weight 0, no capacity. The authors add an entropy
    loss, so that p is not reached by spreading thin ("entropy" in `MoEConfig.extra_losses`).

    Attributes:
      p: the probability to reach, above 0 and at most 1 (0.4 in the paper).
      renormalise: divide the used weights by their sum.
    """

    p: float = 0.4
    renormalise: bool = False

    def __post_init__(self):
        check_flag("renormalise", self.renormalise)
        check_number("p", self.p, above=True)
        if self.p > 1:
            raise ValueError(f"p={self.p!r}: needs a probability, above 0 and at most 1")

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        expert = choose(logits, top_k, tokens)
        weight, probs = softmax_weights(logits, expert, False)
        before = jnp.cumsum(jnp.pad(weight[:, :-1], ((0, 0), (1, 0))), -1)
        replay = None if tokens is None else tokens.context.replay
        used = before < self.p if replay is None else replay >= 0
        weight = jnp.where(used, weight, 0)
        total = weight.sum(-1, keepdims=True)
        weight = weight / jnp.where(total > 0, total, 1) if self.renormalise else weight
        return Routing(expert, weight, logits, probs, used=used)
