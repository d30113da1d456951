"""`python -m benchmarks [NAME ...]`: runs the named benchmarks (default all), prints a table each and writes their JSON."""

import argparse
import importlib
import time

import jax

from benchmarks import harness

NAMES = ("moe_layer", "memory_tokens", "compile_depth")


def main() -> None:
    """Runs the benchmarks asked for, one after another."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], metavar="NAME", help=", ".join(NAMES))
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are among the figures
    for name in parser.parse_args().names or NAMES:
        start = time.perf_counter()
        benchmark = importlib.import_module(f"benchmarks.{name}")
        rows = benchmark.run()
        path = harness.write(name, benchmark.AIM, rows)
        print(f"\n{name}  (aim: {benchmark.AIM})\n{harness.table(rows)}")
        print(f"{path.relative_to(harness.RESULTS.parent.parent)}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
