"""Two-level routing: a group of experts first, then experts of the group."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.routing import (
    LoadState,
    Routing,
    Tokens,
    allow,
    check_flag,
    check_number,
    check_whole,
    rank,
    settle,
    softmax_weights,
)


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """A token chooses groups, then experts within each (MoHGE, arXiv 2604.23108); for groups of unlike experts.

    Experts are in consecutive groups of equal number, as `MoEConfig.expert_sizes` has them. A group's probability is that
    of its experts together; a token takes its `top_groups` most probable groups, and in each the top_k / top_groups
    experts that are most probable given the group. Weights are P(group) * P(expert | group), a softmax over all experts.

    Attributes:
      num_groups: divides the number of experts.
      top_groups: groups of one token; divides top_k.
      renormalise: divide the k weights by their sum.
      scale: factor on the weights afterwards.
    """

    num_groups: int
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self):
        check_whole("num_groups", self.num_groups)
        check_whole("top_groups", self.top_groups)
        check_flag("renormalise", self.renormalise)
        check_number("scale", self.scale)
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups={self.top_groups}: needs 1 to num_groups={self.num_groups}")

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where groups and choices do not divide."""
        if num_experts % self.num_groups:
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"num_groups={self.num_groups} does not divide num_experts={num_experts}: "
                f"legal are {', '.join(map(str, legal))}"
            )
        size = num_experts // self.num_groups
        if top_k % self.top_groups or top_k // self.top_groups > size:
            raise ValueError(f"top_k={top_k}: needs a multiple of top_groups={self.top_groups}, {size} experts a group at most")

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None = None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower group and expert."""
        (t, num_experts), size = logits.shape, logits.shape[1] // self.num_groups
        by_group = allow(logits, tokens).reshape(t, self.num_groups, size)
        group = rank(jax.nn.logsumexp(logits.reshape(by_group.shape), axis=-1), self.top_groups)  # [t, top_groups]
        inside = rank(by_group, top_k // self.top_groups)  # [t, G, k / top_groups]
        chosen = group[:, :, None] == jnp.arange(self.num_groups)
        inside = jnp.where(chosen[..., None], inside[:, None], 0).sum(2)
        expert = (group[:, :, None] * size + inside).reshape(t, top_k)
        expert = settle(expert.astype(jnp.int32), num_experts, tokens)
        weight, probs = softmax_weights(logits, expert, self.renormalise)
        return Routing(expert, weight * self.scale, logits, probs)
