"""Predicted and compiled memory of training steps on hardware that is not there: `python -m benchmarks.layout_proofs`.

Compiles the first four layers of Qwen3-30B-A3B, all widths as they are, under several layouts for each target, in the
environment of the compilers (`make .venv-aot/.aot`), and prints a table as in docs/proofs.md. About a minute a layout for
TPUs, seconds for GPUs.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from layouts.clusters import parse_cluster
from layouts.layout import Layout
from layouts.presets import load_model
from layouts.search import Problem
from layouts.verify import prove
from layouts.workload import MOEJAX, Batch

LAYOUTS = (
    Layout(expert=8),
    Layout(data=2, expert=4),
    Layout(fsdp=8, remat="full"),
    Layout(fsdp=2, expert=4, remat="exchange"),
    Layout(expert=8, remat="full", num_chunks=2),
    Layout(data=2, fsdp=2, expert=2, remat="full"),
)
TARGETS = ("h100:1x8", "v5p:2x2x2", "v6e:2x4")


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout_proofs", description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=f"default {' '.join(TARGETS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="adds a line a layout")
    chosen = parser.parse_args()
    whole = load_model("qwen3-30b-a3b")
    model = dataclasses.replace(whole, name="qwen3-30b-a3b, 4 layers", layers=whole.layers[:4])
    for layout in LAYOUTS:
        for target in chosen.targets:
            start = time.perf_counter()
            proof = prove(Problem(model, Batch(1024, 16), parse_cluster(target), MOEJAX), layout)
            figures = {check.name: (check.predicted, check.compiled) for check in proof.checks}
            mesh = json.dumps({key: value for key, value in layout.to_json().items() if key != "schema"})
            print(f"| {target} | {mesh} | {proof.verdict} | {figures.get('peak bytes')} | {proof.words[:200]} |", flush=True)
            line = {"target": target, "layout": layout.to_json(), "seconds": time.perf_counter() - start} | proof.entry()
            if chosen.json:
                with chosen.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
