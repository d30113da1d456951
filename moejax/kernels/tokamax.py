"""The grouped product of tokamax, an extra: its own kernels on TPU and GPU, `jax.lax.ragged_dot` on the CPU.

tokamax asks this process's devices, not the mesh's, what it can compile for: ahead of time it declines, but for its Triton
kernels under `tokamax.config.cross_compile(True)` (0.0.12, compiled for H100; no GPU or TPU was at hand to run it).
"""

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from jaxtyping import Array, Float, Shaped

from moejax import axes as ax
from moejax.kernels import ragged
from moejax.kernels.rows import How, Rows

# Of its implementations those that do true work only; on the CPU it has none.
KERNELS = {"cpu": ("xla",), "gpu": ("mosaic_gpu", "triton"), "tpu": ("mosaic_tpu",)}


def product(
    x: Shaped[Array, "M _"],
    w: Shaped[Array, "G _ _"],
    rows: Rows,
    scale: Shaped[Array, "R"] | None,
    how: How,
    transpose: bool = False,
) -> Float[Array, "R _"]:
    """As `tiles.product`."""
    dot = functools.partial(_declining, _tokamax().ragged_dot)
    return ragged.product(x, w, rows, scale, how, transpose, dot=dot)


def outer(
    x: Shaped[Array, "M K"], g: Shaped[Array, "R N"], rows: Rows, scale: Shaped[Array, "R"] | None, how: How
) -> Float[Array, "G K N"]:
    """As `tiles.outer`."""
    dot = functools.partial(_declining, _tokamax().ragged_dot_general)
    return ragged.outer(x, g, rows, scale, how, dot=dot)


def _tokamax() -> ModuleType:
    """The module, or NotImplementedError naming the extra."""
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("'tokamax' is not installed: pip install 'moejax[tokamax]'")
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags  # pyright: ignore[reportMissingImports,reportMissingModuleSource]

    if not flags.FLAGS.is_parsed():
        # Or it would take this program's own arguments for absl's, and end it with an unknown flag.
        flags.FLAGS.mark_as_parsed()
    return tokamax


def _declining(dot: Callable[..., Array], *operands: Any, **options: Any) -> Array:
    """Its answer, or NotImplementedError with its reasons."""
    platform = ax.platform()
    try:
        return dot(*operands, **options, implementation=KERNELS[platform])
    except (NotImplementedError, ExceptionGroup) as error:
        reasons = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        if not all(isinstance(reason, NotImplementedError) for reason in reasons):
            raise
        shapes = " and ".join(str(operand.shape) for operand in operands[:2])
        why = "; ".join(map(str, reasons))
        raise NotImplementedError(f"'tokamax' has no kernel for {shapes} on {platform}: {why}") from error
