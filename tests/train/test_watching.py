"""Alarms, the metrics file, the picture."""

import io
import json

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from train.alarms import Alarms, not_finite
from train.config import AlarmConfig
from train.metrics import Display, MetricsLog, read_metrics, worst_load
from train.plot import plot_run
from train.report import load_lines


def step(tokens, dropped=0.0):
    return {"tokens_per_expert": np.array(tokens), "dropped_fraction": np.float32(dropped)}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"loss": 1.0, "grad_norm": 2.0}, None),
        ({"loss": np.float32("nan"), "grad_norm": 2.0}, "loss is nan"),
        ({"loss": 1.0, "grad_norm": np.float32("inf")}, "grad_norm is inf"),
    ],
)
def test_what_is_not_finite_is_named(metrics, said):
    assert not_finite(metrics) == said


def test_drops_ring_once_until_they_end():
    alarms = Alarms(AlarmConfig(dropped_fraction=0.2))
    rung = [alarms.check(step([[1, 1]], fraction)) for fraction in (0.1, 0.3, 0.4, 0.15, 0.5)]
    assert [len(new) for new in rung] == [0, 1, 0, 0, 1]
    assert rung[1] == ["30.0% of the assignments were dropped (alarm above 20.0%)"]


def test_an_expert_is_dead_after_steps_in_a_row_without_a_token():
    alarms = Alarms(AlarmConfig(dead_expert_steps=3))
    loads = [[[0, 5], [5, 0]], [[0, 5], [5, 0]], [[1, 4], [5, 0]], [[0, 5], [5, 0]], [[0, 5], [1, 4]], [[0, 5], [5, 0]]]
    rung = [alarms.check(step(load)) for load in loads]
    assert rung == [
        [],
        [],
        ["expert 1 of MoE layer 1 took no token for 3 steps"],
        [],
        [],
        ["expert 0 of MoE layer 0 took no token for 3 steps"],
    ]


def test_a_dense_model_rings_for_nothing():
    assert Alarms(AlarmConfig()).check({"loss": 1.0}) == []


def test_metrics_of_steps_that_are_run_again_are_dropped(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for number in range(1, 6):
        log.write("train", number, {"loss": np.float32(number / 3), "tokens_per_expert": np.eye(2, dtype=int)})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "kind": "tr')
    log = MetricsLog(tmp_path, 3)
    log.write("train", 4, {"loss": 9.0})
    log.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert np.float32(lines[0]["loss"]) == np.float32(1 / 3)
    assert lines[0]["tokens_per_expert"] == [[1, 0], [0, 1]]
    assert lines[3] == {"schema": 1, "kind": "train", "step": 4, "loss": 9.0}
    assert any((tmp_path / "tensorboard").iterdir())


def test_the_worst_load_is_over_its_own_layers_mean():
    assert worst_load(np.array([[2, 2, 2, 2], [0, 30, 10, 0]])) == 3.0


def test_without_a_terminal_steps_are_plain_lines():
    out = io.StringIO()
    values = {"loss": 1.25, "tokens_per_second": 12345.6, "dropped_fraction": 0.01, "worst_load": 1.5}
    with Display(Console(file=out, width=60), 100) as display:
        display.start(0)
        display.show(10, values, 125)
    assert out.getvalue() == "step 10/100  loss 1.250  12,346 tok/s  drops 1.0%  worst load 1.50x  ETA 2:05\n"


def test_on_a_terminal_there_is_a_bar():
    out = io.StringIO()
    values = {"loss": 1.25, "tokens_per_second": 12345.6, "dropped_fraction": 0.01, "worst_load": 1.5}
    with Display(Console(file=out, width=120, force_terminal=True), 100) as display:
        display.start(0)
        display.show(10, values, 125)
    assert "10/100" in out.getvalue()
    assert "drops 1.0%  worst load 1.50x" in out.getvalue()
    assert "ETA" in out.getvalue()


def metrics_of(moe):
    load = {"tokens_per_expert": [[3, 1], [2, 2]], "dropped_fraction": 0.1} if moe else {}
    lines = [{"kind": "train", "step": n, "loss": 3 / n, **load} for n in range(1, 20)]
    return [
        *lines,
        {"kind": "eval", "step": 19, "loss": 1.0, "bits_per_byte": 1.5},
        {"kind": "final", "step": 19, "bigram_bits_per_byte": 3.0, "trigram_bits_per_byte": 2.5},
    ]


@pytest.mark.parametrize("moe", [True, False])
def test_the_picture_is_a_png(moe, tmp_path):
    plot_run(metrics_of(moe), tmp_path / "plot.png", "a run")
    picture = matplotlib.image.imread(tmp_path / "plot.png")
    assert picture.shape[1] == 1200
    assert picture.std() > 0.05


def test_loads_are_shares_of_an_even_split():
    lines = load_lines(metrics_of(True))
    assert "1.50" in lines[1]
    assert "0.50" in lines[1]
    assert lines[2].count("1.00") == 2
    assert load_lines(metrics_of(False)) == []
    assert json.dumps(lines, ensure_ascii=False).count("MoE layer") == 2
