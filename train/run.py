"""Run: everything a run is made of, and how it begins: anew, or where a checkpoint left it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import grain
import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh

from moejax.step import TrainState, abstract_state, init_state
from train.checkpoint import Checkpoints, find_good
from train.config import RULES, TrainConfig
from train.corpus import Corpus, Split, load_corpus, split_corpus, take_whole
from train.data import Rows, make_rows, train_batches
from train.errors import InputError
from train.metrics import Display, MetricsLog, NoLog
from train.optimizer import make_optimizer
from train.placement import Mover
from train.recorder import Recorder
from train.reorder import abstract_saved, stage_order, to_order
from train.sample import encode_prompt
from train.stages import make_pipeline
from train.tokens import Tokenizer, load_tokenizer

RESUME = ("auto", "never", "must")


@dataclasses.dataclass(frozen=True)
class Text:
    """The text of a run, in every form that it needs.

    Attributes:
      corpus: as read.
      split: divided; `held_out` is what is evaluated on.
      tokenizer: text to ids.
      train: rows to train on.
      held_out: rows to evaluate on.
    """

    corpus: Corpus
    split: Split
    tokenizer: Tokenizer
    train: Rows
    held_out: Rows

    @property
    def held_out_bytes(self) -> int:
        """Bytes evaluated on."""
        return sum(map(len, self.split.held_out))


@dataclasses.dataclass
class Run:
    """A run in progress.

    Attributes:
      cfg: its config.
      folder: where it is kept.
      mesh: its devices.
      text: its text.
      display: where it says what it does.
      checkpoints: where it is saved.
      log: where its metrics go.
      mover: moves its experts.
      recorder: of its routing.
      batches: the training batches from `step` on.
      state: after `step` steps.
      step: optimizer steps done.
    """

    cfg: TrainConfig
    folder: Path
    mesh: Mesh
    text: Text
    display: Display
    checkpoints: Checkpoints
    log: MetricsLog | NoLog
    mover: Mover
    recorder: Recorder
    batches: grain.DatasetIterator
    state: TrainState
    step: int


def load_text(cfg: TrainConfig) -> Text:
    """Reads, divides and tokenises the run's text; touches no device.

    Raises:
      InputError: where the corpus is missing or empty, or the tokenizer does not fit.
    """
    tokenizer = load_tokenizer(cfg.data.tokenizer, cfg.model.vocab_size)
    encode_prompt(cfg, tokenizer)
    corpus = load_corpus(cfg.data)
    split = split_corpus(corpus, cfg.data.held_out)
    split = dataclasses.replace(split, held_out=take_whole(split.held_out, cfg.eval.max_bytes))
    rows = (make_rows(documents, tokenizer, cfg.seq) for documents in (split.train, split.held_out))
    return Text(corpus, split, tokenizer, *rows)


def resume_step(folder: Path, resume: str, say: Callable[[str], None]) -> int | None:
    """The step to go on from, None to start anew.

    Args:
      folder: the run's.
      resume: "auto" goes on where there is a checkpoint, "must" refuses to start without one, "never" starts anew and
        moves an earlier run's folder out of the way.
      say: told of what was found damaged or moved.

    Raises:
      InputError: where no checkpoint is whole, or `must` finds none.
    """
    if resume == "never":
        if folder.exists():
            say(f"{folder}: the earlier run is kept in {_move_away(folder)}")
        return None
    step = find_good(folder, say)
    if step is None and resume == "must":
        raise InputError(f"--resume must: no checkpoint in {folder / 'checkpoints'}; needs one, or --resume auto")
    return step


def begin(cfg: TrainConfig, folder: Path, text: Text, display: Display, resume: str) -> Run:
    """The run at its beginning, or as a checkpoint left it. Under `jax.set_mesh`.

    Raises:
      InputError: as `resume_step`, or where the checkpoint is another model's.
    """
    step = _agree(resume_step(folder, resume, display.say)) if jax.process_index() == 0 else _agree(None)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder, cfg.checkpoint.keep)
    batches = train_batches(text.train, cfg, jax.process_index(), jax.process_count())
    if step is None:
        state = init_state(cfg.model, make_optimizer(cfg), jax.random.key(cfg.seed), RULES, make_pipeline(cfg))
        mover = Mover(cfg)
    else:
        state, mover = _restore(checkpoints, step, cfg, text, batches, display)
    step = step or 0
    log = MetricsLog(folder, step) if jax.process_index() == 0 else NoLog()
    display.start(step)
    recorder = Recorder(cfg, folder, text.tokenizer, step)
    mesh = jax.sharding.get_mesh()
    return Run(cfg, folder, mesh, text, display, checkpoints, log, mover, recorder, batches, state, step)


def abstract_run_state(cfg: TrainConfig) -> TrainState:
    """The state's shapes and shardings on the current mesh; touches no device."""
    key = jax.eval_shape(lambda: jax.random.key(cfg.seed))
    return abstract_state(cfg.model, make_optimizer(cfg), key, RULES, make_pipeline(cfg))


def _restore(checkpoints, step, cfg, text, batches, display) -> tuple[TrainState, Mover]:
    wanted, here = abstract_run_state(cfg), stage_order(cfg)
    there = checkpoints.about(step).get("stage_order")
    found = checkpoints.restore(step, wanted if here == there else abstract_saved(cfg, there))
    if here != there:
        display.say("the checkpoint's layers are in another order of pipeline stages: moving them")
        found = dataclasses.replace(found, state=to_order(cfg, found.state, there, wanted))
    batches.set_state(found.position)
    display.say(f"resumed from step {step}")
    before = found.about
    text_here = (text.corpus.digest, cfg.seed, cfg.seq, cfg.global_batch)
    text_there = (before["corpus_sha256"], *(before["config"][name] for name in ("seed", "seq", "global_batch")))
    if text_here != text_there:
        display.say("the text, its order or its cut is not the checkpoint's: going on at the same batch of the new one")
    return found.state, Mover(cfg, before.get("loads"))


def _agree(step: int | None) -> int | None:
    """The first process's answer, on all of them."""
    if jax.process_count() > 1:
        step = int(broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if step in (None, -1) else step


def _move_away(folder: Path) -> Path:
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(target)
