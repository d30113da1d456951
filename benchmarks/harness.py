"""Fair timings and where they go: runs interleaved, medians and ratios, a printed table and a JSON file."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1


def interleaved_seconds(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round, after two unmeasured ones.

    A round calls every run once, every other round in reverse order, so that a machine that slows down or heats up
    meets all of them alike.

    Args:
      runs: by name, functions that return jax arrays; their work is waited for.
      rounds: how many measured rounds.
    """
    for run in [*runs.values()] * 2:
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(runs[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def check_equal(ours: Any, theirs: Any, tolerance: float) -> None:
    """Raises RuntimeError where two pytrees of arrays differ by more than `tolerance` of the largest number in a leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / max(np.abs(b).max(), np.finfo(np.float32).tiny)
        if not error <= tolerance:
            raise RuntimeError(f"{jax.tree_util.keystr(path) or 'output'}: {error:.2g} apart, more than {tolerance}")


def ratio(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> dict[str, float]:
    """How much longer `over` takes than `under`: the median of the rounds' ratios, with their quartiles."""
    low, middle, high = statistics.quantiles(
        [a / b for a, b in zip(seconds[over], seconds[under], strict=True)], n=4, method="inclusive"
    )
    return {"ratio": middle, "ratio_low_quartile": low, "ratio_high_quartile": high}


def median_seconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each run's seconds, under `<name>_seconds`."""
    return {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as text, a column a key, numbers to four digits."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells)


def write(name: str, aim: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes `results/<name>.json`: the rows, what they aim at, and what they were measured on. Returns its path."""
    record = {"schema": SCHEMA, "benchmark": name, "aim": aim, "measured_on": measured_on(), "rows": list(rows)}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def measured_on() -> dict[str, Any]:
    """The machine and the versions."""
    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
