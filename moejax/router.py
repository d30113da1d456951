"""Routers by name, and what changes their state."""

import jax

from moejax.routers import (
    BiasState,
    ExpertChoice,
    Grouped,
    Hash,
    Noisy,
    Prototype,
    Queue,
    SigmoidBias,
    Sinkhorn,
    Softmax,
    Sticky,
    TopP,
)
from moejax.routing import Limited, LoadState, PerSequence, Router, Routing, Tokens

__all__ = [
    "ROUTERS",
    "BiasState",
    "Limited",
    "LoadState",
    "PerSequence",
    "Router",
    "Routing",
    "SigmoidBias",
    "Softmax",
    "Tokens",
    "update_router",
]

ROUTERS = {
    "softmax": Softmax,
    "sigmoid_bias": SigmoidBias,
    "grouped": Grouped,
    "expert_choice": ExpertChoice,
    "prototype": Prototype,
    "hash": Hash,
    "noisy": Noisy,
    "top_p": TopP,
    "queue": Queue,
    "sticky": Sticky,
    "sinkhorn": Sinkhorn,
}


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

    def update(node: LoadState) -> LoadState:
        loads = stats.tokens_per_expert
        if loads.shape != node.loads_shape:
            raise ValueError(f"tokens_per_expert of shape {loads.shape}: the router's state has shape {node.loads_shape}")
        return node.update(loads)

    return jax.tree.map(update, state, is_leaf=lambda node: isinstance(node, LoadState))
