"""The benchmarks' harness: what is timed when, what a ratio is, and what is written."""

import importlib
import json
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import compiled_layer, harness
from benchmarks.__main__ import NAMES


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
    modules = {path.stem for path in Path(harness.__file__).parent.glob("*.py")} - {"__init__", "__main__", "harness"}
    assert modules == set(NAMES)


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
