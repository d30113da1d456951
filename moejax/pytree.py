"""`pytree`: frozen dataclasses of arrays that jax transformations look into."""

import dataclasses
from typing import dataclass_transform

import jax


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls):
    """Makes `cls` a frozen dataclass and a jax pytree; fields with `metadata={"static": True}` are no leaves.

    Shapes in its annotations document and are not checked when it is built: jax rebuilds pytrees with specs, shapes and
    placeholders in the leaves.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.__no_type_check__ = True
    return jax.tree_util.register_dataclass(cls)
