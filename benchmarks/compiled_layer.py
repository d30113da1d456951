"""What the compilers for TPU and GPU make of the layer, forward and backward, at two published shapes.

Compiled ahead of time for hardware that is not there (see `layouts.aot`), so every figure is the compiler's, not a
clock's. Eight devices, experts over all of them, 4,096 tokens each, bfloat16. The bare product gets the layer's rows
already grouped, with the weights' and the rows' gradients: what it takes, no layer of that capacity can save.
"""

import itertools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moejax
from layouts import aot, hlo

AIM = (
    "v5p: OLMoE-like <= 10 Mcycles, 400 MB on the wire, 0.65 GiB; Mixtral-like <= 53, 295, 1.4. "
    "H100: <= 0.7 GiB and 4.3 GB moved; 1.3 and 8.2"
)
TARGETS = ("v5p:2x2x2", "h100:1x8")
# Sizes of one layer of OLMoE-1B-7B (arXiv:2409.02060) and of Mixtral-8x7B (arXiv:2401.04088).
SHAPES = {
    "OLMoE-like": {"d_model": 2048, "d_ff": 1024, "num_experts": 64, "top_k": 8},
    "Mixtral-like": {"d_model": 4096, "d_ff": 14336, "num_experts": 8, "top_k": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cells": {},  # in the form that the hardware gets
    "cells, weighed at the token": {"weigh_at": "token", "exchange_by": "device"},
    "pools": {"capacity": "pool"},
    "ragged": {"exchange": "ragged"},
}
TOKENS_A_DEVICE = 4096
TIMEOUT_SECONDS = 1200  # the longest took 162 s on two idle cores


def unavailable() -> str | None:
    """Why this benchmark cannot run here; None where it can."""
    try:
        for target in TARGETS:
            aot.interpreter(aot.Target.parse(target))
    except aot.CompilersMissingError as error:
        return str(error)
    return None


def run() -> list[dict]:
    """A row per target, shape and program."""
    return [row for target in TARGETS for shape in SHAPES for row in _rows(target, shape)]


def _rows(target: str, shape: str) -> list[dict]:
    programs: dict[str, tuple[str, Mapping[str, Any]]] = {"bare product": ("product", {})}
    programs |= {name: ("layer", settings) for name, settings in SETTINGS.items()}
    rows, bare_cycles = [], 0
    for name, (build, settings) in programs.items():
        arguments = {"config": {**SHAPES[shape], **settings}}
        with tempfile.TemporaryDirectory() as folder:
            compiled = aot.compile_for(
                target, f"{__name__}:{build}", arguments, out=Path(folder), timeout_seconds=TIMEOUT_SECONDS
            )
            turns, program = _read(compiled.text, SHAPES[shape])
        bare_cycles = bare_cycles or program.cycles
        figures = _figures(compiled, program, bare_cycles)
        rows.append({"target": target, "shape": shape, "program": name, **figures, "loop_turns": turns})
    return rows


def _read(text: str, config: Mapping[str, Any]) -> tuple[int, hlo.Program]:
    """The program, and the turns counted for loops that end when the data say so (0 where there are none).

    Such a loop goes over the tiles of rows that are really there. Counted are as many turns as bring the products to those
    of all assignments, the same for every loop. With loops for several heights of tile, few of which any run enters, take
    the cycles and the bytes moved for an upper bound.
    """
    once = hlo.read(text)
    if None not in once.loops:
        return 0, once
    flops_a_turn = hlo.read(text, unknown_turns=2).dot_flops - once.dot_flops
    rows = TOKENS_A_DEVICE * config["top_k"]
    true_flops = 3 * 3 * 2 * rows * config["d_model"] * config["d_ff"]
    turns = max(1, round((true_flops - once.dot_flops) / flops_a_turn) + 1) if flops_a_turn else 1
    return turns, hlo.read(text, unknown_turns=turns)


def _figures(compiled: aot.Compiled, program: hlo.Program, bare_cycles: int) -> dict[str, Any]:
    """The row's figures; cycles are 0 where the compiler estimates none."""
    assert compiled.memory is not None, f"{compiled.target}: the compiler gave no memory figures"
    return {
        "temp_gib": compiled.memory.temp_bytes / 2**30,
        "collectives": ", ".join(f"{found.executed} {found.kind}" for found in program.collectives) or "none",
        "wire_mb": program.wire_bytes / 1e6,
        "dot_tflop": program.dot_flops / 1e12,
        "kernel_tflop": program.kernel_flops / 1e12,
        "mcycles": program.cycles / 1e6,
        "over_bare": program.cycles / bare_cycles if bare_cycles else 0.0,
        "moved_gb": program.moved_bytes / 1e9,
        "sorts": program.sorts,
        "gathers": program.gathers,
        "scatters": program.scatters,
        "compile_s": compiled.compile_seconds,
        "mcycles_by_scope": _largest(program.cycles_by_scope),
    }


def _largest(cycles_by_scope: Mapping[str, int]) -> str:
    """The three scopes with the most cycles; "~" marks a backward pass."""
    largest = itertools.islice(cycles_by_scope.items(), 3)
    return ", ".join(f"{name or 'other'} {cycles / 1e6:.2f}" for name, cycles in largest) or "-"


def layer(
    devices: list[jax.Device],  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs
    config: Mapping[str, Any],
    axes: Mapping[str, int] | None = None,
) -> jax.stages.Lowered:
    """The layer's loss and the gradients of its parameters and tokens, lowered; over mesh axes of these sizes, or `expert`."""
    cfg = moejax.MoEConfig(**{"param_dtype": "bfloat16", **config})
    sizes: dict[str, Any] = dict(axes or {"expert": len(devices)})
    mesh = moejax.make_mesh(devices=devices, **sizes)
    batch = moejax.AxisRules().axes("batch", mesh)
    shards = math.prod(mesh.shape[name] for name in batch)
    with jax.set_mesh(mesh):
        split = lambda: nnx.split(moejax.MoELayer(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)
        graph, params, rest = jax.eval_shape(split)
        laid_out = lambda x, spec: _array(mesh, x.shape, spec, cfg.param_dtype)
        params = jax.tree.map(laid_out, params, nnx.get_partition_spec(params))
        tokens = _array(mesh, (shards, TOKENS_A_DEVICE, cfg.d_model), P(batch))

        def loss(params, x):
            y, stats = nnx.merge(graph, params, rest)(x)
            return jnp.square(y.astype(jnp.float32)).mean() + stats.loss(cfg)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, tokens)


def product(
    devices: list[jax.Device],  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs
    config: Mapping[str, Any],
) -> jax.stages.Lowered:
    """The layer's expert products alone, one batched product a weight, on rows that stand grouped by expert."""
    cfg = moejax.MoEConfig(**config)
    mesh = moejax.make_mesh(devices=devices, expert=len(devices))
    num_rows = len(devices) * cfg.cell_rows(TOKENS_A_DEVICE)
    wide, narrow = (cfg.num_experts, cfg.d_model, cfg.d_ff), (cfg.num_experts, cfg.d_ff, cfg.d_model)
    weights = {"up": wide, "gate": wide, "down": narrow}

    def experts(weights, rows):
        hidden = jax.nn.silu(jnp.einsum("erd,edf->erf", rows, weights["gate"]))
        hidden *= jnp.einsum("erd,edf->erf", rows, weights["up"])
        return jnp.einsum("erf,efd->erd", hidden, weights["down"])

    def loss(weights, rows):
        y = jax.shard_map(experts, in_specs=P("expert"), out_specs=P("expert"))(weights, rows)
        return jnp.square(y.astype(jnp.float32)).mean()

    with jax.set_mesh(mesh):
        arrays = {name: _array(mesh, shape, P("expert")) for name, shape in weights.items()}
        rows = _array(mesh, (cfg.num_experts, num_rows, cfg.d_model), P("expert"))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(arrays, rows)


def _array(mesh, shape, spec, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
