"""Selection against virtual queues: devices that fall behind get less, fast devices get more."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.pytree import pytree
from moejax.routers.sigmoid_bias import needed, sigmoid_routing
from moejax.routing import LoadState, Routing, Tokens, check_flag, check_number, choose


@pytree
class QueueState(LoadState):
    """State of a `Queue` router; changed by `update_router` only, never by a forward pass.

    Attributes:
      backlog: [..., D] float32, each device's virtual queue, in steps of its own service. Leading axes are carried along.
      rates: relative service rates, D of them.
      num_experts: E; the devices hold equal consecutive parts.
    """

    backlog: Float[Array, "*layers D"]
    rates: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    num_experts: int = dataclasses.field(metadata={"static": True})

    def update(self, tokens_per_expert: Int[Array, "*layers E"]) -> "QueueState":
        """backlog = max(0, backlog + arrived / served - 1): what a device was sent in the step over its share of all."""
        arrived = tokens_per_expert.reshape(*self.backlog.shape, -1).sum(-1).astype(jnp.float32)
        served = arrived.sum(-1, keepdims=True) * jnp.asarray(self.rates, jnp.float32) / sum(self.rates)
        growth = jnp.where(served > 0, arrived / jnp.where(served > 0, served, 1) - 1, 0)
        return dataclasses.replace(self, backlog=jnp.maximum(self.backlog + growth, 0))

    @property
    def loads_shape(self) -> tuple[int, ...]:
        """(*layers, E)."""
        return (*self.backlog.shape[:-1], self.num_experts)


@dataclasses.dataclass(frozen=True)
class Queue:
    """Queue-aware routing for unlike devices (Stable-MoE, arXiv 2512.06784), by Lyapunov's drift plus penalty.

    A token takes the k experts of the highest sigmoid(logit) - price * backlog of the expert's device. Backlogs grow with what
    a device is sent and shrink with what it can serve, so each one's load settles at its share of the service rates. The paper
    also schedules energy and clock frequencies, which are not the router's here. Weights come from the scores alone.

    Attributes:
      rates: relative service rates of the devices, which hold equal consecutive parts of the experts; None: every expert by
        itself, all alike.
      price: of one step's backlog, in score (1/V in Lyapunov's terms): larger balances faster and follows the scores less.
      renormalise: divide the k weights by their sum.
      scale: factor on the weights afterwards.
    """

    rates: tuple[float, ...] | None = None
    price: float = 1e-2
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self):
        check_number("price", self.price)
        check_number("scale", self.scale)
        check_flag("renormalise", self.renormalise)
        if self.rates is not None and (not isinstance(self.rates, tuple) or not self.rates):
            raise ValueError(f"rates={self.rates!r}: needs a tuple of numbers above 0, one a device, or None")
        for rate in self.rates or ():
            check_number("rates", rate, above=True)

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where the devices do not divide the experts."""
        if self.rates is not None and num_experts % len(self.rates):
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"rates of {len(self.rates)} devices do not divide num_experts={num_experts}: "
                f"legal are {', '.join(map(str, legal))}"
            )

    def init_state(self, num_experts: int) -> QueueState:
        """Empty queues."""
        rates = self.rates or (1.0,) * num_experts
        return QueueState(jnp.zeros(len(rates), jnp.float32), rates, num_experts)

    def __call__(
        self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None, tokens: Tokens | None = None
    ) -> Routing:
        """Routes by float32 logits; ties go to the lower expert."""
        backlog = needed(state, QueueState, self).backlog
        cost = self.price * jnp.repeat(backlog, logits.shape[-1] // len(backlog))
        expert = choose(jax.nn.sigmoid(logits) - cost, top_k, tokens)
        return sigmoid_routing(logits, expert, self.renormalise, self.scale)
