"""Every way across the expert axis against the plain products of the true FLOPs, on 8 virtual CPU devices.

The plain products get every device's even share of the true rows, already grouped. Routing: each token draws its experts
without replacement (Gumbel noise on the logits), all equally likely, or, for Zipf, by 1 / rank, exponent 1; experts 0 to
E - 1 rank in this order, so that the first device has the most loaded ones. With nothing dropped, outputs are compared
before anything is timed. The devices share this machine's cores: a ratio counts work, not waiting.

A program whose products alone are more than MAX_PRODUCTS times the true ones is compiled and counted, but not run: with
cells and nothing dropped, a cell has a row for each of the sender's tokens, E / k times what is needed. Runs in a child
process, since the number of virtual devices is fixed when jax starts.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moejax
from benchmarks import cases, harness
from benchmarks.cases import Shape
from layouts import hlo

AIM = "uniform at 1.25: <= 1.2 forward, <= 1.35 forward+backward; Zipf with nothing dropped: <= 2 and <= 2.2"
NUM_DEVICES = 8
SHAPES = tuple(Shape(NUM_DEVICES * 512, 256, 512, 2, num_experts) for num_experts in (16, 64))
LOADS = {"uniform": (cases.uniform, 1.25), "zipf": (cases.zipf, None)}
MAX_PRODUCTS = 10.0
ROUNDS = 5
TOLERANCE = 1e-4
TIMEOUT_SECONDS = 1500


@dataclasses.dataclass(frozen=True)
class Setting:
    """A mesh and the axes on it that experts are sharded over."""

    sizes: dict[str, Any]
    expert: tuple[str, ...] = ("expert",)

    @property
    def rules(self) -> moejax.AxisRules:
        """The layer's."""
        return moejax.AxisRules(expert=self.expert)

    @property
    def mesh(self) -> Mesh:
        """The first devices as this mesh."""
        return moejax.make_mesh(**self.sizes)

    @property
    def others(self) -> tuple[str, ...]:
        """Axes that only tokens are sharded over."""
        return tuple(name for name in self.sizes if name not in self.expert)

    def place(self, value: jax.Array, spec: P) -> jax.Array:
        """The array, sharded."""
        return jax.device_put(value, NamedSharding(self.mesh, spec))

    def inputs(self, shape: Shape, draw: cases.Load) -> tuple[dict[str, jax.Array], jax.Array]:
        """The layer's parameters and tokens, [devices, T / devices, d]."""
        experts = {name: P() if name == "router" else P(self.expert) for name in cases.weights(shape)}
        params = {name: self.place(value, experts[name]) for name, value in cases.weights(shape).items()}
        x = cases.tokens(shape, draw).reshape(NUM_DEVICES, -1, shape.d_model)
        return params, self.place(x, P(tuple(self.sizes)))


MESHES = {
    "expert 8": Setting({"expert": 8}),
    "expert 2 x 4": Setting({"data": 2, "expert": 4}, ("data", "expert")),
    "data 2 x expert 4": Setting({"data": 2, "expert": 4}),
}
EXCHANGES = ("all_to_all", "ragged", "all_gather", "weight_stream")
FLAT = {name: {"exchange": name} for name in EXCHANGES} | {"pools": {"capacity": "pool"}}
# Over two expert axes only the exchange that tells them apart: the others do there what they do over one.
WAYS = {"expert 8": FLAT, "expert 2 x 4": {"hierarchical": {"exchange": "hierarchical"}}, "data 2 x expert 4": FLAT}
NOT_RUN = {"ratio": None, "ratio_low_quartile": None, "ratio_high_quartile": None}


def run() -> list[dict]:
    """A row per number of experts, load, mesh, way across and direction."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.exchanges"]
    done = subprocess.run(
        command, env=environment, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS
    )
    return json.loads(done.stdout)


def rows() -> list[dict]:
    """The same, in a process that has the devices."""
    groups = itertools.product(SHAPES, LOADS, MESHES, cases.DIRECTIONS)
    return [row for group in groups for row in _group(*group)]


def _group(shape: Shape, load: str, mesh: str, direction: str) -> list[dict]:
    """The ways across one mesh under one load, interleaved."""
    setting, (draw, factor) = MESHES[mesh], LOADS[load]
    inputs = setting.inputs(shape, draw)
    runs, figures = {"plain": _plain(setting, shape, direction, inputs[0])}, {}
    for way, settings in WAYS[mesh].items():
        run, figures[way] = _way(setting, shape, direction, settings | {"capacity_factor": factor}, inputs)
        runs |= {} if run is None else {way: run}
    if factor is None:
        _check_equal(runs)
    seconds = harness.interleaved_seconds(runs, ROUNDS)
    case = {"E": shape.num_experts, "load": load, "factor": str(factor), "mesh": mesh}
    ratio = lambda way: harness.ratio(seconds, way, "plain") if way in runs else NOT_RUN
    return [{**case, "way": way, "direction": direction, **ratio(way), **found} for way, found in figures.items()]


def _way(setting: Setting, shape: Shape, direction: str, settings: dict[str, Any], inputs: tuple):
    """(a run, or None where it is left out; what its compiled products are over the true ones, and why it is left out)."""
    try:
        layer = cases.layer(shape.config(**settings), setting.rules)
        with jax.set_mesh(setting.mesh):
            program = cases.DIRECTIONS[direction](layer).lower(*inputs).compile()
    except ValueError as error:
        return None, {"products": None, "left_out": str(error)}
    products = _products_over_true(program, shape, direction)
    if products is not None and products > MAX_PRODUCTS:
        return None, {"products": products, "left_out": f"more than {MAX_PRODUCTS:g} times the true products"}
    return cases.bound(program, *inputs), {"products": products, "left_out": ""}


def _products_over_true(program: jax.stages.Compiled, shape: Shape, direction: str) -> float | None:
    """FLOPs of all devices' products over the true ones; None where loops end when the data say so."""
    text = program.as_text()
    assert text is not None
    counted = hlo.read(text)
    if None in counted.loops:
        return None
    passes = 1 if direction == "forward" else 3
    return NUM_DEVICES * counted.dot_flops / (passes * 3 * 2 * shape.num_rows * shape.d_model * shape.d_ff)


def _plain(setting: Setting, shape: Shape, direction: str, params: dict[str, jax.Array]):
    """A run of the products of the true rows, an even share on every device."""
    experts = {name: value for name, value in params.items() if name != "router"}
    spec = P(setting.expert, setting.others)
    x = cases.grouped(shape, shape.num_experts, shape.num_rows // shape.num_experts)
    with jax.set_mesh(setting.mesh):
        products = jax.shard_map(cases.products, in_specs=(P(setting.expert), spec), out_specs=(spec, P()))
        arguments = experts, setting.place(x, spec)
        return cases.bound(cases.DIRECTIONS[direction](products).lower(*arguments).compile(), *arguments)


def _check_equal(runs) -> None:
    """All ways' outputs against the first's: nothing is dropped, so there is one answer."""
    outputs = {name: jax.tree.leaves(run())[0] for name, run in runs.items() if name != "plain"}
    for output in outputs.values():
        harness.check_equal(output, next(iter(outputs.values())), TOLERANCE)


if __name__ == "__main__":
    json.dump(rows(), sys.stdout)
