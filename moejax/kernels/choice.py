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
      platform: as `moejax.axes.platform` names it.
      implementation: what it gets.
      dtypes: for operands of these; () for any.
      evidence: what was measured or read, where, when.
      most_numbers: in one array, operand or result, that it can address; None: no limit of its own.
    """

    platform: str
    implementation: str
    dtypes: tuple[str, ...]
    evidence: str
    most_numbers: int | None = None

    def takes(self, dtypes: tuple[str, ...], sizes: tuple[int, ...]) -> bool:
        """Whether it can serve operands of these dtypes, and arrays of so many numbers."""
        fits = self.most_numbers is None or max(sizes) <= self.most_numbers
        return fits and min(sizes) > 0 and (not self.dtypes or set(dtypes) <= set(self.dtypes))


# The first line that fits is taken; where none does, FALLBACK.
TABLE = (
    Choice(
        "cpu",
        "tiles",
        (),
        "2026-11-30, 2 x86-64 cores, float32, over plain products of the same FLOPs, forward and with backward: "
        "4096x256x512, 8 groups 1.45 and 1.31, 64 groups 1.22 and 1.25; 16384x512x1024, 64 groups 0.98 and 1.06; all "
        "rows in two groups takes 0.6 to 1.0 of that time. 'capacity' with no padding at all: 0.96 to 1.44. "
        "`python -m benchmarks grouped_matmul`",
    ),
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
        pallas_gpu.MOST_NUMBERS,
    ),
)
FALLBACK = "tiles"
# Padded places over rows: up to here "capacity", given a bound, is near the time of tiles on the CPU; it grows in step.
MAX_PADDING = 1.25


def choose(platform: str, dtypes: tuple[str, ...], sizes: tuple[int, ...], padding: float | None) -> str:
    """A name from `moejax.grouped_matmul.IMPLEMENTATIONS`.

    Args:
      platform: as `moejax.axes.platform` names it.
      dtypes: of the operands.
      sizes: numbers in each array, operands and results: kernels take none that is empty.
      padding: groups x bound on their rows / rows, where there is a bound.
    """
    if padding is not None and padding <= MAX_PADDING:
        return "capacity"
    for line in TABLE:
        if line.platform == platform and line.takes(dtypes, sizes):
            return line.implementation
    return FALLBACK
