"""What every config checks: names, whole numbers, flags, dtypes. Messages say the value and what would be legal."""

import difflib
from collections.abc import Iterable

import jax.numpy as jnp


def one_of(field: str, value: object, legal: Iterable[str]) -> None:
    """Raises ValueError, offering the nearest name, unless `value` is one of the `legal` ones."""
    names = tuple(legal)
    if isinstance(value, str) and value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{field}={value!r}: legal values are {', '.join(map(repr, names))}{hint}")


def positive(field: str, value: object) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}={value!r}: needs a whole number of at least 1")


def true_or_false(field: str, value: object) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}: needs True or False")


def float_dtype(field: str, value: str) -> jnp.dtype:
    """The dtype that `value` names; ValueError unless it is a floating-point one."""
    one_of(field, value, ("float32", "bfloat16", "float16"))
    return jnp.dtype(value)
