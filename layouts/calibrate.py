"""Constants of `Efficiency` fitted to measured steps, and the error of a step that the fit has not seen."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from layouts.cost import Efficiency, Job, cost
from layouts.layout import Layout
from layouts.network import LinkShares
from layouts.search import Problem

# What is fitted, each a share or a time above 0; the rest stays as by default.
CONSTANTS: dict[str, Callable[[Efficiency, float], Efficiency]] = {
    "product": lambda e, x: dataclasses.replace(e, product=e.product * x),
    "attention": lambda e, x: dataclasses.replace(e, attention=e.attention * x),
    "memory": lambda e, x: dataclasses.replace(e, memory=e.memory * x),
    "op_seconds": lambda e, x: dataclasses.replace(e, op_seconds=e.op_seconds * x),
    "fabric": lambda e, x: dataclasses.replace(e, links=dataclasses.replace(e.links, fabric=e.links.fabric * x)),
}
# Factors tried on each constant in turn, finer each round; how far from the default one may go.
_ROUNDS = (2.0, 2.0, 1.4, 1.4, 1.15, 1.15, 1.05)
_FARTHEST = 32.0
# A fit of few steps must not run away for little: a factor of e away from the default costs this much squared error.
_PULL = 1e-3


@dataclasses.dataclass(frozen=True)
class Step:
    """A measured step."""

    layout: Layout
    seconds: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was fitted.

    Attributes:
      efficiency: the constants.
      errors: of each step, predicted over measured less 1, by this fit.
      left_out: the same of each step by a fit to the others.
    """

    efficiency: Efficiency
    errors: tuple[float, ...]
    left_out: tuple[float, ...]

    @property
    def left_out_error(self) -> float:
        """The median of the absolute errors of steps left out."""
        return statistics.median(map(abs, self.left_out))


def calibrate(problem: Problem, steps: Sequence[Step]) -> Fit:
    """Fits the constants to measured steps, by relative error; each step is left out once of a fit of its own."""
    return leave_one_out([(problem.job(step.layout), step.seconds) for step in steps])


def leave_one_out(measured: Sequence[tuple[Job, float]]) -> Fit:
    """`calibrate` of jobs that may differ in more than their layouts: models, batches, formats.

    Args:
      measured: (job, seconds of a step) pairs, on one kind of device.
    """
    fitter, every = _Fitter(measured), range(len(measured))
    factors = fitter.fit(every)
    left_out = [fitter.error(index, fitter.fit([other for other in every if other != index])) for index in every]
    errors = tuple(fitter.error(index, factors) for index in every)
    return Fit(_scaled(measured[0][0].gives, factors), errors, tuple(left_out))


def predict(problem: Problem, efficiency: Efficiency, layout: Layout) -> float:
    """Seconds of a step under these constants."""
    return cost(dataclasses.replace(problem, efficiency=efficiency).job(layout)).step_seconds


class _Fitter:
    """Factors on the constants; every step's price under each is remembered, as fits that leave one out try the same."""

    def __init__(self, measured: Sequence[tuple[Job, float]]):
        self.measured = measured
        self.errors: dict[tuple[float, ...], float] = {}

    def error(self, index: int, factors: Mapping[str, float]) -> float:
        """Of one step: predicted over measured less 1."""
        key = (index, *factors.values())
        if key not in self.errors:
            job, seconds = self.measured[index]
            scaled = dataclasses.replace(job, efficiency=_scaled(job.gives, factors))
            self.errors[key] = cost(scaled).step_seconds / seconds - 1
        return self.errors[key]

    def loss(self, chosen: Sequence[int], factors: Mapping[str, float]) -> float:
        """The mean squared error of the chosen steps' logarithm, and the pull of the defaults."""
        off = [math.log1p(self.error(index, factors)) ** 2 for index in chosen]
        return sum(off) / len(off) + _PULL * sum(math.log(x) ** 2 for x in factors.values())

    def fit(self, chosen: Sequence[int]) -> dict[str, float]:
        """The factors with the least loss of the chosen steps, found one at a time."""
        factors = dict.fromkeys(CONSTANTS, 1.0)
        best = self.loss(chosen, factors)
        for ratio, name in itertools.product(_ROUNDS, CONSTANTS):
            for times in (ratio, 1 / ratio):
                tried = factors | {name: factors[name] * times}
                while 1 / _FARTHEST <= tried[name] <= _FARTHEST and (found := self.loss(chosen, tried)) < best:
                    best, factors = found, tried
                    tried = factors | {name: factors[name] * times}
        return factors


def _scaled(efficiency: Efficiency, factors: Mapping[str, float]) -> Efficiency:
    for name, factor in factors.items():
        efficiency = CONSTANTS[name](efficiency, factor)
    return efficiency


def entry_of(efficiency: Efficiency) -> dict[str, float | dict[str, float]]:
    """The constants as JSON, as `layouts.request.read_efficiency` reads them."""
    links: LinkShares = efficiency.links
    return {**dataclasses.asdict(efficiency), "links": dataclasses.asdict(links)}
