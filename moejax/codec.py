"""How rows travel: a codec around an exchange, forward and backward each with its own.

An exchange moves whole rows and adds nothing up, so a codec may encode each row before it and decode it after. Encoded
rows cross as integers: backends that widen small floats in a collective (XLA:CPU carries bf16 as f32) cannot then.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

Transport = Callable[[Array], Array]


@runtime_checkable
class Codec(Protocol):
    """An encoding of rows [..., d], row by row."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The arrays that travel, each with the leading dimensions of `rows`."""
        ...

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rows again, in `dtype`."""
        ...

    def row_bytes(self, width: int, dtype: jnp.dtype) -> int:
        """Bytes that travel for one row of `width` numbers of `dtype`."""
        ...


class Plain:
    """Rows as they are: exact."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The rows."""
        return (rows,)

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rows."""
        return wire[0].astype(dtype)

    def row_bytes(self, width: int, dtype: jnp.dtype) -> int:
        """As many as in memory."""
        return width * dtype.itemsize


class Bfloat16:
    """Rows rounded to bfloat16: 2 bytes a number, relative error at most 2**-8 each."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The bits of the rounded rows, uint16."""
        return (lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16),)

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The rounded rows."""
        return lax.bitcast_convert_type(wire[0], jnp.bfloat16).astype(dtype)

    def row_bytes(self, width: int, dtype: jnp.dtype) -> int:
        """Two a number."""
        return 2 * width


class Int8:
    """Whole multiples of a step per row, its largest magnitude / 127: error at most half a step, max|row| / 254, each."""

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """int8 [..., d] and the float32 steps [..., 1]."""
        step = _scale(rows, 127)
        return jnp.round(rows.astype(jnp.float32) / step).astype(jnp.int8), step

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The multiples times the steps."""
        return (wire[0].astype(jnp.float32) * wire[1]).astype(dtype)

    def row_bytes(self, width: int, dtype: jnp.dtype) -> int:
        """One a number and four for the step."""
        return width + 4


@dataclasses.dataclass(frozen=True)
class Float8:
    """8-bit floats of rows scaled to the format's largest number, per row.

    e4m3 (4 exponent, 3 mantissa bits): error at most 2**-4 of each number plus 2**-19 of the row's largest; e5m2: 2**-3,
    and 2**-32 of the largest.

    Attributes:
      format: the dtype, float8_e4m3fn or float8_e5m2.
    """

    format: jnp.dtype

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """The bits, uint8 [..., d], and the float32 scales [..., 1]."""
        scale = _scale(rows, float(jnp.finfo(self.format).max))
        return lax.bitcast_convert_type((rows.astype(jnp.float32) / scale).astype(self.format), jnp.uint8), scale

    def decode(self, wire: tuple[Array, ...], dtype: jnp.dtype) -> Array:
        """The 8-bit floats times the scales."""
        return (lax.bitcast_convert_type(wire[0], self.format).astype(jnp.float32) * wire[1]).astype(dtype)

    def row_bytes(self, width: int, dtype: jnp.dtype) -> int:
        """One a number and four for the scale."""
        return width + 4


def _scale(rows, largest):
    """[..., 1] float32: the row's largest magnitude over the format's, and no subnormal number, which would round to zero."""
    most = jnp.abs(rows).max(-1, keepdims=True).astype(jnp.float32)
    return jnp.maximum(most / largest, jnp.finfo(jnp.float32).tiny)


# Forward, backward: gradients have a wider range, so that fp8 gives them an exponent bit more.
CODECS: dict[str, tuple[Codec, Codec]] = {
    "plain": (Plain(), Plain()),
    "bf16": (Bfloat16(), Bfloat16()),
    "int8": (Int8(), Int8()),
    "fp8": (Float8(jnp.dtype(jnp.float8_e4m3fn)), Float8(jnp.dtype(jnp.float8_e5m2))),
}


def carry(rows: Array, there: Transport, back: Transport, codecs: tuple[str, str]) -> Array:
    """`there(rows)` under the forward codec; the backward is `back(cotangent)` under the backward codec.

    Args:
      rows: [..., d], floating point.
      there: a transport: each row of its result is one row of its argument, or zero.
      back: the transpose of `there`, taking its result's shape to its argument's.
      codecs: names of the codecs, (forward, backward).
    """
    return there(rows) if codecs == ("plain", "plain") else _carry(rows, there, back, codecs)


def through(rows: Array, transport: Transport, codec: Codec) -> Array:
    """Rows encoded, sent part by part, and decoded; not differentiable through the codec."""
    return codec.decode(tuple(transport(part) for part in codec.encode(rows)), rows.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _carry(rows, there, back, codecs):
    return through(rows, there, CODECS[codecs[0]][0])


def _carry_bwd(there, back, codecs, _, cotangent):
    return (through(cotangent, back, CODECS[codecs[1]][1]),)


_carry.defvjp(lambda rows, there, back, codecs: (_carry(rows, there, back, codecs), None), _carry_bwd)
