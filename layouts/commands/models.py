"""The known models with their sources, or what one model's file amounts to."""

import argparse
import json
from pathlib import Path
from typing import Any

from layouts.errors import InputError
from layouts.model import FeedForward, Model, MoE
from layouts.presets import load_model, preset_entry, preset_names


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "model", nargs="?", help="a name, a .toml or .json file, a Hugging Face config.json; default: all names"
    )
    parser.add_argument("--seq", type=int, default=4096, help="sequence length that FLOPs a token are counted at (4096)")
    parser.add_argument("--sources", action="store_true", help="where the sizes come from")
    parser.add_argument("--json", metavar="FILE", help="writes the figures")


def run(chosen: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    if chosen.seq < 1:
        raise InputError(f"--seq {chosen.seq}: needs a whole number of at least 1")
    models = [load_model(name) for name in ([chosen.model] if chosen.model else preset_names())]
    gflops = f"GFLOP/token at {chosen.seq}"
    print(f"{'model':18} {'parameters':>17} {'active':>15} {gflops:>20}  layers  runs here")
    for model in models:
        print(_line(model, chosen.seq))
    if chosen.sources:
        print("\n".join(f"{model.name}: {model.source}" for model in models))
    if chosen.json:
        found = {model.name: figures(model, chosen.seq) for model in models}
        Path(chosen.json).write_text(json.dumps({"schema": 1, "seq": chosen.seq, "models": found}, indent=1))
    return 0


def figures(model: Model, seq: int) -> dict[str, Any]:
    """What JSON says of a model: counts, FLOPs a token, whether moejax runs it, and why not."""
    title = preset_entry(model.name)["title"] if model.name in preset_names() else model.name
    return {
        "title": title,
        "source": model.source,
        "params_total": model.params_total,
        "params_active": model.params_active,
        "flops_per_token": model.flops_per_token(seq),
        "runnable": not model.not_runnable(),
        "not_runnable": list(model.not_runnable()),
    }


def _line(model: Model, seq: int) -> str:
    reasons = model.not_runnable()
    runs = f"no: {', '.join(reasons)}" if reasons else "yes"
    flops = model.flops_per_token(seq) / 1e9
    return f"{model.name:18} {model.params_total:17,} {model.params_active:15,} {flops:20.2f}  {_layers(model):>6}  {runs}"


def _layers(model: Model) -> str:
    dense = sum(isinstance(layer.feed_forward, FeedForward) for layer in model.layers)
    moe = sum(isinstance(layer.feed_forward, MoE) for layer in model.layers)
    return f"{dense}+{moe}" if dense and moe else str(dense + moe)
