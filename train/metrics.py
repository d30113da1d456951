"""What a run says of itself: lines of JSON, TensorBoard, and a progress bar or plain lines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

Lines = list[dict[str, Any]]


class MetricsLog:
    """`metrics.jsonl` and `tensorboard/` of a run folder.

    Every line of the file is an object with `schema`, `kind` ("train", "eval", "placement", "alarm" or "final"), `step`, and
    what was measured; losses are in nats per target.
    """

    def __init__(self, run_dir: Path, start_step: int):
        """Args: run_dir, the run's folder; start_step, later steps' lines are dropped: they are run again."""
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["step"] <= start_step]
        self.path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        self._file = self.path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1, flush_secs=30)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Adds one line; numbers in it go to TensorBoard under `kind/name`."""
        plain = {name: _plain(value) for name, value in values.items()}
        self._file.write(f"{json.dumps({'schema': 1, 'kind': kind, 'step': step, **plain})}\n")
        for name, value in plain.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def draw(self, name: str, step: int, figure: Figure) -> None:
        """Adds a picture to TensorBoard, and closes it."""
        self._board.add_figure(name, figure, step)

    def close(self) -> None:
        """Writes out what is still in memory."""
        self._file.close()
        self._board.close()


class NoLog:
    """The log of processes other than the first."""

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Writes nothing: the first process does."""

    def draw(self, name: str, step: int, figure: Figure) -> None:
        """Draws nothing: the first process does."""

    def close(self) -> None:
        """Nothing to close."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; none where there is no file. A last line cut short by a kill is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def worst_load(tokens_per_expert: np.ndarray) -> float:
    """The fullest expert's tokens over its layer's mean, at its worst layer; 1 is even.

    Args:
      tokens_per_expert: [layers, E].
    """
    mean = np.maximum(tokens_per_expert.mean(-1, keepdims=True), 1e-9)
    return float((tokens_per_expert / mean).max())


class Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int):
        """Args: console, where to; steps, of the whole run."""
        self.console, self.steps = console, steps
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, values="compiling", visible=False)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *error) -> None:
        self._bar.stop()

    def start(self, step: int) -> None:
        """Shows the bar, at a step that is done."""
        self._bar.update(self._task, completed=step, visible=True)

    def stop(self) -> None:
        """Takes the bar away: what follows is plain text."""
        self._bar.stop()

    def show(self, step: int, values: dict[str, Any], remaining_seconds: float) -> None:
        """Shows a step's values (those of a "train" line)."""
        text = f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tok/s"
        if "worst_load" in values:
            text += f"  drops {values['dropped_fraction']:.1%}  worst load {values['worst_load']:.2f}x"
        self._bar.update(self._task, completed=step, values=text)
        if not self.console.is_terminal:
            minutes, seconds = divmod(round(remaining_seconds), 60)
            self.say(f"step {step}/{self.steps}  {text}  ETA {minutes}:{seconds:02d}")

    def say(self, line: str) -> None:
        """One line, above the bar."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind in "US":
        return str(value)
    return array.tolist()
