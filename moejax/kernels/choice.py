"""Which implementation a backend and a static shape get where none is asked for: a table, with its evidence.

None of the choices does work for rows that are not there: `jax.lax.ragged_dot` is not among them, as its product (CPU
and GPU) or the gradient of its weights (TPU) is a dense one over all groups.
"""

import dataclasses

from moejax.kernels import pallas_gpu, pallas_tpu


@dataclasses.dataclass(frozen=True)
class Choice:
    """One line of the table.

    Attributes:
      platform: `jax.default_backend()`.
      implementation: what it gets.
      dtypes: for operands of these; () for any.
      evidence: what was measured or read, where, when.
    """

    platform: str
    implementation: str
    dtypes: tuple[str, ...]
    evidence: str


# The first line that fits is taken; where none does, FALLBACK.
TABLE = (
    Choice(
        "tpu",
        "pallas_tpu",
        pallas_tpu.DTYPES,
        "compiled for v5e, v5p and v6e and run interpreted, 2026-11-30; no TPU was at hand to time it",
    ),
    Choice(
        "gpu",
        "pallas_gpu",
        pallas_gpu.DTYPES,
        "compiled for H100 and run interpreted, 2026-11-30; no GPU was at hand to time it",
    ),
)
FALLBACK = "tiles"


def choose(platform: str, dtypes: tuple[str, ...], num_numbers: int, max_group_size: int | None) -> str:
    """A name from `moejax.grouped_matmul.IMPLEMENTATIONS`.

    Args:
      platform: `jax.default_backend()`.
      dtypes: of the operands.
      num_numbers: in the smallest operand: kernels take none that is empty.
      max_group_size: given only for the sake of "capacity".
    """
    if max_group_size is not None:
        return "capacity"
    for line in TABLE:
        if line.platform == platform and num_numbers and set(dtypes) <= set(line.dtypes):
            return line.implementation
    return FALLBACK
