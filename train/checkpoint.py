"""Checkpoints: state, position in the data and config, saved while training goes on and checked on the way back.

A run folder holds `checkpoints/STEP/` (Orbax), `manifests/STEP.json` (a checksum of each of its files, written when the
save is complete) and, where a checkpoint was found damaged, `damaged/STEP/`.
"""

import dataclasses
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moejax.step import TrainState
from train.config import TrainConfig
from train.errors import InputError
from train.manifest import check_manifest, write_manifest
from train.reorder import stage_order

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Restored:
    """What came back.

    Attributes:
      state: on the mesh that was asked for.
      position: the data iterator's state.
      about: what was saved beside them: config, corpus digest, shapes.
    """

    state: TrainState
    position: dict[str, Any]
    about: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int):
        """Args: run_dir, the run's folder, made where it is missing; keep, how many of the newest checkpoints stay."""
        self.folder, self.manifests = run_dir.absolute() / "checkpoints", run_dir.absolute() / "manifests"
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="manifest")
        self._saving: Future[None] | None = None
        self._newest: int | None = None

    def save(self, step: int, state: TrainState, position: dict[str, Any], about: dict[str, Any]) -> None:
        """Starts to save, unless this step is the newest one saved or restored already.

        Returns when the arrays are copied, so that they may be donated to the next step.
        """
        if step == self._newest:
            return
        self.wait()
        self._newest = step
        arrays = _by_name(state)
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                about=ocp.args.JsonSave({**about, "position": position, "shapes": _shapes(arrays)}),
            ),
            force=True,
        )
        self._saving = self._worker.submit(self._finish)

    def about(self, step: int) -> dict[str, Any]:
        """What was saved beside a checkpoint's arrays: see `describe_run`."""
        return dict(self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"])

    def restore(self, step: int, abstract: TrainState) -> Restored:
        """Reads a checkpoint onto the mesh that `abstract` (see `moejax.step.abstract_state`) is laid out on.

        Raises:
          InputError: where it is another model's, naming the shapes that differ.
        """
        about = self.about(step)
        wanted = _by_name(abstract)
        _check_shapes(self.folder / str(step), about["shapes"], _shapes(wanted))
        found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
        self._newest = step
        leaves = [found[name] for name in wanted]
        return Restored(jax.tree.unflatten(jax.tree.structure(abstract), leaves), about["position"], about)

    def wait(self) -> None:
        """Returns when the save in progress is complete, its manifest included."""
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        """Waits, and ends the threads."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._manager.close()

    def reached_preemption(self, step: int) -> bool:
        """Whether all processes of a pod agreed to stop after this step."""
        return self._manager.reached_preemption(step)

    def _finish(self) -> None:
        """Waits for Orbax, then writes the manifest that the checkpoint lacks; those of deleted checkpoints go.

        Orbax's own callback comes before the checkpoint has its name.
        """
        self._manager.wait_until_finished()
        if jax.process_index() != 0:
            return
        steps = {str(step) for step in saved_steps(self.folder)}
        for step in steps:
            manifest = self.manifests / f"{step}.json"
            if not manifest.exists():
                write_manifest(self.folder / step, manifest)
        for manifest in self.manifests.glob("*.json"):
            if manifest.stem not in steps:
                manifest.unlink()


def saved_steps(folder: Path) -> list[int]:
    """The steps that a folder of checkpoints holds, ascending."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit()) if folder.is_dir() else []


def find_good(run_dir: Path, say: Say) -> int | None:
    """The newest step whose checkpoint is whole, or None where there are no checkpoints.

    Damaged ones that are newer are moved to the folder `damaged`, and `say` is told of each.

    Raises:
      InputError: where there are checkpoints but none is whole.
    """
    folder, bad = run_dir / "checkpoints", {}
    for step in reversed(saved_steps(folder)):
        fault = check_manifest(folder / str(step), run_dir / "manifests" / f"{step}.json")
        if fault is None:
            for damaged, why in bad.items():
                say(f"checkpoint {damaged} {why}: moved to {_set_aside(run_dir, damaged)}; going back to step {step}")
            return step
        bad[step] = fault
    if bad:
        step, why = next(iter(bad.items()))
        raise InputError(
            f"no checkpoint in {folder} is whole: {step} {why}; needs a whole one, or --resume never to start anew"
        )
    return None


def _set_aside(run_dir: Path, step: int) -> Path:
    target = run_dir / "damaged" / str(step)
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(exist_ok=True)
    (run_dir / "checkpoints" / str(step)).rename(target)
    (run_dir / "manifests" / f"{step}.json").unlink(missing_ok=True)
    return target


def describe_run(cfg: TrainConfig, digest: str) -> dict[str, Any]:
    """What is saved beside the state: the config, the order of its layers, and the corpus that the position counts in."""
    return {
        "schema": 1,
        "config": dataclasses.asdict(cfg),
        "stage_order": stage_order(cfg),
        "corpus_sha256": digest,
        "versions": {"jax": jax.__version__},
    }


def _by_name(state: TrainState) -> dict[str, Any]:
    """The leaves by their path: what a checkpoint is made of does not depend on the classes that hold it."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}


def _check_shapes(where: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    names = sorted(saved.keys() | wanted.keys(), key=lambda name: (not name.startswith("params"), name))
    differing = [
        f"{name} {saved.get(name, 'absent')} there, {wanted.get(name, 'absent')} here"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        more = f"; and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise InputError(
            f"checkpoint {where} is another model's: {'; '.join(differing[:4])}{more}; "
            f"needs the model it was saved from, another run_dir, or --resume never"
        )
