"""layouts.calibrate: constants that made the steps come back, and steps left out are foretold."""

import dataclasses
import json

import pytest

from layouts.__main__ import main
from layouts.calibrate import CONSTANTS, Step, calibrate, predict
from layouts.clusters import parse_cluster
from layouts.cost import DEFAULTS
from layouts.layout import Layout
from layouts.presets import load_model
from layouts.request import read_efficiency
from layouts.search import Problem
from layouts.workload import MOEJAX, Batch

FLOAT32 = dataclasses.replace(MOEJAX, compute_bytes=4)
PROBLEM = Problem(load_model("demo"), Batch(256, 16), parse_cluster("cpu:8"), FLOAT32, "fp32")
LAYOUTS = [Layout(data=8), Layout(expert=8), Layout(fsdp=8), Layout(data=4, tensor=2), Layout(data=2, expert=4, remat="full")]


def measured(**factors: float) -> list[Step]:
    """Steps as they would take with those factors on the constants."""
    truth = DEFAULTS["cpu"]
    for name, factor in factors.items():
        truth = CONSTANTS[name](truth, factor)
    return [Step(layout, predict(PROBLEM, truth, layout)) for layout in LAYOUTS]


@pytest.mark.parametrize("factors", [{"product": 0.5}, {"memory": 0.4, "fabric": 0.5}])
def test_what_made_the_steps_comes_back(factors):
    steps = measured(**factors)
    found = calibrate(PROBLEM, steps)
    before = [abs(predict(PROBLEM, DEFAULTS["cpu"], step.layout) / step.seconds - 1) for step in steps]
    assert max(map(abs, found.errors)) < 0.12
    assert max(before) > 0.2
    assert found.left_out_error < 0.1


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "steps.jsonl", tmp_path / "fitted.json"
    path.write_text("\n".join(json.dumps({"layout": s.layout.to_json(), "seconds": s.seconds}) for s in measured(product=0.5)))
    ask = ["--model", "demo", "--cluster", "cpu:8", "--seq", "256", "--global-batch", "4096"]
    assert main(["calibrate", str(path), *ask, "--json", str(out)]) == 0
    assert "of steps left out of the fit" in capsys.readouterr().out
    assert read_efficiency(str(out)).product == pytest.approx(DEFAULTS["cpu"].product / 2, rel=0.3)
    for text, message in (
        ("", "has 0 steps; needs at least 3"),
        ('{"layout": {"schema": 1, "mesh": {}}}', "line 1: 'seconds'"),
        ('{"layout": {"schema": 1, "mesh": {}}, "seconds": -1}', "line 1: seconds=-1: needs a number above 0"),
        ('{"layout": {"schema": 2, "mesh": {}}, "seconds": 1}', "line 1: layout of schema 2"),
    ):
        path.write_text(text)
        assert main(["calibrate", str(path), *ask]) == 2
        assert message in capsys.readouterr().err
