"""layouts.verify: steps compiled on 8 virtual CPU devices say what was predicted; proofs that fail say why."""

import dataclasses
import json
import statistics
from collections.abc import Sequence

import jax
import pytest

from layouts import aot, verify
from layouts.__main__ import main
from layouts.build import config_of, lower_step, request_of
from layouts.clusters import parse_cluster
from layouts.errors import InputError
from layouts.layout import Layout
from layouts.lowered import bookkeeping_bytes, compiled_crossings, predicted_crossings
from layouts.model import Attention, Layer, Model, MoE
from layouts.presets import load_model, model_from_json, model_of, recipe_of
from layouts.search import Problem
from layouts.workload import MOEJAX, Batch
from tests.layouts.test_aot import needs_compilers

FLOAT32 = dataclasses.replace(MOEJAX, compute_bytes=4)
SMALL = Model("small", 64, 128, (Layer(Attention(4, 4, 16, 16, qk_norm="head"), MoE(8, 2, 32)),) * 2, tied=True)
PROBLEM = Problem(SMALL, Batch(32, 16), parse_cluster("cpu:8"), FLOAT32, "fp32")
FULL = {"remat": "full"}
MESHES = [
    {"data": 8},
    {"expert": 8},
    {"fsdp": 8},
    {"data": 2, "expert": 4},
    {"data": 4, "expert": 2},
    {"data": 2, "fsdp": 4},
    {"fsdp": 2, "expert": 4},
    {"fsdp": 4, "expert": 2},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"expert": 4, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
]
LAYOUTS = [
    *(Layout(**mesh) for mesh in MESHES),
    *(Layout(**mesh, **FULL) for mesh in (MESHES[i] for i in (0, 1, 2, 3, 5, 6, 8))),
    Layout(expert=8, remat="received"),
    Layout(expert=8, remat="exchange"),
    Layout(data=2, expert=4, remat="exchange"),
    Layout(expert=8, num_chunks=2),
    Layout(data=4, expert=2, num_chunks=4),
    Layout(fsdp=2, expert=4, num_chunks=2),
    Layout(expert=4, tensor=2, num_chunks=2),
    Layout(expert=8, exchange="all_gather"),
    Layout(data=2, expert=4, exchange="all_gather"),
    Layout(expert=8, exchange="weight_stream"),
    Layout(data=2, expert=4, exchange="weight_stream"),
]


def compiled(layout: Layout, folder, order: Sequence[int] = range(8)) -> aot.Compiled:
    """The layout's step of the small model, compiled here for the devices in that order."""
    cfg = config_of(SMALL, layout, FLOAT32)
    done = lower_step(cfg, layout, PROBLEM.batch, [jax.devices()[index] for index in order]).compile()
    folder.mkdir(exist_ok=True)
    path = folder / "step.hlo"
    path.write_text(done.as_text())
    sizes = done.memory_analysis()
    parts = {f"{part}_bytes": int(getattr(sizes, f"{part}_size_in_bytes")) for part in ("argument", "output", "alias", "temp")}
    return aot.Compiled(aot.Target.parse("cpu:8"), path, aot.Memory(**parts), {}, 0.0, 0.0, ())


def check(layout: Layout, folder) -> tuple[aot.Compiled, float]:
    """Asserts that every array that crosses is as predicted and the products' FLOPs agree; how far the peak is off."""
    done = compiled(layout, folder)
    limit = bookkeeping_bytes(PROBLEM.batch, layout)
    found = {key: times for key, times in compiled_crossings(done.text).items() if key.nbytes > limit}
    assert found == dict(predicted_crossings(SMALL, layout, PROBLEM.batch, FLOAT32)), layout
    proof = verify.judge(PROBLEM, layout, done)
    assert {one.name: one.agrees for one in proof.checks}["product FLOPs"], proof.lines()
    assert done.memory is not None
    return done, verify.predicted_peak(PROBLEM, layout, "cpu") / done.memory.peak_bytes - 1


@pytest.mark.parametrize("layout", [LAYOUTS[15]], ids=["fsdp, expert, tensor"])
def test_a_step_is_as_predicted(layout, tmp_path):
    done, off = check(layout, tmp_path)
    assert abs(off) < verify.TOLERANCE
    assert verify.judge(PROBLEM, layout, done).verdict == "proved"
    # The same text under a device too small, with the compiler's alarm, and without figures.
    small = dataclasses.replace(PROBLEM, memory_bytes=1e6)
    assert "bytes more than a device has" in verify.judge(small, layout, done).words
    alarmed = dataclasses.replace(done, alarms=("Involuntary full rematerialization",))
    assert verify.judge(PROBLEM, layout, alarmed).verdict == "failed"
    assert verify.judge(PROBLEM, layout, dataclasses.replace(done, memory=None)).verdict == "unverified"
    # A text of another layout is no proof of this one.
    other = dataclasses.replace(layout, remat="full", data=2 * layout.data)
    assert not verify.judge(PROBLEM, other, done).passed


@pytest.mark.slow
def test_all_steps_are_as_predicted(tmp_path, capsys):
    """Every array that crosses in float32, exactly; memory within 10% at the 90th percentile."""
    off = [abs(check(layout, tmp_path)[1]) for layout in LAYOUTS]
    p90 = statistics.quantiles(off, n=10)[-1]
    with capsys.disabled():
        print(f" {len(LAYOUTS)} layouts: collectives exact; memory off by {p90:.1%} at the 90th percentile", end="")
    assert len(LAYOUTS) >= 30
    assert p90 <= 0.10


def test_a_pipelined_step_is_proved():
    problem = Problem(load_model("demo"), Batch(256, 32), parse_cluster("cpu:8"), FLOAT32, "fp32")
    layout = Layout(data=2, stage=2, expert=2, schedule="1f1b", num_microbatches=4)
    proof = verify.prove(problem, layout)
    assert proof.passed, proof.words
    assert [check.name for check in proof.checks] == ["peak bytes", "all-reduce", "all-to-all", "collective-permute"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zeropp", 2)], ids=str)
def test_a_pipelines_peak_on_h100_is_as_predicted(schedule):
    """A W that waits holds gigabytes of what its B made."""
    needs_compilers("h100:1x8")
    name, chunks = schedule
    layout = Layout(stage=4, expert=2, schedule=name, stage_chunks=chunks, num_microbatches=8, remat="full")
    problem = Problem(load_model("qwen3-30b-a3b"), Batch(2048, 32), parse_cluster("h100:1x8"), MOEJAX, "bf16")
    peak = verify.prove(problem, layout).checks[0]
    assert (peak.name, peak.agrees) == ("peak bytes", True), peak


@pytest.mark.slow
def test_the_order_of_devices_changes_nothing_compiled(tmp_path):
    orders = (range(8), (5, 2, 7, 0, 3, 6, 1, 4))
    found = [compiled(LAYOUTS[15], tmp_path / str(order[0]), order) for order in orders]
    assert found[0].memory == found[1].memory
    crossings = [compiled_crossings(one.text) for one in found]
    assert crossings[0] == crossings[1]
    assert crossings[0].total() > 0


@pytest.mark.slow
def test_gradients_are_summed_in_every_micro_batch(tmp_path):
    """Two micro-batches sum the bytes of two steps of one (`Recipe.sums`), in all-reduces and in reduce-scatters."""
    layout, one = Layout(data=2, fsdp=2, expert=2, num_microbatches=2), Layout(data=2, fsdp=2, expert=2)
    limit = bookkeeping_bytes(PROBLEM.batch, layout)
    found = compiled_crossings(compiled(layout, tmp_path).text)
    half = dataclasses.replace(PROBLEM.batch, sequences=PROBLEM.batch.sequences // 2)
    expected = predicted_crossings(SMALL, one, half, FLOAT32)
    for kind in ("all-reduce", "reduce-scatter"):
        sums = [sum(k.nbytes * n for k, n in side.items() if k.kind == kind and k.nbytes > limit) for side in (found, expected)]
        assert sums[0] == FLOAT32.sums(layout) * sums[1] > 0, kind


def test_what_json_carries():
    for name in ("qwen3-30b-a3b", "llama-3.1-405b"):
        model = load_model(name)
        request = json.loads(json.dumps(request_of(model, Layout(data=2), Batch(64, 2), MOEJAX, None)))
        assert model_from_json(request["model"]) == model


def test_a_config_comes_back():
    """Model -> TransformerConfig -> Model."""
    for name in ("demo", "qwen3-30b-a3b", "mixtral-8x7b", "llama-3.1-8b"):
        model = load_model(name)
        cfg = config_of(model, Layout(), MOEJAX)
        assert (model_of(cfg).kinds, model_of(cfg).params_total) == (model.kinds, model.params_total), name
        assert recipe_of(cfg).param_bytes == 4


def test_what_does_not_run_is_unverified():
    proof = verify.prove(PROBLEM, Layout(context=2))
    assert (proof.verdict, proof.words) == ("unverified", "moejax does not run a context axis")
    with pytest.raises(InputError, match="moejax does not run multi-head latent attention"):
        config_of(load_model("deepseek-v3"), Layout(), MOEJAX)
    no_compiler = dataclasses.replace(PROBLEM, cluster=parse_cluster("mi300x:1x8"))
    assert "legal families are" in verify.prove(no_compiler, Layout(data=8)).words


def test_failures_are_recorded_and_the_next_is_tried(monkeypatch):
    words = iter(["INTERNAL: the compiler's own words", "timed out"])

    def fails(*arguments, **options):
        raise aot.CompileError(next(words))

    monkeypatch.setattr(aot, "compile_for", fails)
    proofs = verify.prove_best(PROBLEM, [Layout(data=8), Layout(expert=8)], 1)
    assert [(proof.rank, proof.verdict) for proof in proofs] == [(1, "failed"), (2, "failed")]
    assert "the compiler's own words" in proofs[0].words


def test_compilers_that_are_not_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(aot.INTERPRETER_VARIABLE, str(tmp_path / "python"))
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"schema": 1, "mesh": {"expert": 8}}))
    arguments = [str(path), "--model", "demo", "--cluster", "v5p:2x2x2", "--seq", "256", "--global-batch", "4096"]
    assert main(["verify", *arguments]) == 2
    assert "run `make .venv-aot/.aot`" in capsys.readouterr().err
    assert main(["verify", *arguments, "--timeout", "0"]) == 2
