"""What `overlap=True` changes in the layer as the compilers for TPU and GPU schedule it: memory, collectives, what runs beside.

Compiled ahead of time for hardware that is not there, forward and backward, bfloat16 products of float32 weights, 4,096
tokens a token shard. Without overlap weights are gathered before use and their gradients reduced after (over `fsdp`), and
outputs are summed when they are whole (over `tensor`). Pairs are asynchronous collectives, start and done; beside: those with
a product scheduled between the two. No clock runs here: whether a product is long enough to hide what travels is not seen.
Over `fsdp` the parts' float32 products of the first matrix stand side by side until they are summed: that is the price.
"""

import tempfile
from pathlib import Path
from typing import Any

import moejax
from benchmarks.compiled_layer import unavailable
from layouts import aot, hlo

__all__ = ["AIM", "run", "unavailable"]

AIM = "with overlap: every part of weights and of partial sums travels beside a product"
TARGETS = ("h100:1x8", "v5p:2x2x2")
SHAPE = {"d_model": 2048, "d_ff": 4096, "num_experts": 4, "top_k": 2, "param_dtype": "float32"}
MESHES = {"fsdp4": {"fsdp": 4, "expert": 2}, "tensor4": {"expert": 2, "tensor": 4}}
TIMEOUT_SECONDS = 1200


def run() -> list[dict]:
    """A row per target, mesh and setting."""
    return [row for target in TARGETS for row in _rows(target)]


def _rows(target: str) -> list[dict]:
    options = moejax.compiler_options(aot.Target.parse(target).kind)
    settings = {f"{mesh}-{overlap}": (mesh, overlap) for mesh in MESHES for overlap in (False, True)}
    layer = lambda mesh, overlap: {"config": {**SHAPE, "overlap": overlap}, "axes": MESHES[mesh]}
    jobs = {name: aot.Job("benchmarks.compiled_layer:layer", layer(*setting), options) for name, setting in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        compiled = aot.compile_all(target, jobs, out=Path(folder), timeout_seconds=TIMEOUT_SECONDS)
        found = {name: _figures(program) for name, program in compiled.items()}
    return [{"target": target, "mesh": mesh, "overlap": overlap, **found[name]} for name, (mesh, overlap) in settings.items()]


def _figures(compiled: aot.Compiled) -> dict[str, Any]:
    assert compiled.memory is not None, f"{compiled.target}: the compiler gave no memory figures"
    module = hlo.parse(compiled.text)
    program = hlo.count(module)
    pairs = [window for where in module.computations.values() for window in hlo.windows(where) if _collective(window)]
    beside = [window for window in pairs if any(hlo.works(module, instruction) for instruction in window.between)]
    return {
        "temp_gib": compiled.memory.temp_bytes / 2**30,
        "collectives": ", ".join(f"{found.executed} {found.kind}" for found in program.collectives) or "none",
        "wire_mb": program.wire_bytes / 1e6,
        "pairs": len(pairs),
        "beside": len(beside),
        "dot_tflop": program.dot_flops / 1e12,
        "mcycles": program.cycles / 1e6,
        "moved_gb": program.moved_bytes / 1e9,
        "compile_s": compiled.compile_seconds,
    }


def _collective(window: hlo.Window) -> bool:
    return window.start.base_op in hlo.COLLECTIVES
