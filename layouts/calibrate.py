"""Constants of `Efficiency` fitted to measured steps, and the error of a step that the fit has not seen."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from layouts.cost import Efficiency, cost
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
    efficiency = fit(problem, steps)
    errors = tuple(predict(problem, efficiency, step.layout) / step.seconds - 1 for step in steps)
    left_out = []
    for index, step in enumerate(steps):
        others = fit(problem, [*steps[:index], *steps[index + 1 :]])
        left_out.append(predict(problem, others, step.layout) / step.seconds - 1)
    return Fit(efficiency, errors, tuple(left_out))


def predict(problem: Problem, efficiency: Efficiency, layout: Layout) -> float:
    """Seconds of a step under these constants."""
    return cost(dataclasses.replace(problem, efficiency=efficiency).job(layout)).step_seconds


def fit(problem: Problem, steps: Sequence[Step]) -> Efficiency:
    """The constants with the least squared error of the logarithm, found one at a time."""
    start = problem.job(steps[0].layout).gives
    factors = dict.fromkeys(CONSTANTS, 1.0)

    def loss(tried: dict[str, float]) -> float:
        efficiency = _scaled(start, tried)
        off = [math.log(predict(problem, efficiency, step.layout) / step.seconds) ** 2 for step in steps]
        return sum(off) / len(off) + _PULL * sum(math.log(x) ** 2 for x in tried.values())

    best = loss(factors)
    for ratio in _ROUNDS:
        for name in CONSTANTS:
            for times in (ratio, 1 / ratio):
                tried = factors | {name: factors[name] * times}
                while 1 / _FARTHEST <= tried[name] <= _FARTHEST and (found := loss(tried)) < best:
                    best, factors = found, tried
                    tried = factors | {name: factors[name] * times}
    return _scaled(start, factors)


def _scaled(efficiency: Efficiency, factors: dict[str, float]) -> Efficiency:
    for name, factor in factors.items():
        efficiency = CONSTANTS[name](efficiency, factor)
    return efficiency


def entry_of(efficiency: Efficiency) -> dict[str, float | dict[str, float]]:
    """The constants as JSON, as `layouts.request.read_efficiency` reads them."""
    links: LinkShares = efficiency.links
    return {**dataclasses.asdict(efficiency), "links": dataclasses.asdict(links)}
