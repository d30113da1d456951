"""The routers, one rule a file."""

from moejax.routers.expert_choice import ExpertChoice
from moejax.routers.grouped import Grouped
from moejax.routers.hashed import Hash
from moejax.routers.noisy import Noisy
from moejax.routers.prototype import Prototype
from moejax.routers.queue import Queue, QueueState
from moejax.routers.sigmoid_bias import BiasState, SigmoidBias
from moejax.routers.sinkhorn import Sinkhorn
from moejax.routers.softmax import Softmax
from moejax.routers.sticky import Sticky
from moejax.routers.top_p import TopP
from moejax.routers.two_level import TwoLevel

__all__ = [
    "BiasState",
    "ExpertChoice",
    "Grouped",
    "Hash",
    "Noisy",
    "Prototype",
    "Queue",
    "QueueState",
    "SigmoidBias",
    "Sinkhorn",
    "Softmax",
    "Sticky",
    "TopP",
    "TwoLevel",
]
