"""Expert prototyping: k groups of experts, the best one of each."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.routing import LoadState, Routing, Tokens, allow, check_number, pick, rank, settle


@dataclasses.dataclass(frozen=True)
class Prototype:
    """k top-1 routers side by side (M6-T, arXiv 2105.15082): experts in k consecutive groups, each with its own softmax.

    A token goes to the best expert of each group, weighted by its probability within the group, so the weights of a token add
    up to k at most. Choice j is that of group j.

    Attributes:
      scale: factor on the weights.
    """

    scale: float = 1.0

    def __post_init__(self):
        check_number("scale", self.scale)

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where there are no k equal groups."""
        if num_experts % top_k:
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"top_k={top_k} prototypes do not divide num_experts={num_experts}: legal are {', '.join(map(str, legal))}"
            )

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert of a group."""
        t, num_experts = logits.shape
        groups = lambda values: values.reshape(t, top_k, -1)
        best = rank(groups(allow(logits, tokens)), 1)[..., 0]
        first = jnp.arange(top_k, dtype=jnp.int32) * (num_experts // top_k)
        expert = settle(best + first, num_experts, tokens)
        probs = jax.nn.softmax(groups(logits)).reshape(t, num_experts)
        return Routing(expert, pick(probs, expert) * self.scale, logits, probs / top_k)
