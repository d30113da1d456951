"""Sigmoid scores, selected with a bias that balances the load."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.checks import one_of
from moejax.pytree import pytree
from moejax.routing import LoadState, Routing, Tokens, check_flag, check_number, choose, pick

RULES = ("sign", "error")


@pytree
class BiasState(LoadState):
    """State of a router with a bias; changed by `update_router` only, never by a forward pass.

    Attributes:
      bias: [..., E] float32, added to the scores when experts are selected. Leading axes (layers) are carried along.
      rate: what an update adds or subtracts.
      rule: "sign" or "error", see `SigmoidBias`.
    """

    bias: Float[Array, "*layers E"]
    rate: float = dataclasses.field(metadata={"static": True})
    rule: str = dataclasses.field(default="sign", metadata={"static": True})

    def update(self, tokens_per_expert: Int[Array, "*layers E"]) -> "BiasState":
        """Raises the bias of experts below the mean load, lowers it above: bias += rate * step, by `SigmoidBias.rule`."""
        load = tokens_per_expert.astype(jnp.float32)
        mean = load.mean(-1, keepdims=True)
        step = jnp.sign(mean - load) if self.rule == "sign" else (mean - load) / jnp.where(mean > 0, mean, 1)
        return dataclasses.replace(self, bias=self.bias + self.rate * step)

    @property
    def loads_shape(self) -> tuple[int, ...]:
        """The bias's."""
        return self.bias.shape


@dataclasses.dataclass(frozen=True)
class SigmoidBias:
    """Auxiliary-loss-free balancing (Wang et al. 2024, DeepSeek-V3): sigmoid scores, selected with a bias added.

    The bias steers the selection only; weights come from the unbiased scores, and the bias has no gradient.

    Attributes:
      rate: what an update adds to or takes from each expert's bias; under the rule "error", of an expert that nothing was
        sent to.
      renormalise: divide the k weights by their sum.
      scale: factor on the weights afterwards (2.5 in DeepSeek-V3).
      rule: "sign": every expert's bias moves by the rate (the papers' choice). "error": by the rate times how far its load is
        below the mean, over the mean (a variant in Wang et al. 2024, there without the division): fast from a skewed start,
        and at rest where loads are even.
    """

    rate: float = 1e-3
    renormalise: bool = True
    scale: float = 1.0
    rule: str = "sign"

    def __post_init__(self):
        one_of("rule", self.rule, RULES)
        check_flag("renormalise", self.renormalise)
        check_number("rate", self.rate)
        check_number("scale", self.scale)

    def init_state(self, num_experts: int) -> BiasState:
        """Zero bias for every expert."""
        return BiasState(jnp.zeros(num_experts, jnp.float32), self.rate, self.rule)

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        bias = needed(state, BiasState, self).bias
        expert = choose(jax.nn.sigmoid(logits) + bias, top_k, tokens)
        return sigmoid_routing(logits, expert, self.renormalise, self.scale)


def sigmoid_routing(logits: Float[Array, "t E"], expert: Int[Array, "t k"], renormalise: bool, scale: float) -> Routing:
    """The Routing of these choices with sigmoid scores as weights, divided by their sum or as they are, times `scale`."""
    # Scores divided by their sum are a softmax of their logarithms; divided as they are, the gradient overflows
    # where all logits are below -45 and the squared sum underflows.
    log_scores = jax.nn.log_sigmoid(logits)
    picked = pick(log_scores, expert)
    weight = jax.nn.softmax(picked) if renormalise else jnp.exp(picked)
    return Routing(expert, weight * scale, logits, jax.nn.softmax(log_scores))


def needed(state, kind, router):
    """The state, if it is of this kind.

    Raises:
      ValueError: for another one, or none.
    """
    if isinstance(state, kind):
        return state
    name = type(router).__name__
    raise ValueError(f"router state={state!r}: {name} needs a {kind.__name__} (see {name}.init_state)")
