"""Checkpoints: what comes back is what was saved, on any mesh, or it does not come back."""

import io
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from moejax import make_mesh
from moejax.step import make_train_step
from tests.train.conftest import losses
from train.checkpoint import Checkpoints, find_good, saved_steps
from train.config import RULES
from train.configs import get_config
from train.data import place_batch
from train.errors import InputError
from train.manifest import check_manifest
from train.metrics import Display
from train.optimizer import make_optimizer
from train.overrides import apply_overrides
from train.run import abstract_run_state, begin, load_text


def begun(base, folder, resume, **mesh):
    """The base's run, begun in a folder on another mesh; what it said."""
    words = [*base.words[1:], *(f"mesh.{name}={size}" for name, size in mesh.items())]
    cfg = apply_overrides(get_config(base.words[0]), words)
    out = io.StringIO()
    with jax.set_mesh(make_mesh(**cfg.mesh.sizes)):
        run = begin(cfg, folder, load_text(cfg), Display(Console(file=out), cfg.steps), resume)
    run.checkpoints.close()
    run.log.close()
    return run, out.getvalue()


def assert_equal_states(left, right):
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(one, other)


def only_step(folder, step):
    """Path of a checkpoint and of its manifest."""
    return folder / "checkpoints" / str(step), folder / "manifests" / f"{step}.json"


def test_the_newest_are_kept_and_each_has_a_manifest(base, tmp_path):
    assert saved_steps(base.folder / "checkpoints") == [5, 10, 15, 20, 25, 30]
    assert base.run(tmp_path / "run", "steps=8", "checkpoint.every=2", "checkpoint.keep=2") == 0
    assert saved_steps(tmp_path / "run" / "checkpoints") == [6, 8]
    for folder, steps in ((base.folder, range(5, 31, 5)), (tmp_path / "run", (6, 8))):
        assert all(check_manifest(*only_step(folder, step)) is None for step in steps)


def test_a_checkpoint_saved_while_training_went_on_is_the_state_at_its_step(base, tmp_path):
    restored, said = begun(base, base.copy(tmp_path / "run", up_to=5), "must")
    assert "resumed from step 5" in said
    assert (restored.step, int(restored.state.step)) == (5, 5)
    fresh, _ = begun(base, tmp_path / "fresh", "auto")
    assert (fresh.step, int(fresh.state.step)) == (0, 0)
    state, cfg = fresh.state, fresh.cfg
    with jax.set_mesh(fresh.mesh):
        step = jax.jit(make_train_step(cfg.model, make_optimizer(cfg), 1, RULES), donate_argnums=0)
        for _ in range(5):
            state, _ = step(state, place_batch(next(fresh.batches), fresh.mesh))
    assert_equal_states(restored.state, state)
    np.testing.assert_array_equal(next(restored.batches)["tokens"], next(fresh.batches)["tokens"])


@pytest.mark.parametrize("mesh", [{"expert": 8}, {"expert": 1}, {"expert": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_the_same_state_comes_back_on_another_mesh(base, tmp_path, mesh):
    folder = base.copy(tmp_path / "run")
    before, _ = begun(base, folder, "must")
    after, _ = begun(base, folder, "must", **mesh)
    assert_equal_states(before.state, after.state)
    experts = [leaf for path, leaf in jax.tree.leaves_with_path(after.state.params) if "expert_up" in str(path)]
    expected = (2, 8 // mesh["expert"], 16 // mesh.get("fsdp", 1), 32 // mesh.get("tensor", 1))
    assert [leaf.sharding.shard_shape(leaf.shape) for leaf in experts] == [expected]


def test_a_step_that_is_saved_or_restored_already_is_not_saved_again(base, tmp_path):
    folder = base.copy(tmp_path / "run", up_to=5)
    run, _ = begun(base, folder, "must")
    checkpoints = Checkpoints(folder, keep=10)
    state = checkpoints.restore(5, abstract(run)).state
    for step in (5, 6, 6):
        checkpoints.save(step, state, {"next_index": step}, {})
    checkpoints.close()
    assert saved_steps(folder / "checkpoints") == [5, 6]
    assert find_good(folder, print) == 6


def abstract(run):
    with jax.set_mesh(run.mesh):
        return abstract_run_state(run.cfg)


def test_one_flipped_byte_anywhere_is_found(base, tmp_path):
    checkpoint, manifest = only_step(base.copy(tmp_path / "run"), 30)
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) >= 5
    for number, path in enumerate(files):
        content = path.read_bytes()
        place = number * 7919 % len(content)
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "whose checksum is not the one written" in check_manifest(checkpoint, manifest)
        assert path.name in check_manifest(checkpoint, manifest)
        path.write_bytes(content)
    assert check_manifest(checkpoint, manifest) is None


def flip(checkpoint, manifest):
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-9] + bytes([content[-9] ^ 128]) + content[-8:])


def truncate(checkpoint, manifest):
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def lose_a_file(checkpoint, manifest):
    next(path for path in checkpoint.rglob("*") if path.is_file()).unlink()


def lose_the_state(checkpoint, manifest):
    shutil.rmtree(checkpoint / "state")


def lose_the_manifest(checkpoint, manifest):
    manifest.unlink()


def cut_the_manifest(checkpoint, manifest):
    manifest.write_text(manifest.read_text()[:-20])


DAMAGES = [
    (flip, "checksum is not the one written"),
    (truncate, "were written"),
    (lose_a_file, "lacks the file"),
    (lose_the_state, "lacks the file"),
    (lose_the_manifest, "its save did not finish"),
    (cut_the_manifest, "damaged manifest"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over_and_said_so(base, tmp_path, damage, said):
    folder, lines = base.copy(tmp_path / "run"), []
    damage(*only_step(folder, 30))
    damage(*only_step(folder, 25))
    assert find_good(folder, lines.append) == 20
    assert len(lines) == 2
    assert said in lines[0]
    assert "going back to step 20" in lines[0]
    assert saved_steps(folder / "checkpoints") == [5, 10, 15, 20]
    assert saved_steps(folder / "damaged") == [25, 30]


def test_a_run_goes_on_from_before_the_damage_and_saves_again(base, tmp_path, capsys):
    folder = base.copy(tmp_path / "run")
    flip(*only_step(folder, 30))
    assert base.run(folder) == 0
    out = capsys.readouterr().out
    assert "checkpoint 30 has a file" in out
    assert "resumed from step 25" in out
    assert losses(folder) == losses(base.folder)
    assert check_manifest(*only_step(folder, 30)) is None


def test_when_none_is_whole_the_run_refuses_in_one_line(base, tmp_path, capsys):
    folder = base.copy(tmp_path / "run", up_to=10)
    for step in (5, 10):
        truncate(*only_step(folder, step))
    before = sorted(path for path in folder.rglob("*"))
    for resume in ("auto", "must"):
        assert base.run(folder, "--resume", resume) == 2
        err = capsys.readouterr().err
        assert "is whole: 10 has a file" in err
        assert "--resume never" in err
        assert err.count("\n") == 1
    assert sorted(path for path in folder.rglob("*")) == before
    with pytest.raises(InputError):
        find_good(folder, print)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["model.d_model=32"], ["embedding float32[264, 16] there, float32[264, 32] here", "and"]),
        (["model.moe.router=sigmoid_bias"], ["bias absent there, float32[2, 8] here"]),
        (["model.param_dtype=bfloat16"], ["float32[264, 16] there, bfloat16[264, 16] here"]),
    ],
    ids=lambda value: value[0],
)
def test_a_checkpoint_of_another_model_is_refused_naming_what_differs(base, tmp_path, capsys, change, said):
    folder = base.copy(tmp_path / "run")
    assert base.run(folder, *change) == 2
    err = capsys.readouterr().err
    assert "is another model's" in err
    assert all(part in err for part in said)
    assert err.count("\n") == 1
    assert saved_steps(folder / "checkpoints") == [5, 10, 15, 20, 25, 30]


def test_other_text_is_said(base, tmp_path):
    folder = base.copy(tmp_path / "run", up_to=5)
    words = (*base.words, "seed=3")
    assert "going on at the same batch of the new one" in begun(type(base)(words, base.folder), folder, "must")[1]


def test_resume_never_keeps_the_earlier_run(base, tmp_path, capsys):
    folder = base.copy(tmp_path / "run")
    (tmp_path / "run.1").mkdir()
    assert base.run(folder, "steps=5", "--resume", "never") == 0
    assert "the earlier run is kept in" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run.2" / "checkpoints")[-1] == 30
    assert losses(tmp_path / "run.2") == losses(base.folder)
    assert sorted(losses(folder)) == [1, 2, 3, 4, 5]


def test_what_is_saved_beside_the_state_can_be_read_without_it(base):
    about = json.loads(next((base.folder / "checkpoints" / "30" / "about").glob("metadata")).read_text())
    assert about["config"]["model"]["moe"]["num_experts"] == 8
    assert about["position"] == {"next_index": 30}
    assert about["schema"] == 1
