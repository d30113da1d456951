"""Softmax over all experts, then the top k."""

import dataclasses

from jaxtyping import Array, Float

from moejax.routing import LoadState, Routing, Tokens, check_flag, check_number, choose, softmax_weights


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Softmax over all experts, then the top k (Shazeer et al. 2017; Mixtral renormalises, OLMoE and Switch do not).

    Attributes:
      renormalise: divide the k weights by their sum. The same as the top k before a softmax over them alone.
      scale: factor on the weights afterwards.
    """

    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self):
        check_flag("renormalise", self.renormalise)
        check_number("scale", self.scale)

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        expert = choose(logits, top_k, tokens)  # by logits: probabilities below the smallest float would all tie
        weight, probs = softmax_weights(logits, expert, self.renormalise)
        return Routing(expert, weight * self.scale, logits, probs)
