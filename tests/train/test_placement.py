"""Experts that move while a run goes on: where it pays, and so that a resumed run moves the same ones."""

import string

import numpy as np
import pytest

from layouts.routing_trace import RoutingTrace
from tests.train.conftest import Base, losses
from train.config import PlacementConfig, check_config
from train.configs import get_config
from train.errors import InputError
from train.metrics import read_metrics
from train.overrides import apply_overrides

WORDS = (
    "tiny", "data.held_out=0.15", "mesh.expert=4", "steps=12", "checkpoint.every=3", "checkpoint.keep=10",
    "sample.num_tokens=0", "eval.trace_tokens=64", "model.moe.num_slots=12", "placement.every=4",
    "placement.bytes_per_second=1e30",
)  # fmt: skip


@pytest.fixture(scope="module")
def moved(corpus, tmp_path_factory):
    """A run whose moves cost nothing."""
    made = Base((*WORDS, f"data.corpus={corpus}", "log_every=1"), tmp_path_factory.mktemp("moved") / "run")
    assert made.run(made.folder) == 0
    return made


def moves(folder):
    """The lines of the metrics that say what was moved."""
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "placement"]


def test_experts_move_to_even_the_devices(moved):
    found = moves(moved.folder)
    assert [line["step"] for line in found] == [4, 8, 12]
    assert sum(found[0]["moved"]) > 0
    for line in found:
        for before, after, slots in zip(line["load_before"], line["load_after"], line["moved"], strict=True):
            assert after < before if slots else after == before
    assert max(found[0]["load_after"]) < 1.1


def test_a_resumed_run_moves_the_same_experts(moved, tmp_path):
    """From between two moves, with loads of before the stop in its history."""
    again = moved.copy(tmp_path / "again", 6)
    assert moved.run(again, "--resume", "must") == 0
    assert losses(again) == losses(moved.folder)
    assert moves(again) == moves(moved.folder)


def test_a_run_records_its_routing(moved):
    trace = RoutingTrace.load(moved.folder / "routing.npz")
    assert trace.step.tolist() == [10, 12]
    assert trace.expert.shape[-2:] == (64, 2)
    assert (trace.loads().sum(-1) == 2 * (trace.token >= 0).sum(1)[:, None]).all()
    letters = np.isin(trace.token, list(string.ascii_letters.encode()))
    named = np.array(trace.domain_names)[trace.domain[letters]]
    assert set(named) == {"letters"}, bytes(trace.token[trace.token >= 0].astype(np.uint8))
    assert (moved.folder / "routing.png").exists()
    assert "const data" in (moved.folder / "routing.html").read_text()


def test_moving_needs_slots():
    with pytest.raises(InputError, match=r"^placement.every=4: needs model.moe.num_slots, or 0"):
        check_config(apply_overrides(get_config("tiny"), ["placement.every=4"]))
    with pytest.raises(ValueError, match=r"^decay=1: needs a number of at least 0 and below 1"):
        PlacementConfig(decay=1)
    with pytest.raises(ValueError, match=r"^horizon_steps=0: needs a finite number above 0"):
        PlacementConfig(horizon_steps=0)
