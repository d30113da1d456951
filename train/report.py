"""The last lines of a run: held-out bits per byte beside simple models', a sample, the experts' load, paths."""

import numpy as np

from train.metrics import NoLog, read_metrics
from train.ngram import byte_symbols, fit_ngrams
from train.pictures import draw_routing
from train.plot import plot_run
from train.run import Run
from train.sample import sample_text

# Logged steps that the experts' load is taken over.
_LOAD_STEPS = 10


def report(run: Run, evaluation: dict[str, float]) -> None:
    """Writes the "final" metrics, the sample and the plot, and says what came out.

    Args:
      run: a finished run.
      evaluation: of its last state.
    """
    sample = sample_text(run.cfg, run.state, run.text.tokenizer) if run.cfg.sample.num_tokens else None
    run.display.stop()
    if isinstance(run.log, NoLog):
        return
    ngrams = ngram_bits_per_byte(run)
    run.log.write("eval", run.step, evaluation)
    run.log.write("final", run.step, {**evaluation, **ngrams})
    metrics = read_metrics(run.log.path)
    say = run.display.say
    say(f"\nheld out ({len(run.text.split.held_out)} documents, {run.text.held_out_bytes:,} bytes), bits per byte:")
    say(f"  this model     {evaluation['bits_per_byte']:.3f}")
    say(f"  byte trigrams  {ngrams['trigram_bits_per_byte']:.3f}")
    say(f"  byte bigrams   {ngrams['bigram_bits_per_byte']:.3f}")
    if sample is not None:
        (run.folder / "sample.txt").write_text(sample)
        say(f"\nsample (temperature {run.cfg.sample.temperature}):\n{_indent(sample)}")
    for line in load_lines(metrics):
        say(line)
    plot_run(metrics, run.folder / "plot.png", title=f"{run.folder.name}: language model trained on {run.text.corpus.name}")
    say(f"\ncheckpoint   {run.checkpoints.folder / str(run.step)}")
    say(f"metrics      {run.log.path}")
    say(f"tensorboard  {run.folder / 'tensorboard'}")
    say(f"plot         {run.folder / 'plot.png'}")
    for path in draw_routing(run.folder, f"{run.folder.name}: routing of a model trained on {run.text.corpus.name}"):
        say(f"routing      {path}")


def ngram_bits_per_byte(run: Run) -> dict[str, float]:
    """Held-out bits per byte of byte models of the run's own training text, on the bytes that it is measured on."""
    model = fit_ngrams(byte_symbols(run.text.split.train))
    held_out = byte_symbols(run.text.split.held_out)
    orders = {"bigram": 2, "trigram": 3}
    return {f"{name}_bits_per_byte": model.bits_per_byte(held_out, order) for name, order in orders.items()}


def load_lines(metrics: list[dict]) -> list[str]:
    """Each layer's expert load over the last logged steps, as bars: 1.00 is an even share."""
    steps = [line for line in metrics if line["kind"] == "train" and "tokens_per_expert" in line][-_LOAD_STEPS:]
    if not steps:
        return []
    tokens = np.sum([line["tokens_per_expert"] for line in steps], axis=0)
    loads = tokens / np.maximum(tokens.mean(-1, keepdims=True), 1e-9)
    lines = [f"\nexperts' load (1.00: an even share; last {len(steps)} logged steps)"]
    for layer, load in enumerate(loads):
        shown = "  ".join(f"{_bar(share)} {share:.2f}" for share in load[:16])
        more = f"  and {len(load) - 16} more" if len(load) > 16 else ""
        lines.append(f"  MoE layer {layer:2}  {shown}{more}")
    return lines


def _bar(share: float) -> str:
    """One block character, full at twice the even share."""
    return " ▁▂▃▄▅▆▇█"[min(8, max(0, round(share * 4)))]


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
