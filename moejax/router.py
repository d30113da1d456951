"""Routers: tokens -> Routing. A new one is one small frozen dataclass.

t: tokens on this shard, k: experts per token, E: experts in the layer.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.pytree import pytree


@pytree
class Routing:
    """Where each token goes.

    Attributes:
      expert: [t, k] int32, the chosen experts, best first.
      weight: [t, k] float32, what each choice's output is multiplied by.
      logits: [t, E] float32, the router's raw outputs (the z-loss reads them).
      probs: [t, E] float32, the router's normalised scores (the load-balance loss reads them).
    """

    expert: Int[Array, "t k"]
    weight: Float[Array, "t k"]
    logits: Float[Array, "t E"]
    probs: Float[Array, "t E"]


@pytree
class BiasState:
    """State of a `SigmoidBias` router; changed by `update_router` only, never by a forward pass.

    Attributes:
      bias: [..., E] float32, added to the scores when experts are selected. Leading axes (layers) are carried along.
      rate: what an update adds or subtracts.
    """

    bias: Float[Array, "*layers E"]
    rate: float = dataclasses.field(metadata={"static": True})

    def update(self, tokens_per_expert: Int[Array, "*layers E"]) -> "BiasState":
        """Raises the bias of experts below the mean load, lowers it above: bias += rate * sign(mean - load)."""
        load = tokens_per_expert.astype(jnp.float32)
        step = jnp.sign(load.mean(-1, keepdims=True) - load)
        return dataclasses.replace(self, bias=self.bias + self.rate * step)


@runtime_checkable
class Router(Protocol):
    """What a router is: a rule from logits to a Routing, and the state that it keeps between optimizer steps."""

    def init_state(self, num_experts: int) -> BiasState | None:
        """The state at the start of training, or None for a router that keeps none."""
        ...

    def __call__(self, logits: Float[Array, "t E"], top_k: int, state: BiasState | None) -> Routing:
        """Routes by float32 logits."""
        ...


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Softmax over all experts, then the top k (Shazeer et al. 2017; Mixtral renormalises, OLMoE and Switch do not).

    Attributes:
      renormalise: divide the k weights by their sum.
    """

    renormalise: bool = True

    def __post_init__(self):
        _check_flag("renormalise", self.renormalise)

    def init_state(self, num_experts: int) -> None:
        """No state."""
        return

    def __call__(self, logits: Float[Array, "t E"], top_k: int, state: BiasState | None = None) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        expert = _top_k(logits, top_k)  # by logits: probabilities below the smallest float would all tie
        probs = jax.nn.softmax(logits)
        weight = _pick(probs, expert)
        weight = weight / weight.sum(-1, keepdims=True) if self.renormalise else weight
        return Routing(expert, weight, logits, probs)


@dataclasses.dataclass(frozen=True)
class SigmoidBias:
    """Auxiliary-loss-free balancing (Wang et al. 2024, DeepSeek-V3): sigmoid scores, selected with a bias added.

    The bias steers the selection only; weights come from the unbiased scores, and the bias has no gradient.

    Attributes:
      rate: what an update adds to or takes from each expert's bias.
      renormalise: divide the k weights by their sum.
      scale: factor on the weights afterwards (2.5 in DeepSeek-V3).
    """

    rate: float = 1e-3
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self):
        _check_flag("renormalise", self.renormalise)
        for field in ("rate", "scale"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{field}={value!r}: needs a finite number of at least 0")

    def init_state(self, num_experts: int) -> BiasState:
        """Zero bias for every expert."""
        return BiasState(jnp.zeros(num_experts, jnp.float32), self.rate)

    def __call__(self, logits: Float[Array, "t E"], top_k: int, state: BiasState | None) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        if state is None:
            raise ValueError(f"router state={state!r}: SigmoidBias needs a BiasState (see SigmoidBias.init_state)")
        expert = _top_k(jax.nn.sigmoid(logits) + state.bias, top_k)
        # Scores divided by their sum are a softmax of their logarithms; divided as they are, the gradient overflows
        # where all logits are below -45 and the squared sum underflows.
        log_scores = jax.nn.log_sigmoid(logits)
        picked = _pick(log_scores, expert)
        weight = jax.nn.softmax(picked) if self.renormalise else jnp.exp(picked)
        return Routing(expert, weight * self.scale, logits, jax.nn.softmax(log_scores))


ROUTERS = {"softmax": Softmax, "sigmoid_bias": SigmoidBias}


def update_router(state, stats):
    """The router state after an optimizer step, from that step's summed loads; call it outside the gradient.

    Args:
      state: a router's state (leading layer axes allowed), bare, in an nnx.Variable or in a linen collection; or None, for
        a router without.
      stats: RoutingStats of the step: counts added over micro-batches, the same leading axes as the state.

    Returns:
      The next state, of the same structure.

    Raises:
      ValueError: where the loads' shape is not the state's.
    """

    def update(bias: BiasState) -> BiasState:
        loads = stats.tokens_per_expert
        if loads.shape != bias.bias.shape:
            raise ValueError(f"tokens_per_expert of shape {loads.shape}: the router's state has shape {bias.bias.shape}")
        return bias.update(loads)

    return jax.tree.map(update, state, is_leaf=lambda node: isinstance(node, BiasState))


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: needs True or False")


def _top_k(scores: Float[Array, "t E"], top_k: int) -> Int[Array, "t k"]:
    return lax.top_k(lax.stop_gradient(scores), top_k)[1].astype(jnp.int32)


def _pick(scores: Float[Array, "t E"], expert: Int[Array, "t k"]) -> Float[Array, "t k"]:
    """scores[i, expert[i, j]], as a masked sum: its backward is one too, where indexing would scatter."""
    experts = jnp.arange(scores.shape[-1], dtype=expert.dtype)
    return jnp.where(expert[:, :, None] == experts, scores[:, None, :], 0).sum(-1)
