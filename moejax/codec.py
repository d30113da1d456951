"""How rows travel: a codec around an exchange, forward and backward each with its own.

An exchange moves whole rows and adds nothing up, so a codec may encode each row before it and decode it after. Encoded
rows cross as integers: backends that widen small floats in a collective (XLA:CPU carries bf16 as f32) cannot then.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Transport = Callable[[Array], Array]


class Codec(Protocol):
    """An encoding of rows [..., d], row by row."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The arrays that travel, each with the leading dimensions of `rows`."""
        ...

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rows again, in `dtype`."""
        ...


class Plain:
    """Rows as they are: exact."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The rows."""
        return (rows,)

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rows."""
        return wire[0].astype(dtype)


class Bfloat16:
    """Rows rounded to bfloat16: 2 bytes a number, relative error at most 2**-8 each."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The bits of the rounded rows, uint16."""
        return (lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16),)

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rounded rows."""
        return lax.bitcast_convert_type(wire[0], jnp.bfloat16).astype(dtype)


CODECS: dict[str, Codec] = {"plain": Plain(), "bf16": Bfloat16()}


def carry(rows: Array, there: Transport, back: Transport, codecs: tuple[str, str]) -> Array:
    """`there(rows)` under the forward codec; the backward is `back(cotangent)` under the backward codec.

    Args:
      rows: [..., d], floating point.
      there: a transport: each row of its result is one row of its argument, or zero.
      back: the transpose of `there`, taking its result's shape to its argument's.
      codecs: names of the codecs, (forward, backward).
    """
    return there(rows) if codecs == ("plain", "plain") else _carry(rows, there, back, codecs)


def _through(rows: Array, transport: Transport, name: str) -> Array:
    codec = CODECS[name]
    return codec.decode(tuple(transport(part) for part in codec.encode(rows)), rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _carry(rows, there, back, codecs):
    return _through(rows, there, codecs[0])


def _carry_bwd(there, back, codecs, _, cotangent):
    return (_through(cotangent, back, codecs[1]),)


_carry.defvjp(lambda rows, there, back, codecs: (_through(rows, there, codecs[0]), None), _carry_bwd)
