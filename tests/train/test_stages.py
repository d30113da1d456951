"""Runs over pipeline stages: the losses of a run without them, also through a checkpoint that moves from one to the other."""

import re

import pytest

import train.__main__ as command
from tests.train.conftest import Base, losses
from train.metrics import read_metrics

STEPS, HALF = 20, 10
STAGES = ("mesh.stage=2", "mesh.expert=2", "pipeline.schedule=zeropp", "pipeline.chunks=2", "pipeline.unit=2")


@pytest.fixture(scope="module")
def words(corpus):
    """What both runs have in common: 4 layers, 4 micro-batches, nothing dropped."""
    return (
        "tiny",
        "model.num_layers=4",
        "num_microbatches=4",
        f"data.corpus={corpus}",
        "data.held_out=0.15",
        f"steps={STEPS}",
        f"checkpoint.every={HALF}",
        "eval.every=0",
        "sample.num_tokens=4",
    )


def run(folder, *words):
    assert command.main([*words, f"run_dir={folder}"]) == 0
    return Base(words, folder)


@pytest.fixture(scope="module")
def plain(words, tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain") / "run", *words, "mesh.expert=2")


@pytest.fixture(scope="module")
def staged(words, tmp_path_factory):
    return run(tmp_path_factory.mktemp("staged") / "run", *words, *STAGES)


def assert_same(got, want):
    assert len(got) == STEPS
    for step, loss in want.items():
        assert abs(got[step] - loss) <= 1e-4 * loss, (step, got[step], loss)


def final(folder):
    return next(line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "final")["bits_per_byte"]


def test_stages_change_no_loss(plain, staged):
    assert_same(losses(staged.folder), losses(plain.folder))
    assert abs(final(staged.folder) / final(plain.folder) - 1) < 1e-4


def test_a_checkpoint_moves_into_stages(plain, staged, tmp_path, capsys):
    folder = plain.copy(tmp_path / "run", HALF)
    assert command.main([*staged.words, f"run_dir={folder}", "--resume", "must"]) == 0
    assert "another order of pipeline stages: moving them" in capsys.readouterr().out
    assert_same(losses(folder), losses(plain.folder))


def test_a_checkpoint_moves_out_of_stages(plain, staged, tmp_path):
    folder = staged.copy(tmp_path / "run", HALF)
    assert command.main([*plain.words, f"run_dir={folder}", "--resume", "must"]) == 0
    assert_same(losses(folder), losses(plain.folder))


def test_stages_resume_bit_equal(staged, tmp_path, capsys):
    folder = staged.copy(tmp_path / "run", HALF)
    assert command.main([*staged.words, f"run_dir={folder}", "--resume", "must"]) == 0
    assert "moving them" not in capsys.readouterr().out
    assert losses(folder) == losses(staged.folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mesh.stage=2"], "pipeline.schedule='none' with mesh.stage=2: legal are gpipe, 1f1b"),
        (["pipeline.schedule=gpipe"], "pipeline.schedule='gpipe' with mesh.stage=1: settings of a pipeline need stages"),
        (["mesh.stage=2", "pipeline.schedule=zerop"], "schedule 'zerop': legal are gpipe.*did you mean zeropp"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "pipeline.chunks=2"], "gpipe with chunks=2: legal chunks a stage are 1"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "pipeline.unit=2"], "gpipe with unit=2: only zeropp takes a unit"),
        (["mesh.stage=2", "pipeline.schedule=zeropp", "pipeline.unit=0"], "unit=0: needs a whole number of at least 1"),
        (["mesh.stage=2", "pipeline.schedule=zeropp", "pipeline.split=true"], "zeropp with split=True: only gpipe"),
        (["mesh.stage=2", "pipeline.schedule=zeropp", "pipeline.chunks=2"], "4 parts of 2 layers: .*legal are up to 2 parts"),
        (
            ["mesh.stage=3", "model.num_layers=3", "pipeline.schedule=dualpipe", "num_microbatches=8"],
            "stages=3: needs an even number",
        ),
        (["mesh.stage=2", "pipeline.schedule=dualpipe", "num_microbatches=2"], "microbatches=2: legal are even numbers from 4"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "pipeline.cuts=(2,1)"], "cuts=\\(2, 1\\): add up to 3, the model has 2"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "model.overlap=true"], "overlap=True: .*legal is False"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "model.remat=offload"], "remat='offload': .*legal are 'none', 'full'"),
        (
            ["mesh.stage=2", "pipeline.schedule=gpipe", "model.moe.loss_scope=batch"],
            "loss_scope='batch': .*first backward",
        ),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "model.moe.jitter=0.1"], "jitter=0.1: a pipeline has no random numbers"),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "model.moe.num_slots=9"], "num_slots=9: .*legal is None"),
        (
            ["mesh.stage=2", "pipeline.schedule=gpipe", "num_microbatches=4", "microbatch_overlap=2"],
            "microbatch_overlap=2: in a pipeline the schedule overlaps them; legal is 1",
        ),
        (["mesh.stage=2", "pipeline.schedule=gpipe", "eval.trace_tokens=64"], "eval.trace_tokens=64: .*legal are 0 and none"),
    ],
)
def test_impossible_pipelines_are_refused_before_any_device_work(words, message, capsys):
    assert command.main(["tiny", *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
