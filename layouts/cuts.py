"""Where a pipeline of one chunk a stage is cut: the longest stage as short as can be, every stage within its memory.

A stage that fits with some layers fits with fewer of them, in time and in memory. So for a given length of the longest
stage it is best that each stage in turn takes as many layers as fit, and the least length is found by bisection.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Stages:
    """What stages take and hold.

    Attributes:
      seconds: of each layer, for one micro-batch.
      fixed_seconds: of each stage, besides its layers.
      fits: (stage, first layer, end) -> whether a device holds them.
    """

    seconds: Sequence[float]
    fixed_seconds: Sequence[float]
    fits: Callable[[int, int, int], bool]


def best_cuts(stages: Stages) -> tuple[int, ...] | None:
    """The numbers of layers of each stage, at least one, whose longest stage is shortest; None where nothing fits."""
    ends = [0.0, *itertools.accumulate(stages.seconds)]
    number = len(stages.fixed_seconds)
    last = len(stages.seconds)
    lengths = sorted(
        {
            round(ends[end] - ends[first] + fixed, 12)
            for fixed in set(stages.fixed_seconds)
            for first in range(last)
            for end in range(first + 1, last + 1)
        }
    )
    found, low, high = None, 0, len(lengths)
    while low < high:
        middle = (low + high) // 2
        cuts = _fill(stages, ends, number, lengths[middle] * (1 + 1e-9))
        if cuts is None:
            low = middle + 1
        else:
            found, high = cuts, middle
    return found


def _fill(stages: Stages, ends: Sequence[float], number: int, longest: float) -> tuple[int, ...] | None:
    """Each stage takes as many layers as fit, and leaves one for each that follows; None where some are left over."""
    first, cuts, last = 0, [], len(ends) - 1
    for stage in range(number):
        most = last - (number - 1 - stage)
        end = _most(stages, ends, (stage, first, most), longest)
        if end == first:
            return None
        cuts.append(end - first)
        first = end
    return tuple(cuts) if first == last else None


def _most(stages: Stages, ends: Sequence[float], where: tuple[int, int, int], longest: float) -> int:
    """The furthest end that the stage's time and memory allow."""
    stage, first, most = where
    low, high = first, most
    while low < high:
        end = (low + high + 1) // 2
        takes = ends[end] - ends[first] + stages.fixed_seconds[stage]
        if takes <= longest and stages.fits(stage, first, end):
            low = end
        else:
            high = end - 1
    return low
