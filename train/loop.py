"""Step after step, until the last one, a signal, or a loss that is no number."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from train.alarms import Alarms, not_finite
from train.checkpoint import describe_run, saved_steps
from train.config import TrainConfig
from train.data import eval_batches, place_batch
from train.distributed import start_mesh
from train.errors import RunError
from train.metrics import Display, worst_load
from train.ngram import bits_per_byte
from train.optimizer import make_schedule
from train.program import eval_program, train_program
from train.report import report
from train.run import Run, begin, load_text


class StopSignal:
    """Whether SIGTERM or SIGINT came: looked at between steps, so that no step is cut in two.

    With several processes, jax's own preemption service listens to SIGTERM and has all of them agree on a step.
    """

    def __init__(self):
        self.name: str | None = None

    def __enter__(self) -> "StopSignal":
        numbers = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        self.name = signal.Signals(number).name

    def reached(self, run: Run) -> bool:
        """Whether the run is to stop after its present step."""
        if jax.process_count() > 1 and run.checkpoints.reached_preemption(run.step):
            self.name = "SIGTERM"
        return self.name is not None


def train(cfg: TrainConfig, folder: Path, resume: str, console: Console) -> None:
    """Trains to the last step and reports; returns early, all saved, when a signal says so.

    Args:
      cfg: the run.
      folder: where it is kept.
      resume: "auto", "never" or "must", see `train.run.resume_step`.
      console: where it says what it does.

    Raises:
      InputError: for an impossible input, before any device work.
      RunError: when the loss is not finite. The last checkpoint stays as it is.
    """
    text = load_text(cfg)
    mesh = start_mesh(cfg.mesh)
    console.quiet = jax.process_index() != 0
    with jax.set_mesh(mesh), StopSignal() as stop, Display(console, cfg.steps) as display:
        display.say(text.corpus.describe())
        run = begin(cfg, folder, text, display, resume)
        evaluate = make_evaluate(run)
        try:
            work(run, stop, evaluate)
            if stop.name is None:
                report(run, evaluate())
        finally:
            run.checkpoints.close()
            run.log.close()
        if stop.name is not None:
            display.say(f"stopped by {stop.name} after step {run.step}; saved in {run.checkpoints.folder}")


def work(run: Run, stop: StopSignal, evaluate: Callable[[], dict[str, float]]) -> None:
    """Steps until the last one or a signal, saving, evaluating and logging on the way."""
    cfg = run.cfg
    train_step = train_program(cfg)
    watch = Watch(run)
    while run.step < cfg.steps and not stop.reached(run):
        batch = place_batch(next(run.batches), run.mesh)
        run.state, metrics = train_step(run.state, batch)
        run.step += 1
        watch.take(run.step, metrics)
        if run.mover.due(run.step):
            watch.flush()
            move_experts(run)
        if run.step % cfg.checkpoint.every == 0 or run.step == cfg.steps:
            watch.flush()
            save(run)
        if cfg.eval.every and run.step % cfg.eval.every == 0 and run.step < cfg.steps:
            watch.flush()
            log_evaluation(run, evaluate())
            watch.restart_clock()
    watch.flush()
    if stop.name is not None:
        save(run)


def move_experts(run: Run) -> None:
    """Moves the experts whose moves pay, and logs what was moved."""
    run.state, found = run.mover.move(run.state)
    run.log.write("placement", run.step, found)
    if any(found["moved"]):
        before, after = (max(found[name]) for name in ("load_before", "load_after"))
        run.display.say(
            f"after step {run.step}: {sum(found['moved'])} slots take another expert; the fullest device had {before:.2f} "
            f"times the mean load, and has {after:.2f}"
        )


def save(run: Run) -> None:
    """Starts to save the run as it is now."""
    about = {**describe_run(run.cfg, run.text.corpus.digest), "loads": run.mover.keep()}
    run.checkpoints.save(run.step, run.state, run.batches.get_state(), about)


def make_evaluate(run: Run) -> Callable[[], dict[str, float]]:
    """A function that evaluates the run's present state on all held-out rows: loss (nats a target), bits_per_byte, and
    specialisation (bits) where it is traced."""
    eval_step = eval_program(run.cfg)
    rows = run.cfg.global_batch // run.cfg.num_microbatches

    def evaluate() -> dict[str, float]:
        nats, num_targets, traced = 0.0, 0, None
        for batch in eval_batches(run.text.held_out, rows, jax.process_index(), jax.process_count()):
            placed = place_batch(batch, run.mesh)
            found = eval_step(run.state.params, run.state.router, placed)
            if run.recorder.wanted and traced is None:
                traced = run.recorder.take(run.step, placed, found, run.log)
            nats, num_targets = nats + float(found["loss_sum"]), num_targets + int(found["num_targets"])
        return {"loss": nats / num_targets, "bits_per_byte": bits_per_byte(nats, run.text.held_out_bytes), **(traced or {})}

    return evaluate


def log_evaluation(run: Run, found: dict[str, float]) -> None:
    """Logs and shows an evaluation."""
    run.log.write("eval", run.step, found)
    run.display.say(f"held out after step {run.step}: {found['bits_per_byte']:.3f} bits per byte")


class Watch:
    """Reads each step's metrics one step late, so that devices do not wait for the host; logs, shows and rings."""

    def __init__(self, run: Run):
        """Args: run, whose log and display are used."""
        self.run, self.alarms = run, Alarms(run.cfg.alarms)
        self.schedule = make_schedule(run.cfg)
        self._late: tuple[int, dict[str, Any]] | None = None
        self._clock, self._clock_step = time.perf_counter(), run.step

    def take(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Keeps the metrics of a step, and works off those of the step before."""
        before, self._late = self._late, (step, metrics)
        if before is not None:
            self._work_off(*before)

    def flush(self) -> None:
        """Works off what was kept: after it every step so far is known to be finite."""
        before, self._late = self._late, None
        if before is not None:
            self._work_off(*before)

    def restart_clock(self) -> None:
        """Leaves the time since the last line out of the rates."""
        self._clock, self._clock_step = time.perf_counter(), self.run.step

    def _work_off(self, step: int, metrics: dict[str, jax.Array]) -> None:
        run, found = self.run, jax.device_get(metrics)
        if (fault := not_finite(found)) is not None:
            run.log.write("alarm", step, {"what": fault})
            run.checkpoints.wait()
            last = saved_steps(run.checkpoints.folder)
            kept = f"the last good checkpoint is step {last[-1]}" if last else "no checkpoint was saved before it"
            raise RunError(f"{fault} at step {step}: stopped; {kept} in {run.checkpoints.folder}")
        run.mover.add(found)
        for what in self.alarms.check(found):
            run.log.write("alarm", step, {"what": what})
            run.display.say(f"ALARM at step {step}: {what}")
        if step % run.cfg.log_every == 0 or step == run.cfg.steps:
            self._log(step, found)

    def _log(self, step: int, found: dict[str, Any]) -> None:
        run, now = self.run, time.perf_counter()
        seconds = (now - self._clock) / max(1, step - self._clock_step)
        self._clock, self._clock_step = now, step
        rates = {
            "learning_rate": float(np.asarray(self.schedule(step - 1))),
            "step_seconds": seconds,
            "tokens_per_second": run.cfg.global_batch * run.cfg.seq / max(seconds, 1e-9),
        }
        if "tokens_per_expert" in found:
            rates["worst_load"] = worst_load(np.asarray(found["tokens_per_expert"]))
        run.log.write("train", step, {**found, **rates})
        run.display.show(step, {**found, **rates}, (run.cfg.steps - step) * seconds)
