"""Group-limited and node-limited selection."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moejax.checks import one_of
from moejax.routers.sigmoid_bias import RULES, BiasState, needed, sigmoid_routing
from moejax.routing import LoadState, Routing, Tokens, allow, check_flag, check_number, check_whole, rank, settle


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Each token's experts lie in a few groups (DeepSeek-V3, arXiv 2412.19437): `SigmoidBias`, with the groups chosen first.

    Experts are divided into consecutive groups of equal size. A group's score is the sum of its ceil(top_k / max_groups)
    highest biased scores; the `max_groups` best groups are kept, ties to the lower one, and the top k is taken among their
    experts. With one group for each node, a token travels to `max_groups` nodes at most.

    Attributes:
      num_groups: divides the number of experts (8 in DeepSeek-V3).
      max_groups: groups that one token may use (4 in DeepSeek-V3).
      rate: what an update adds to or takes from each expert's bias.
      renormalise: divide the k weights by their sum.
      scale: factor on the weights afterwards (2.5 in DeepSeek-V3).
      rule: "sign" or "error", as for `SigmoidBias`.
    """

    num_groups: int = 8
    max_groups: int = 4
    rate: float = 1e-3
    renormalise: bool = True
    scale: float = 1.0
    rule: str = "sign"

    def __post_init__(self):
        one_of("rule", self.rule, RULES)
        check_whole("num_groups", self.num_groups)
        check_whole("max_groups", self.max_groups)
        check_flag("renormalise", self.renormalise)
        check_number("rate", self.rate)
        check_number("scale", self.scale)
        if self.max_groups > self.num_groups:
            raise ValueError(f"max_groups={self.max_groups}: needs 1 to num_groups={self.num_groups}")

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where the groups do not divide the experts, or hold too few for the top k."""
        if num_experts % self.num_groups:
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"num_groups={self.num_groups} does not divide num_experts={num_experts}: "
                f"legal are {', '.join(map(str, legal))}"
            )
        most = self.max_groups * (num_experts // self.num_groups)
        if top_k > most:
            raise ValueError(
                f"top_k={top_k}: {self.max_groups} of {self.num_groups} groups hold {most} experts, the most legal"
            )

    def init_state(self, num_experts: int) -> BiasState:
        """Zero bias for every expert."""
        return BiasState(jnp.zeros(num_experts, jnp.float32), self.rate, self.rule)

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower group and expert."""
        scores = lax.stop_gradient(jax.nn.sigmoid(logits)) + needed(state, BiasState, self).bias
        expert = rank(self._in_best_groups(allow(scores, tokens), top_k), top_k)
        return sigmoid_routing(logits, settle(expert, logits.shape[-1], tokens), self.renormalise, self.scale)

    def _in_best_groups(self, scores: Float[Array, "t E"], top_k: int) -> Float[Array, "t E"]:
        """The scores, -inf outside of each token's best groups."""
        by_group = scores.reshape(len(scores), self.num_groups, -1)
        counted = min(-(-top_k // self.max_groups), by_group.shape[-1])
        best = lax.top_k(by_group, counted)[0]
        # Experts that a mask rules out add nothing; a group of nothing else comes last.
        total = jnp.where(jnp.isfinite(best), best, 0).sum(-1)
        total = jnp.where(jnp.isfinite(best[..., 0]), total, -jnp.inf)
        kept = (rank(total, self.max_groups)[:, :, None] == jnp.arange(self.num_groups)).any(1)
        return jnp.where(kept[:, :, None], by_group, -jnp.inf).reshape(scores.shape)
