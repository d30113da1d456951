"""`python -m layouts.aot_child`: the half of `layouts.aot` that runs where the compilers are.

Reads one request (JSON, see `aot.compile_all`) from stdin; writes program.hlo and result.json into each program's folder.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from layouts.aot import DATA, MARK, Target


def devices(target: Target) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs
    """The target's devices: compile-only ones for a TPU or a GPU, this process's virtual ones for the CPU."""
    shape = "x".join(map(str, target.shape))
    if target.kind == "cpu":
        return jax.devices()
    if target.kind == "tpu":
        return list(topologies.get_topology_desc(f"{target.family}:{shape}", "tpu").devices)
    config = (DATA / f"{target.family}.txtpb").read_text()
    # Hosts x GPUs a host x devices a GPU; the name is free text there.
    found = topologies.get_topology_desc(
        platform="cuda", topology_name=target.family, topology=f"{shape}x1", target_config=config
    )
    return list(found.devices)


def main() -> None:
    """Builds, compiles and writes each program of the request."""
    request = json.load(sys.stdin)
    target = Target(**request["target"] | {"shape": tuple(request["target"]["shape"])})
    found = devices(target)
    for program in request["programs"]:
        print(MARK, end="", file=sys.stderr, flush=True)
        _compile(program, found)


def _compile(program: dict[str, Any], found: list[Any]) -> None:
    module, _, name = program["build"].partition(":")
    start = time.perf_counter()
    lowered = getattr(importlib.import_module(module), name)(found, **program["arguments"])
    lowered_at = time.perf_counter()
    compiled = lowered.compile(compiler_options=program["compiler_options"] or None)
    seconds = {"lower_seconds": lowered_at - start, "compile_seconds": time.perf_counter() - lowered_at}
    folder = Path(program["folder"])
    (folder / "program.hlo").write_text(compiled.as_text())
    (folder / "result.json").write_text(json.dumps({"memory": _memory(compiled), "cost": _cost(compiled), **seconds}))


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    parts = ("argument", "output", "alias", "temp")
    return {f"{part}_bytes": int(getattr(analysis, f"{part}_size_in_bytes", 0)) for part in parts}


def _cost(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The totals alone: keys with braces are one operand's."""
    analysis: Any = compiled.cost_analysis() or {}
    return {key: float(value) for key, value in analysis.items() if "{" not in key}


if __name__ == "__main__":
    main()
