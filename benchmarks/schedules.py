"""Pipeline schedules run on 2 virtual CPU devices: a step's time over the ideal, beside what the simulator says of the table.

Two stages, one core each (XLA's own threads are turned off), layers of two large products, so that F, B and W cost alike and
transfers next to nothing. The ideal is measured too: the same program with one stage and two shards of data, where each
device does a stage's work and waits for nobody. Runs in a child process, since devices and threads are fixed when jax starts.

What it can show: whether a table's bubble is there in a real run, and the order of the schedules. What it cannot: anything
about more stages than cores, or about transfers. It needs both cores for itself, and says whether it had them: `ideal_cores`
is the CPU seconds that the ideal was given a second, near 2 alone. Where it is lower, a stage that waits lets others work:
bubbles cost less than their time, and the rank correlation says little. `work` is a step's CPU seconds over the ideal's, those
of threads that spin included. The tables' own differences are 12.5% at most.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import moejax
from benchmarks import harness
from layouts.schedules import MAKERS, make_schedule
from layouts.simulate import Simulation, simulate
from layouts.tables import Shape

AIM = "schedules rank by measured time as the simulator ranks them (rank correlation near 1)"
STAGES, MICROBATCHES, LAYERS = 2, 8, 8
TOKENS, WIDTH, HIDDEN = 256, 256, 768
ROUNDS = 5
TIMEOUT_SECONDS = 1500
FLAGS = f"--xla_force_host_platform_device_count={STAGES} --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A schedule and how many of the layers it runs over.

    Attributes:
      name: of the row.
      schedule: the table.
      layers: over all its stages.
      axes: the mesh's, besides "stage".
    """

    name: str
    schedule: moejax.Schedule
    layers: int = LAYERS
    axes: dict[str, Any] = dataclasses.field(default_factory=dict)


def settings() -> list[Setting]:
    """Every schedule, those with a fused backward also with a split one; first the ideal, which holds one micro-batch."""
    found = [Setting("ideal", make_schedule("1f1b", Shape(1, MICROBATCHES)), LAYERS // STAGES, {"data": STAGES})]
    for name, maker in MAKERS.items():
        found.append(Setting(name, make_schedule(name, Shape(STAGES, MICROBATCHES))))
        if maker.takes_split:
            found.append(Setting(f"{name} split", make_schedule(name, Shape(STAGES, MICROBATCHES, split=True))))
    return found


def layer(params, given, x, inputs):
    """x + tanh(x up) down: two products forward, two for the input's gradient, two for the weights'."""
    return x + jnp.tanh(x @ params["up"]) @ params["down"], None, None


def step(setting: Setting):
    """(compiled step, its arguments); under the setting's mesh."""
    tokens = tuple(setting.axes)
    model = moejax.PipelineModel(
        kinds=(moejax.LayerKind(layer, {"up": P(), "down": P()}),),
        order=(0,) * setting.layers,
        embed=lambda ends, inputs: inputs["x"] * ends["scale"],
        head=lambda ends, x, inputs: jnp.square(x).mean() * ends["scale"],
        end_specs={"scale": P()},
        tokens=tokens,
    )
    where = moejax.StageLayers.even(setting.schedule.placement, model.order)
    up, down = jax.random.split(jax.random.key(0))
    layers = {
        "up": jax.random.normal(up, (setting.layers, WIDTH, HIDDEN)) * WIDTH**-0.5,
        "down": jax.random.normal(down, (setting.layers, HIDDEN, WIDTH)) * HIDDEN**-0.5,
    }
    params = moejax.PipelineParams(
        (jax.tree.map(lambda leaf: where.to_stages(0, leaf), layers),), {"scale": jnp.float32(1)}, (None,)
    )
    rows = TOKENS * setting.axes.get("data", 1)
    inputs = {"x": jax.random.normal(jax.random.key(1), (MICROBATCHES, rows, WIDTH))}
    run = jax.jit(lambda params, inputs: moejax.run_pipeline(setting.schedule, model, params, inputs, layers=where))
    with jax.set_mesh(moejax.make_mesh(stage=setting.schedule.num_stages, **setting.axes)):
        return run.lower(params, inputs).compile(), jax.device_put((params, inputs))


def measure() -> list[dict[str, Any]]:
    """A row a schedule. In this process: needs its devices."""
    chosen = settings()
    programs = {setting.name: step(setting) for setting in chosen}
    spent: dict[str, list[float]] = {setting.name: [] for setting in chosen}
    runs = {name: functools.partial(_timed, *program, spent[name]) for name, program in programs.items()}
    seconds = harness.interleaved_seconds(runs, ROUNDS)
    work = {name: sum(of[-ROUNDS:]) for name, of in spent.items()}  # without the unmeasured first runs
    rows = [_row(s, simulate(s.schedule), seconds) | {"work": work[s.name] / work["ideal"]} for s in chosen[1:]]
    correlation = rank_correlation([r["simulated"] for r in rows], [r["ratio"] for r in rows])
    cores = work["ideal"] / sum(seconds["ideal"])
    return [row | {"rank_correlation": correlation, "ideal_cores": cores} for row in rows]


def _timed(program, args, spent: list[float]):
    """What the program returns; adds the CPU seconds that all threads of this process took."""
    start = time.process_time()
    result = jax.block_until_ready(program(*args))
    spent.append(time.process_time() - start)
    return result


def _row(setting: Setting, simulation: Simulation, seconds: dict[str, list[float]]) -> dict[str, Any]:
    ideal = 3.0 * MICROBATCHES
    return {
        "schedule": setting.name,
        "holds": max(simulation.peak_activations),
        "bubble": simulation.bubble_makespan,
        "simulated": simulation.makespan / ideal,
        **harness.ratio(seconds, setting.name, "ideal"),
        "seconds": statistics.median(seconds[setting.name]),
    }


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's: the correlation of ranks, equal numbers sharing theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(numbers: list[float]) -> list[float]:
    rounded = [round(number, 9) for number in numbers]
    return [sum(a < b for a in rounded) + (sum(a == b for a in rounded) - 1) / 2 for b in rounded]


def run() -> list[dict[str, Any]]:
    """The rows, from a child process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.schedules"]
    done = subprocess.run(
        command, env=environment, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(measure()))
