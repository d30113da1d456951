"""Runs that are stopped, killed or moved to another mesh reach the losses of the run that was not."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from moejax.step import make_train_step
from tests.conftest import ROOT
from tests.train.conftest import STEPS, losses
from tests.train.flips import first_flip, make_choices
from tests.train.test_checkpoint import begun
from train.checkpoint import saved_steps
from train.config import RULES
from train.data import place_batch
from train.metrics import read_metrics
from train.optimizer import make_optimizer


def stop_after(base, folder, step, number):
    """Runs the base's command line in a process of its own and sends it a signal when it has logged `step`.

    Returns:
      (exit code, stdout).
    """
    words = [sys.executable, "-m", "train", *base.words, f"run_dir={folder}"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if max(map_steps(folder), default=0) >= step:
                os.kill(process.pid, number)
                break
            time.sleep(0.002)
        else:
            process.kill()
        return process.wait(timeout=120), process.stdout.read()


def map_steps(folder):
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def test_a_run_killed_at_a_random_step_and_resumed_is_bit_equal(base, tmp_path):
    # When step 11 is logged, the save of step 10 has begun, so that of step 5 is complete.
    step = random.SystemRandom().randrange(11, STEPS - 3)
    folder = tmp_path / "run"
    code, out = stop_after(base, folder, step, signal.SIGKILL)
    assert code == -signal.SIGKILL, f"to be killed at step {step}: {out}"
    done = max(map_steps(folder))
    assert base.run(folder, "--resume", "must") == 0
    assert losses(folder) == losses(base.folder), f"killed after step {done}"


def test_a_run_stopped_by_sigterm_saves_exits_with_0_and_resumes_bit_equal(base, tmp_path, capsys):
    folder = tmp_path / "run"
    code, out = stop_after(base, folder, 7, signal.SIGTERM)
    assert code == 0, out
    stopped = max(map_steps(folder))
    assert f"stopped by SIGTERM after step {stopped}; saved in" in out
    assert 7 <= stopped < STEPS
    assert saved_steps(folder / "checkpoints")[-1] == stopped
    assert base.run(folder, "--resume", "must") == 0
    assert f"resumed from step {stopped}" in capsys.readouterr().out
    assert losses(folder) == losses(base.folder)


def twenty_steps(base, folder, **mesh):
    """From step 5 on another mesh: (losses [20], experts chosen [20, layers, tokens, k], whether any was dropped)."""
    run, _ = begun(base, folder, "must", **mesh)
    choices, state, found, chosen = make_choices(run.cfg.model), run.state, [], []
    with jax.set_mesh(run.mesh):
        step = jax.jit(make_train_step(run.cfg.model, make_optimizer(run.cfg), 1, RULES), donate_argnums=0)
        for _ in range(20):
            rows = next(run.batches)
            # Padding routes nowhere: -1 stands for it.
            real = (rows["segment_ids"] > 0).reshape(1, -1, 1)
            chosen.append(np.where(real, choices(state, rows), -1))
            state, metrics = step(state, place_batch(rows, run.mesh))
            found.append(jax.device_get(metrics))
    assert not any(metrics["dropped"].any() for metrics in found)
    return [float(metrics["loss"]) for metrics in found], np.stack(chosen)


@pytest.fixture(scope="module")
def on_four(base, tmp_path_factory):
    return twenty_steps(base, base.copy(tmp_path_factory.mktemp("four") / "run", up_to=5), expert=4)


def test_on_the_same_mesh_twenty_steps_are_bit_equal(base, on_four):
    uninterrupted = losses(base.folder)
    assert on_four[0] == [uninterrupted[step] for step in range(6, 26)]


@pytest.mark.parametrize("expert", [8, 1])
def test_on_another_mesh_twenty_steps_agree_to_1e_5(base, on_four, tmp_path, expert):
    found, chosen = twenty_steps(base, base.copy(tmp_path / "run", up_to=5), expert=expert)
    report = first_flip(chosen, on_four[1], first_step=6)
    np.testing.assert_allclose(found, on_four[0], rtol=1e-5, err_msg=report)


def test_the_choices_are_those_that_the_run_counted(base, on_four):
    counted = [line for line in read_metrics(base.folder / "metrics.jsonl") if line["kind"] == "train"][5:25]
    for chosen, line in zip(on_four[1], counted, strict=True):
        counts = [np.bincount(layer[layer >= 0], minlength=8).tolist() for layer in chosen]
        assert counts == line["tokens_per_expert"]


def test_the_first_flip_is_named():
    here = np.tile(np.array([0, 1]), (3, 2, 5, 1))
    there = here[..., ::-1].copy()
    assert first_flip(here, there) == "no routing choice differs"
    there[1, 1, 3] = [0, 7]
    there[2, 0, 0] = [5, 6]
    assert first_flip(here, there, first_step=6) == (
        "first routing choice that differs: step 7, MoE layer 1, token 3: experts [0, 1] here, [0, 7] there; "
        "1 choices differ in that step"
    )


def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_checkpoint(base, tmp_path, capsys):
    folder = base.copy(tmp_path / "run", up_to=10)
    code = base.run(folder, "optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint.every=1")
    err = capsys.readouterr().err
    assert code == 1
    assert "stopped; the last good checkpoint is step" in err
    assert err.count("\n") == 1
    alarm = read_metrics(folder / "metrics.jsonl")[-1]
    assert alarm["kind"] == "alarm"
    assert f"{alarm['what']} at step {alarm['step']}" in err
    assert 10 in saved_steps(folder / "checkpoints")
    assert alarm["step"] not in saved_steps(folder / "checkpoints")
