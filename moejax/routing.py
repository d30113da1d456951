"""What all routers share: Routing, what they may know of the tokens, the state that they keep, and how choices are made.

t: tokens on this shard, k: experts per token, E: experts in the layer, s: tokens of a sequence, n: sequences on this shard.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from moejax import axes as ax
from moejax.context import RoutingContext
from moejax.load_state import LoadState
from moejax.pytree import pytree

MASKED = (
    -1e30
)  # logit of an expert that a token may not go to: its probability is exactly 0, and no infinity gets into gradients


@pytree
class Routing:
    """Where each token goes.

    Attributes:
      expert: [t, k] int32, the chosen experts; best first, unless the router says otherwise.
      weight: [t, k] float32, what each choice's output is multiplied by.
      logits: [t, E] float32, the router's raw outputs (the z-loss reads them); -1e30 where a token may not go.
      probs: [t, E] float32, the router's normalised scores (the load-balance loss reads them).
      used: [t, k] bool, the choices that count; the others have weight 0 and take no capacity. None: all.
      load: [t, E] float32, for the load loss: how likely each token is to choose each expert. None: the router has none.
      token: [E, c] int32, where experts choose: the tokens that each one takes, sequence by sequence, best first; t stands
        for none. `expert` says the same by token. None: tokens choose.
      places: where `expert` names slots of a placement, how many there are; None: it names experts.
    """

    expert: Int[Array, "t k"]
    weight: Float[Array, "t k"]
    logits: Float[Array, "t E"]
    probs: Float[Array, "t E"]
    used: Bool[Array, "t k"] | None = None
    load: Float[Array, "t E"] | None = None
    token: Int[Array, "E c"] | None = None
    places: int | None = dataclasses.field(default=None, metadata={"static": True})

    def counted(self, valid: Bool[Array, "t"]) -> Bool[Array, "t k"]:
        """[t, k] the pairs that count: used choices of valid tokens."""
        every = jnp.broadcast_to(valid[:, None], self.expert.shape)
        return every if self.used is None else every & self.used

    @property
    def num_places(self) -> int:
        """How many experts, or slots, `expert` tells apart."""
        return self.places or self.logits.shape[-1]

    @property
    def record(self) -> Int[Array, "t k"]:
        """[t, k] what `RoutingContext.replay` takes: the chosen experts, -1 where a choice is not used."""
        return self.expert if self.used is None else jnp.where(self.used, self.expert, -1)


@pytree
class Tokens:
    """What a router may know of this shard's tokens besides their logits.

    Attributes:
      valid: [t] which of them count.
      position: [t] int32, each one's place in the whole batch, the same on every mesh.
      context: the call's, its arrays flat: [t, ...].
      allowed: [t, E] where each token may go; None: anywhere.
      noise_logits: [t, E] outputs of the router's second matrix; None: it has none.
      axes: mesh axes that tokens are sharded over.
      seq: s; tokens come as whole sequences for routers that ask for them.
    """

    valid: Bool[Array, "t"]
    position: Int[Array, "t"]
    context: RoutingContext
    allowed: Bool[Array, "t E"] | None = None
    noise_logits: Float[Array, "t E"] | None = None
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    seq: int = dataclasses.field(default=1, metadata={"static": True})

    def keys(self, what: str) -> Key[Array, "t"]:
        """A random key for each token, the same on every mesh.

        Args:
          what: needs them, for the message.

        Raises:
          ValueError: where the context has no key.
        """
        key = self.context.key
        if key is None:
            raise ValueError(f"context.key=None: {what} draws random numbers in training; needs RoutingContext(key=...)")
        key = ax.vary_over(key, tuple(ax.varying(self.position)))
        return jax.vmap(lambda index: jax.random.fold_in(key, index))(self.position)


@runtime_checkable
class Router(Protocol):
    """What a router is: a rule from logits to a Routing, and the state that it keeps between optimizer steps."""

    def init_state(self, num_experts: int) -> LoadState | None:
        """The state at the start of training, or None for a router that keeps none."""
        ...

    def __call__(self, logits: Float[Array, "t E"], top_k: int, state: LoadState | None, tokens: Tokens | None) -> Routing:
        """Routes by float32 logits. `choose` takes care of masks, budgets, replay and forced balance."""
        ...


@runtime_checkable
class Limited(Protocol):
    """A router that does not fit every layer."""

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where it does not fit."""
        ...


@runtime_checkable
class PerSequence(Protocol):
    """A router whose choice for one token depends on others of its sequence: it is given whole sequences."""

    whole_sequences: bool


@runtime_checkable
class ExpertsChoose(Protocol):
    """A router that may give one token more than `top_k` experts, and all of a shard's tokens top_k each on average at most."""

    def most_choices(self, num_experts: int, top_k: int) -> int:
        """Experts of one token at most: k of its Routing."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A router with figures of its own, which `RoutingStats.measured` gives."""

    def measure(self, routing: "Routing", tokens: "Tokens") -> dict[str, tuple[Array, Array]]:
        """By name, this shard's (sum, count): the figure is the sums of all shards over their counts."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A router that draws random numbers in training: it needs `RoutingContext.key`."""

    draws: bool


@runtime_checkable
class ByTokenId(Protocol):
    """A router that needs `RoutingContext.token_ids`."""

    by_token_id: bool


@runtime_checkable
class TwoMatrices(Protocol):
    """A router with a second matrix, the parameter "router_noise"; its outputs are `Tokens.noise_logits`."""

    second_matrix: bool


def choose(scores: Float[Array, "t E"], top_k: int, tokens: Tokens | None) -> Int[Array, "t k"]:
    """The k experts of the highest scores among those allowed, ties to the lower expert; or what the context prescribes."""
    return settle(rank(allow(scores, tokens), top_k), scores.shape[-1], tokens)


def rank(scores: Float[Array, "... E"], top_k: int) -> Int[Array, "... k"]:
    """The k highest of the last axis, ties to the lower index."""
    return lax.top_k(lax.stop_gradient(scores), top_k)[1].astype(jnp.int32)


def allow(scores: Float[Array, "t E"], tokens: Tokens | None) -> Float[Array, "t E"]:
    """The scores, -inf where a token may not go."""
    return scores if tokens is None or tokens.allowed is None else jnp.where(tokens.allowed, scores, -jnp.inf)


def settle(expert: Int[Array, "t k"], num_experts: int, tokens: Tokens | None) -> Int[Array, "t k"]:
    """The router's choices, unless the context replays recorded ones or forces balance."""
    if tokens is None:
        return expert
    if tokens.context.replay is not None:
        return jnp.maximum(tokens.context.replay, 0)
    if tokens.context.force_balance:
        top_k = expert.shape[-1]
        return (tokens.position[:, None] * top_k + jnp.arange(top_k, dtype=jnp.int32)) % num_experts
    return expert


def pick(scores: Float[Array, "t E"], expert: Int[Array, "t k"]) -> Float[Array, "t k"]:
    """scores[i, expert[i, j]], as a masked sum: its backward is one too, where indexing would scatter."""
    experts = jnp.arange(scores.shape[-1], dtype=expert.dtype)
    return jnp.where(expert[:, :, None] == experts, scores[:, None, :], 0).sum(-1)


def softmax_weights(
    logits: Float[Array, "t E"], expert: Int[Array, "t k"], renormalise: bool
) -> tuple[Float[Array, "t k"], Float[Array, "t E"]]:
    """(weights of the chosen experts, probabilities of all). Renormalised, weights are a softmax over the chosen alone."""
    probs = jax.nn.softmax(logits)
    if not renormalise:
        return pick(probs, expert), probs
    # Chosen against the scores, or replayed, all k may have probabilities that underflow; their logits do not.
    return jax.nn.softmax(pick(logits, expert)), probs


def sequences(values: Shaped[Array, "t *rest"], seq: int) -> Array:
    """[t, ...] -> [n, s, ...], the last sequence filled up with zeros."""
    short = -values.shape[0] % seq
    values = jnp.pad(values, [(0, short)] + [(0, 0)] * (values.ndim - 1)) if short else values
    return values.reshape(-1, seq, *values.shape[1:])


def check_flag(field: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: needs True or False")


def check_number(field: str, value: object, least: float = 0, *, above: bool = False) -> None:
    """Raises ValueError unless `value` is a finite number of at least `least`, or `above` it."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value < math.inf
        or (above and value == least)
    ):
        raise ValueError(f"{field}={value!r}: needs a finite number {'above' if above else 'of at least'} {least}")


def check_whole(field: str, value: object) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{field}={value!r}: needs a whole number of at least 1")
