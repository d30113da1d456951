"""`python -m benchmarks [NAME ...]`: runs the named benchmarks (default all), prints a table and writes a JSON each."""

import argparse
import importlib
import time

import jax

from benchmarks import harness

NAMES = (
    "moe_layer",
    "ragged_layer",
    "torch_layer",
    "exchanges",
    "memory_tokens",
    "compile_depth",
    "grouped_matmul",
    "balance",
    "overlapped",
    "schedules",
    "compiled_layer",  # last: it takes longest
)


def main() -> None:
    """Runs the benchmarks asked for, one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side figures of moejax.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"benchmark {name!r}: legal names are {', '.join(NAMES)}")
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are among the figures
    for name in names:
        start = time.perf_counter()
        benchmark = importlib.import_module(f"benchmarks.{name}")
        if why := getattr(benchmark, "unavailable", lambda: None)():
            print(f"\n{name}: left out, {why}")
            continue
        rows = benchmark.run()
        path = harness.write(name, benchmark.AIM, rows)
        print(f"\n{name}  (aim: {benchmark.AIM})\n{harness.table(rows)}")
        print(f"{path.relative_to(harness.ROOT)}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
