"""Published runs: rows joined into runs, groups, and what the model and memory counts say of them."""

import functools
import statistics

import pytest

from layouts.errors import InputError
from layouts.hardware import chips
from layouts.memory import memory
from tests.layouts.reference_runs import (
    FLOPS,
    NAMES,
    TOKENS,
    Run,
    distinct,
    groups,
    layout_of,
    models,
    rows,
    runs,
    stated_remat,
)

RUNS = runs()
# Not stated: the least memory that any of these takes must fit.
REMATS = ("none", "norm+activation", "full")


def test_rows_of_one_run_are_one():
    assert (len(rows()), len(RUNS)) == (494, 259)
    assert sum(len(run.measured) for run in RUNS) == len(rows())
    assert all(run.source for run in RUNS)


def test_both_figures_of_a_run_are_kept():
    both = [run for run in RUNS if {"tokens_per_s_per_device", "model_tflops_per_device"} <= dict(run.measured).keys()]
    assert len(both) > 100


def test_groups(capsys):
    found = groups(RUNS)
    ranked = {key: group for key, group in found.items() if len(distinct(group)) >= 3}
    with capsys.disabled():
        print(
            f" {len(found)} groups of {sum(map(len, found.values()))} runs, {len(ranked)} of them with 3 layouts or more",
            end="",
        )
    assert all(len({(run.family, run.chip, run.devices) for run in group}) == 1 for group in found.values())
    # Few: most repeats of a layout differ only in the software, and those are one layout (`what_ran`).
    assert len(ranked) == 11


def test_repeats_are_ties():
    """The same layout under another version of the software is not another layout."""
    group = groups(RUNS)["qwen3-30b-a3b", "gb200", 8]
    assert len(distinct(group)) < len(group)


def test_parameters():
    """What a family's sizes add up to is what its rows say, to the digits given."""
    for row in rows():
        model = models()[NAMES.get(row["model"], row["model"])]
        if model is not None and row["params_total"]:
            number = float(row["params_total"].rstrip("B")) * (1e9 if row["params_total"].endswith("B") else 1)
            assert model.params_total == pytest.approx(number, rel=0.03), row["model"]


def test_flops_are_the_sources():
    """FLOP/s over tokens/s of the runs that state both: within 3% at the median family, by the same convention."""
    ratios: dict[str, list[float]] = {}
    for run in RUNS:
        measured = dict(run.measured)
        tokens = next((measured[metric] for metric in TOKENS if metric in measured), None)
        flops = next((measured[metric] for metric in FLOPS if metric in measured), None)
        if tokens and flops and run.model and run.seq and run.task == "pretraining":
            ratios.setdefault(run.family, []).append(flops * 1e12 / tokens / run.model.flops_per_token(run.seq))
    assert len(ratios) >= 5
    assert statistics.median(map(statistics.median, ratios.values())) == pytest.approx(1, abs=0.03)


@functools.cache
def fits(run: Run) -> bool | None:
    """Whether the run is predicted to fit its devices; None where its layout is not stated or has no word here."""
    stated = stated_remat(run)
    for remat in (stated,) if stated else REMATS:
        try:
            found = layout_of(run, remat)
            if found is None or run.model is None:
                return None
            chip = chips()[run.chip]
            room = 96e9 if "96GB" in run.hardware else chip.hbm_bytes * chip.devices
            if memory(run.model, *found).peak_bytes <= room:
                return True
        except InputError:
            return None
    return False


def test_published_runs_fit(capsys):
    """At least 95% of those whose layout is stated; LoRA's frozen weights are not modelled."""
    answers = [fits(run) for run in RUNS if run.tokens_per_second and run.task != "LoRA"]
    known = [answer for answer in answers if answer is not None]
    with capsys.disabled():
        print(f" {sum(known)} of {len(known)} published runs fit", end="")
    assert len(known) >= 150
    assert sum(known) / len(known) >= 0.95
