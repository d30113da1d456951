"""The benchmarks' harness: what is timed when, what a ratio is, and what is written."""

import importlib
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax
from benchmarks import (
    balance,
    cases,
    compiled_layer,
    exchanges,
    harness,
    memory_tokens,
    moe_layer,
    overlapped,
    ragged_layer,
    schedules,
    torch_layer,
)
from benchmarks.__main__ import NAMES
from benchmarks.cases import Shape
from layouts.schedules import MAKERS, make_schedule
from layouts.tables import Shape as PipelineShape
from moejax import config

SHAPE = Shape(num_tokens=64, d_model=32, d_ff=48, top_k=2, num_experts=16)


def test_rounds_are_interleaved_and_turn_around():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = harness.interleaved_seconds(runs, rounds=3)
    assert calls == ["a", "b"] * 2 + ["a", "b", "b", "a", "a", "b"]
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_seconds_are_those_of_the_work():
    runs = {"long": lambda: time.sleep(0.02), "short": lambda: jnp.zeros(())}
    seconds = harness.interleaved_seconds(runs, rounds=3)
    assert min(seconds["long"]) >= 0.02
    assert harness.ratio(seconds, "long", "short")["ratio"] > 1


def test_ratio_is_the_median_of_rounds():
    seconds = {"a": [2.0, 30.0, 4.0], "b": [1.0, 1.0, 1.0]}
    assert harness.ratio(seconds, "a", "b") == {"ratio": 4.0, "ratio_low_quartile": 3.0, "ratio_high_quartile": 17.0}
    assert harness.median_seconds(seconds) == {"a_seconds": 4.0, "b_seconds": 1.0}


def test_table():
    rows = [{"tokens": 16384, "ratio": 1.23456, "name": "x"}, {"tokens": 8, "ratio": 1.0, "name": "long"}]
    assert harness.table(rows).splitlines() == [
        "tokens  ratio  name",
        "16,384  1.235     x",
        "     8      1  long",
    ]


def test_record(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    record = json.loads(harness.write("some", "small", [{"ratio": 1.5}]).read_text())
    assert {name: record[name] for name in ("schema", "benchmark", "aim", "rows")} == {
        "schema": 1,
        "benchmark": "some",
        "aim": "small",
        "rows": [{"ratio": 1.5}],
    }
    assert record["measured_on"]["num_devices"] == 8


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_states_its_aim(name):
    benchmark = importlib.import_module(f"benchmarks.{name}")
    assert benchmark.AIM
    assert callable(benchmark.run)


def test_every_benchmark_is_listed():
    """All but `layout_proofs`, a command of its own: it compiles whole training steps, for longer than all the others run."""
    modules = {path.stem for path in Path(harness.__file__).parent.glob("*.py")}
    assert modules - {"__init__", "__main__", "harness", "cases", "layout_proofs"} == set(NAMES)


def test_unlike_numbers_are_refused():
    ours = {"y": jnp.array([1.0, 2.0])}
    harness.check_equal(ours, {"y": np.array([1.0, 2.00001])}, 1e-4)
    for wrong in ([1.0, 2.1], [1.0, float("nan")]):
        with pytest.raises(RuntimeError, match=r"'y'.*apart, more than 0.0001"):
            harness.check_equal(ours, {"y": np.array(wrong)}, 1e-4)


@jax.jit
def stats_of(params, x):
    return moejax.moe(params, x, None, None, cfg=SHAPE.config(**cases.DROPLESS))[1]


def routed(load) -> np.ndarray:
    """Tokens per expert under a load, by the layer's own stats."""
    stats = stats_of(cases.weights(SHAPE), cases.tokens(SHAPE, load))
    assert stats.num_dropped == 0
    return np.asarray(stats.tokens_per_expert)


def test_loads():
    assert (routed(cases.even) == SHAPE.num_rows // SHAPE.num_experts).all()
    assert sorted(routed(cases.worst))[-3:] == [0, SHAPE.num_tokens, SHAPE.num_tokens]
    uniform, zipf = routed(cases.uniform), routed(cases.zipf)
    assert uniform.sum() == zipf.sum() == SHAPE.num_rows
    assert zipf.argmax() == 0
    assert zipf.max() > 2 * uniform.max()


def test_moe_layer_rows(monkeypatch):
    monkeypatch.setattr(cases, "SHAPES", (SHAPE,))
    monkeypatch.setattr(cases, "DIRECTIONS", {"forward": jax.jit})
    monkeypatch.setattr(moe_layer, "MAX_ROUNDS", 3)
    (row,) = moe_layer.run()
    assert (row["T"], row["E"], row["rounds"]) == (64, 16, 3)
    assert min(row[name] for name in ("plain_seconds", "capacity", "dropless", "dropless_worst", "worst_over_even")) > 0


def test_rounds_follow_the_work():
    assert [moe_layer.rounds(shape) for shape in cases.SHAPES] == [19, 19, 5]


def test_ragged_layer_rows(monkeypatch):
    """Its outputs and gradients are compared inside."""
    monkeypatch.setattr(ragged_layer, "SHAPES", (SHAPE,))
    monkeypatch.setattr(cases, "DIRECTIONS", {"forward+backward": cases.with_gradients})
    monkeypatch.setattr(ragged_layer, "ROUNDS", 3)
    (row,) = ragged_layer.run()
    assert row["ratio"] > 0


def test_torch_layer_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(torch_layer, "PACKAGES", ("no_such_package", "jax"))
    assert (torch_layer.unavailable() or "").startswith("no no_such_package here: install")


def test_torch_layer_rows(monkeypatch):
    if torch_layer.unavailable():
        pytest.skip("the extra `bench` is not installed")
    monkeypatch.setattr(cases, "SHAPES", (SHAPE,))
    monkeypatch.setattr(torch_layer, "ROUNDS", 3)
    assert [row["direction"] for row in torch_layer.run()] == ["forward", "forward+backward"]


def test_memory_rows(monkeypatch):
    """Counted without running anything."""
    bytes_of = {1024: 40_000_000, 4096: 120_000_000}
    monkeypatch.setattr(memory_tokens, "NUM_TOKENS", tuple(bytes_of))
    monkeypatch.setattr(memory_tokens, "LAYERS", {"dropless": cases.DROPLESS})
    monkeypatch.setattr(memory_tokens, "_temp_bytes", lambda name, shape: bytes_of[shape.num_tokens])
    small, large = memory_tokens.run()
    assert large["over_rows"] == pytest.approx(120_000_000 / (4096 * 4 * 2 * (256 + 512)))
    assert (small["a_token_over_least"], large["a_token_over_least"]) == (pytest.approx(4 / 3), 1)


@pytest.fixture
def few_ways(monkeypatch):
    """Two ways across one mesh, at a small shape."""
    ways = {
        "cells": {"exchange": "all_to_all"},
        "pools": {"capacity": "pool"},
        "none": {"capacity": "pool", "exchange": "ragged"},
    }
    monkeypatch.setattr(exchanges, "SHAPES", (SHAPE,))
    monkeypatch.setattr(exchanges, "MESHES", {"expert 8": exchanges.Setting({"expert": 8})})
    monkeypatch.setattr(exchanges, "WAYS", {"expert 8": ways})
    monkeypatch.setattr(exchanges, "ROUNDS", 3)
    monkeypatch.setattr(cases, "DIRECTIONS", {"forward": jax.jit})


def test_exchanges_rows(few_ways, monkeypatch):
    """What is measured, what is counted, and what is left out for which reason; the outputs are compared inside."""
    monkeypatch.setattr(exchanges, "LOADS", {"zipf": (cases.zipf, None)})
    cells, pools, none = exchanges.rows()
    assert cells["products"] == pytest.approx(8, rel=0.02)  # a cell as long as the sender's tokens, and the router
    assert cells["ratio"] > 0
    assert pools["products"] is None
    assert pools["ratio"] > 0
    assert none["ratio"] is None
    assert "exchange" in none["left_out"]
    assert set(cells) == set(pools) == set(none)


def test_exchanges_leave_out_what_is_mostly_padding(few_ways, monkeypatch):
    monkeypatch.setattr(exchanges, "LOADS", {"uniform": (cases.uniform, 1.25)})
    monkeypatch.setattr(exchanges, "MAX_PRODUCTS", 1.2)
    cells, pools, _ = exchanges.rows()
    assert cells["ratio"] is None
    assert cells["left_out"] == "more than 1.2 times the true products"
    assert pools["ratio"] > 0


def test_exchanges_know_every_way():
    known = {settings["exchange"] for ways in exchanges.WAYS.values() for settings in ways.values() if "exchange" in settings}
    assert known == set(config.EXCHANGES) - {"auto"}


def test_compiled_layer_rows(monkeypatch):
    """The whole benchmark at a small shape for the target that every machine can compile for."""
    shape = {"d_model": 16, "d_ff": 32, "num_experts": 8, "top_k": 1, "dtype": "float32"}
    monkeypatch.setattr(compiled_layer, "TARGETS", ("cpu:2",))
    monkeypatch.setattr(compiled_layer, "SHAPES", {"small": shape})
    monkeypatch.setattr(compiled_layer, "SETTINGS", {"all_to_all": {}})
    assert compiled_layer.unavailable() is None
    bare, layer = compiled_layer.run()
    cells = 8 * 640  # rows of one device: 1.25 * 4096 tokens / 8 experts from each of two senders, for four experts
    assert (bare["program"], layer["program"]) == ("bare product", "all_to_all")
    assert bare["dot_tflop"] * 1e12 == pytest.approx(3 * 3 * 2 * cells * 16 * 32)
    assert layer["dot_tflop"] * 1e12 == pytest.approx(3 * 3 * 2 * cells * 16 * 32 + 3 * 2 * 4096 * 16 * 8)
    assert "4 all-to-all" in layer["collectives"]
    assert layer["wire_mb"] - bare["wire_mb"] == pytest.approx(4 * cells * 16 * 4 / 2 / 1e6, rel=0.01)
    assert layer["temp_gib"] > bare["temp_gib"] > 0
    assert set(bare) == set(layer)


def test_compiled_layer_needs_its_compilers(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEJAX_AOT_PYTHON", str(tmp_path / "none"))
    assert str(tmp_path / "none") in (compiled_layer.unavailable() or "")


def test_balance_rows(monkeypatch):
    """Small, and the figures are those of the rows: what is drawn by popularity, what the trace has."""
    monkeypatch.setattr(balance, "TOKENS_A_DEVICE", 64)
    monkeypatch.setattr(balance, "MICROBATCHES", 2)
    monkeypatch.setattr(balance, "GROUPS", (4,))
    monkeypatch.setattr(balance, "DYN", (2,))
    monkeypatch.setattr(balance, "LOADS", {name: balance.LOADS[name] for name in ("log-normal, steady", "demo trace")})
    rows = balance.run()
    assert len(rows) == 2 * (1 + 4 + 4)
    nothing, *others = rows[:9]
    assert (nothing["rule"], nothing["removed_percent"], nothing["lent_mb"]) == ("none", 0, 0)
    assert all(row["straggler_rows"] <= nothing["straggler_rows"] for row in others)
    assert [row["rule"] for row in others if not row["lent_mb"]] == ["EPLB", "FlexMoE"]
    assert {row["rule"] for row in others if row["moved_mb"]} >= {"EPLB", "EPLB + divide, hot, dyn 4"}
    assert others[0]["lanes_mb"] == 3 * 2 * 3 * 2048 * 1024 * 2 / 1e6


def test_overlapped_rows(monkeypatch):
    """The gather of the weights and the sum of their gradients become parts that go round a ring."""
    shape = {"d_model": 16, "d_ff": 32, "num_experts": 4, "top_k": 1, "dtype": "float32"}
    monkeypatch.setattr(overlapped, "TARGETS", ("cpu:8",))
    monkeypatch.setattr(overlapped, "SHAPE", shape)
    monkeypatch.setattr(overlapped, "MESHES", {"fsdp4": {"fsdp": 4, "expert": 2}})
    plain, ring = overlapped.run()
    assert (plain["overlap"], ring["overlap"]) == (False, True)
    assert "collective-permute" not in plain["collectives"]
    assert "collective-permute" in ring["collectives"]
    assert "all-gather" not in ring["collectives"]
    assert ring["dot_tflop"] >= plain["dot_tflop"] > 0
    assert (ring["pairs"], ring["beside"]) == (0, 0)  # the CPU's collectives are synchronous


def test_ranks_share_what_is_equal():
    assert schedules.rank_correlation([1.0, 2.0, 2.0, 5.0], [0.1, 0.2, 0.2, 9.0]) == pytest.approx(1)
    assert schedules.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)


def test_every_schedule_is_measured_beside_the_ideal():
    first, *others = schedules.settings()
    assert (first.name, first.layers * schedules.STAGES) == ("ideal", schedules.LAYERS)
    assert {setting.name.removesuffix(" split") for setting in others} == set(MAKERS)


def test_a_schedules_step_is_the_layers_loss(monkeypatch):
    monkeypatch.setattr(schedules, "LAYERS", 2)
    for name in ("TOKENS", "WIDTH", "HIDDEN"):
        monkeypatch.setattr(schedules, name, 4)
    table = schedules.Setting("gpipe", make_schedule("gpipe", PipelineShape(2, schedules.MICROBATCHES)), 2)
    program, (params, inputs) = schedules.step(table)
    x = inputs["x"]
    for n in range(2):
        x, _, _ = schedules.layer({name: leaf[n] for name, leaf in params.layers[0].items()}, None, x, None)
    np.testing.assert_allclose(program(params, inputs).loss, jnp.square(x).mean((1, 2)).sum(), rtol=1e-5)
