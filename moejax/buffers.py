"""What a pipeline's program keeps between ops: buffers of slots, and loops that change them in place.

Values inside a shard_map carry the mesh axes that they vary over, and a loop gives back what it was given: `_like` marks the
new state as the old one is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moejax import axes as ax


def when(pred, change: Callable, state):
    """`change(state)` where pred is true, else the state.

    A loop of at most one turn: XLA updates what a loop carries in place, while a conditional copies every buffer that passes
    through it, in every branch (8xH100, gpipe: 1264 MiB of temporaries against 2269).
    """
    body = lambda carry: (jnp.zeros_like(carry[0]), _like(change(carry[1]), carry[1]))
    return lax.while_loop(lambda carry: carry[0], body, (pred, state))[1]


def repeat(count, change: Callable, state):
    """`change(i, state)` for i from 0 to count - 1; count is a traced int32, another one on every stage."""
    body = lambda carry: (carry[0] + 1, _like(change(carry[0], carry[1]), carry[1]))
    return lax.while_loop(lambda carry: carry[0] < count, body, (jnp.zeros_like(count), state))[1]


def _like(new, old):
    return jax.tree.map(lambda a, b: ax.vary_over(a, sorted(ax.varying(b))), new, old)


def get(buffers, i):
    """Slot i of every leaf."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), buffers)


def put(buffers, i, values):
    """The buffers with slot i overwritten."""
    return jax.tree.map(lambda a, b: lax.dynamic_update_index_in_dim(a, _fit(b, a), i, 0), buffers, values)


def add(buffers, i, values):
    """The buffers with the values added to slot i."""
    return jax.tree.map(lambda a, b: a.at[i].add(_fit(b, a)), buffers, values)


def _fit(value, buffer):
    return ax.vary_over(value.astype(buffer.dtype), sorted(ax.varying(buffer)))


def room(aval, *leading: int, over: tuple[str, ...] = ()):
    """Zeros [*leading, ...] for values of that type, varying as they do and over these axes."""
    zeros = jnp.zeros((*leading, *aval.shape), aval.dtype)
    return ax.vary_over(zeros, sorted(ax.varying_type(aval) | set(over)))
