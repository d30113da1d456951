"""Pipelines: losses, aux losses and every gradient are the unpipelined model's, for every schedule; what runs is the table."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import moejax
from layouts.schedules import MAKERS, make_schedule
from layouts.tables import Shape
from moejax import MoEConfig, TransformerConfig
from moejax.pipeline_step import make_pipeline_step
from moejax.staged import Pipeline, to_model, to_stages
from moejax.step import init_state, make_train_step

# One layer of tokens is dropped here and there, and each sender's drops are its own on every mesh.
MOE = MoEConfig(d_model=16, d_ff=8, num_experts=4, top_k=2, dtype="float32", capacity_factor=1.0, num_senders=8)
SPARSE = TransformerConfig(
    vocab_size=32, num_layers=4, d_model=16, num_heads=2, num_kv_heads=2, d_ff=24, moe=MOE, dtype="float32"
)
DENSE = dataclasses.replace(SPARSE, moe=None, tie_embeddings=False)
# A dense layer before the MoE layers; a router with a state.
MIXED = dataclasses.replace(
    SPARSE,
    num_dense_layers=1,
    qk_norm=True,
    moe=dataclasses.replace(MOE, router="sigmoid_bias", num_shared_experts=1, loss_scope="sequence", activation="gelu"),
)
# An optimizer that changes nothing and keeps the gradients, for the tests to read.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A schedule over a mesh."""

    schedule: str
    stages: int
    microbatches: int
    axes: tuple[tuple[str, int], ...] = ()
    cfg: TransformerConfig = SPARSE
    chunks: int | None = None
    unit: int | None = None
    cuts: tuple[int, ...] | None = None
    split: bool = False

    @property
    def pipeline(self) -> Pipeline:
        shape = Shape(self.stages, self.microbatches, self.chunks, self.unit, self.split)
        return Pipeline(make_schedule(self.schedule, shape), self.cuts)

    def __str__(self):
        axes = "-".join(f"{name}{size}" for name, size in self.axes)
        return f"{self.schedule}-{self.stages}x{self.microbatches}-{axes}"


def batch_of(num_microbatches, rows=8, seq=8):
    rng = np.random.default_rng(0)
    shape = (num_microbatches * rows, seq)
    segments = np.repeat(np.array([[1] * 4 + [2] * 3 + [0]], np.int32), shape[0], 0)
    return {
        "tokens": rng.integers(0, 32, shape).astype(np.int32),
        "targets": rng.integers(0, 32, shape).astype(np.int32),
        "segment_ids": segments,
        "positions": np.repeat(np.array([[0, 1, 2, 3, 0, 1, 2, 0]], np.int32), shape[0], 0),
        "loss_mask": (segments > 0) & (rng.random(shape) < 0.8),
    }


@functools.cache
def reference(cfg, num_microbatches):
    """(gradients, metrics, router states) of the model on one device."""
    step = jax.jit(make_train_step(cfg, KEEP, num_microbatches))
    state, metrics = step(first_state(cfg), batch_of(num_microbatches))
    return jax.tree.map(np.asarray, (state.opt_state, metrics, state.router))


@functools.cache
def first_state(cfg):
    return jax.tree.map(np.asarray, init_state(cfg, KEEP, jax.random.key(0)))


def pipelined(case, observer=None):
    """The same, through the stages; parameters go there and gradients come back within the one program."""
    with jax.set_mesh(moejax.make_mesh(stage=case.stages, **dict(case.axes))):
        step, layers = make_pipeline_step(case.cfg, KEEP, case.pipeline, observer=observer), case.pipeline.layers(case.cfg)

        @jax.jit
        def run(state, batch):
            state, metrics = step(to_stages(case.cfg, layers, state), batch)
            return to_model(case.cfg, layers, state.opt_state), metrics, state.router

        return jax.tree.map(np.asarray, run(first_state(case.cfg), batch_of(case.microbatches)))


def assert_close(got, want, tolerance=1e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(np.asarray(a, np.float64) - b).max()
        assert error <= tolerance * max(np.abs(b).max(), 1e-6), (jax.tree_util.keystr(path), error, np.abs(b).max())


def check(case, observer=None):
    want, got = reference(case.cfg, case.microbatches), pipelined(case, observer)
    for name in ("token_straggler",):  # of devices: another number on another mesh
        want[1].pop(name, None), got[1].pop(name, None)
    assert_close(got, want)


CASES = [
    Case("gpipe", 4, 2, (("data", 2),)),
    Case("1f1b", 4, 4, (("data", 2),), DENSE),
    Case("interleaved", 2, 5, (("expert", 4),), chunks=2),
    Case("zb_h1", 4, 4, (("fsdp", 2),)),
    Case("zb_h2", 2, 5, (("expert", 2), ("tensor", 2))),
    Case("zb_v", 2, 4, (("data", 2), ("expert", 2))),
    Case("dualpipe", 2, 4, (("fsdp", 2), ("expert", 2))),
    Case("dualpipe_v", 2, 4, (("expert", 2),)),
    Case("bitpipe", 2, 4, (("data", 2),), DENSE),
    Case("hanayo", 2, 4, (("tensor", 2),), DENSE),
    Case("zeropp", 2, 5, (("fsdp", 2), ("expert", 2)), MIXED, chunks=2, unit=4, cuts=(2, 1, 0, 1)),
    Case("auto", 2, 4, (), DENSE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_all_gradients_are_the_unpipelined_models(case):
    check(case)


# Of every schedule three more, over what the dozen leaves out: 2 stages with two other axes, 4 with one, 8 alone; dense and MoE
# layers, tied and untied, fewer micro-batches than stages, as many, more, and numbers that nothing divides.
WIDE = dataclasses.replace(DENSE, num_layers=17, tie_embeddings=True)
UNTIED = dataclasses.replace(MIXED, tie_embeddings=False, num_layers=9, moe_every=2, remat="full")
# Pools have a sender a token shard: those of ("expert", 2).
POOLS = dataclasses.replace(MOE, capacity="pool", router="sigmoid_bias", num_senders=2, num_destinations=2)
POOLED = dataclasses.replace(SPARSE, num_layers=8, moe=POOLS, remat="dots")
TWO_AXES = (
    (("data", 2), ("expert", 2)),
    (("fsdp", 2), ("expert", 2)),
    (("expert", 2), ("tensor", 2)),
    (("fsdp", 2), ("tensor", 2)),
)
ONE_AXIS = ((("expert", 2),), (("fsdp", 2),), (("data", 2),))
EVEN = {"dualpipe": (4, 8, 16), "dualpipe_v": (4, 8, 16), "bitpipe": (4, 4, 8)}


def counts():
    """(number of the schedule, its name, micro-batches for 2, 4 and 8 stages)."""
    for number, name in enumerate(MAKERS):
        yield number, name, EVEN.get(name, ((5, 2, 3), (3, 4, 8), (6, 3, 9))[number % 3])


def more_cases():
    for number, name, (two, four, eight) in counts():
        yield Case(name, 2, two, TWO_AXES[number % 4], UNTIED)
        yield Case(name, 4, four, ONE_AXIS[number % 3], POOLED if ONE_AXIS[number % 3] == (("expert", 2),) else UNTIED)
        yield Case(name, 8, eight, (), WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(more_cases()), ids=str)
def test_and_so_on_every_mesh(case):
    check(case)


def cases_of_16():
    """What 8 devices have no room for: of every schedule 4 stages with two other axes, and 8 with one."""
    yield Case("zeropp", 4, 6, (("fsdp", 2), ("expert", 2)), UNTIED, chunks=2, unit=4)
    for number, name, (_, four, eight) in counts():
        yield Case(name, 4, four, TWO_AXES[(number + 1) % 4], UNTIED)
        yield Case(name, 8, eight, ONE_AXIS[(number + 1) % 3], DEEP)


DEEP = dataclasses.replace(UNTIED, num_layers=17)
SIXTEEN = list(cases_of_16())


@pytest.mark.slow
@pytest.mark.parametrize("case", SIXTEEN, ids=str)
def test_and_over_sixteen_devices(case):
    """In a process of its own: how many devices there are is fixed when jax starts."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=16"  # of a flag given twice the last counts
    command = [sys.executable, "-m", "tests.moejax.sixteen_devices", str(case)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{case}: 16 devices, as without a pipeline\n"


# Tight pools, whose drops lending lowers; a domain is all four devices, which the reference on one device is told.
LENT = dataclasses.replace(
    SPARSE,
    num_layers=2,
    moe=dataclasses.replace(
        MOE,
        num_experts=8,
        capacity="pool",
        num_senders=4,
        num_destinations=4,
        rebalance=moejax.RebalanceConfig(dyn=2, pair=1, num_devices=4),
    ),
)


@pytest.mark.slow
def test_experts_are_lent_within_a_stage():
    """As without a pipeline, and fewer tokens are dropped than where nothing is lent."""
    check(Case("1f1b", 2, 2, (("expert", 4),), LENT))
    stays = dataclasses.replace(LENT, moe=dataclasses.replace(LENT.moe, rebalance=None))
    dropped = [reference(cfg, 2)[1]["dropped"].sum() for cfg in (LENT, stays)]
    assert dropped[0] < dropped[1]


def test_every_schedule_has_a_case():
    assert {case.schedule for case in CASES} == set(MAKERS)
