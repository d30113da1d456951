"""Published runs priced: what `layouts.cost` says of them, beside what was measured."""

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from layouts.calibrate import leave_one_out
from layouts.clusters import parse_cluster
from layouts.cost import Cost, Efficiency, Job, cost
from layouts.errors import InputError
from layouts.hardware import Cluster, DeviceClass, chips
from tests.layouts.reference_runs import Run, distinct, groups, layout_of, stated_remat

# The largest slice that the fast links join, in chips.
SLICE = {"v5e": (16, 16), "v6e": (16, 16)}
CUBES = {64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8), 384: (4, 8, 12), 512: (8, 8, 8), 1024: (8, 8, 16), 2048: (8, 16, 16)}


@dataclasses.dataclass(frozen=True)
class Priced:
    """Runs of one layout: tokens a second and device, predicted and measured (the median of repeats)."""

    run: Run
    job: Job
    predicted: float
    measured: float
    cost: Cost

    @property
    def time_error(self) -> float:
        """Predicted over measured time, less 1."""
        return self.measured / self.predicted - 1

    @property
    def step_seconds(self) -> float:
        """Measured."""
        return self.job.batch.tokens / self.job.layout.num_devices / self.measured


def cluster_of(run: Run) -> Cluster:
    """The run's devices: whole hosts, slices of the usual shape."""
    chip, count = chips()[run.chip], run.devices or 0
    if chip.kind == "gpu":
        return parse_cluster(f"{run.chip}:{max(1, count // chip.host_chips)}x{min(count, chip.host_chips)}")
    shape = SLICE.get(run.chip) or CUBES[count]
    return Cluster((DeviceClass(chip, shape, max(1, count // (shape[0] * shape[1])) if len(shape) == 2 else 1),), chip.network)


def job_of(run: Run, efficiency: Efficiency | None = None) -> Job | None:
    """What ran; None where the layout is not stated or has no word here."""
    usual = "none" if chips()[run.chip].kind == "gpu" else "full"
    try:
        found = layout_of(run, stated_remat(run) or usual)
    except InputError:
        return None
    if found is None or run.model is None:
        return None
    layout, batch, recipe = found
    return Job(run.model, layout, batch, recipe, cluster_of(run), run.number_format, efficiency)


def price(run: Run, efficiency: Efficiency | None = None) -> Priced | None:
    """One run, priced; None where it has no job or no price."""
    job = job_of(run, efficiency)
    try:
        found = None if job is None else cost(job)
    except InputError:
        return None
    if job is None or found is None:
        return None
    return Priced(run, job, job.batch.tokens / found.step_seconds / job.layout.num_devices, run.tokens_per_second or 0, found)


def price_groups(found: Sequence[Run], efficiency: Efficiency | None = None) -> dict[tuple[str, str, int], list[Priced]]:
    """Every group's distinct layouts, priced; groups without any are left out."""
    priced = {}
    for key, group in groups(found).items():
        if "LoRA" in key[0]:
            continue  # frozen weights have no gradients: another computation
        layouts = [(several, price(several[0], efficiency)) for several in distinct(group).values()]
        priced[key] = [
            dataclasses.replace(one, measured=statistics.median(run.tokens_per_second or 0 for run in several))
            for several, one in layouts
            if one is not None
        ]
    return {key: group for key, group in priced.items() if group}


def left_out_errors(groups_: Mapping[tuple[str, str, int], Sequence[Priced]]) -> dict[str, tuple[float, ...]]:
    """By chip, of those with three layouts or more: each layout's time error by constants fitted to the chip's others."""
    by_chip = defaultdict(list)
    for (_, chip, _), group in groups_.items():
        by_chip[chip] += [(one.job, one.step_seconds) for one in group]
    return {chip: leave_one_out(measured).left_out for chip, measured in by_chip.items() if len(measured) >= 3}


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the opposite one, over all pairs (tau-a)."""
    signs = [(a - b) * (c - d) for (a, c), (b, d) in itertools.combinations(zip(one, other, strict=True), 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)
