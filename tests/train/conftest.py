"""A small run that others are measured against: never stopped, on mesh (expert 4), every step logged."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

import train.__main__ as command
from train.metrics import read_metrics

STEPS = 30


@dataclasses.dataclass(frozen=True)
class Base:
    """A finished run.

    Attributes:
      words: its command line, without its folder.
      folder: its folder.
    """

    words: tuple[str, ...]
    folder: Path

    def copy(self, to: Path, up_to: int = STEPS) -> Path:
        """A copy of the run as it was when it had just saved step `up_to`."""
        shutil.copytree(self.folder, to)
        for path in [*(to / "checkpoints").glob("*"), *(to / "manifests").glob("*")]:
            if path.stem.isdigit() and int(path.stem) > up_to:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return to

    def run(self, folder: Path, *more: str) -> int:
        """Runs the same command line in another folder; the exit code."""
        return command.main([*self.words, f"run_dir={folder}", *more])


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; a step that stands twice in the metrics is a failure."""
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]
    found = {line["step"]: line["loss"] for line in steps}
    assert len(found) == len(steps), "a step was logged twice"
    return found


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 60 files of made-up words."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 9)).tolist()).decode() for _ in range(200)]
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(" ".join(rng.choice(words, rng.integers(20, 120))))
    return folder


@pytest.fixture(scope="session")
def base(corpus, tmp_path_factory):
    """The run."""
    words = (
        "tiny",
        f"data.corpus={corpus}",
        "data.held_out=0.15",
        "mesh.expert=4",
        f"steps={STEPS}",
        "checkpoint.every=5",
        "checkpoint.keep=10",
        "eval.every=15",
        "sample.num_tokens=0",
    )
    made = Base(words, tmp_path_factory.mktemp("base") / "run")
    assert made.run(made.folder) == 0
    assert sorted(losses(made.folder)) == list(range(1, STEPS + 1))
    return made
