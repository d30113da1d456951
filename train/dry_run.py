"""What a run would be, without running a step: shapes, shardings, parameters, memory."""

import dataclasses

import jax
import numpy as np

from moejax.step import TrainState
from train.config import PipelineConfig, TrainConfig
from train.data import abstract_batch
from train.distributed import start_mesh
from train.program import train_program
from train.run import abstract_run_state


def dry_run(cfg: TrainConfig) -> list[str]:
    """Lines: every parameter's shape and sharding, counts, and the compiled step's bytes on a device.

    Raises:
      InputError: where the mesh asks for more devices than there are.
    """
    mesh = start_mesh(cfg.mesh)
    with jax.set_mesh(mesh):
        state = abstract_run_state(cfg)
        compiled = train_program(cfg).lower(state, abstract_batch(cfg, mesh)).compile()
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return [
        f"mesh        {sizes} = {mesh.size} {mesh.devices.flat[0].platform} devices",
        f"batch       {cfg.global_batch} rows of {cfg.seq} tokens in {cfg.num_microbatches} micro-batches",
        *_parameter_lines(state),
        *_count_lines(cfg, state),
        *_memory_lines(compiled.memory_analysis()),
    ]


def _parameter_lines(state: TrainState) -> list[str]:
    found = jax.tree.leaves_with_path(state.params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    width = max(map(len, names))
    lines = [f"{'parameter':<{width}}  {'shape':<24}{'on one device':<24}sharding"]
    for name, (_, leaf) in zip(names, found, strict=True):
        part = leaf.sharding.shard_shape(leaf.shape)
        lines.append(f"{name:<{width}}  {leaf.shape!s:<24}{part!s:<24}{leaf.dtype} {tuple(leaf.sharding.spec)}")
    return lines


def _count_lines(cfg: TrainConfig, state: TrainState) -> list[str]:
    # Without stages, which hold empty slots where their layers are uneven.
    plain = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, stage=1), pipeline=PipelineConfig())
    model, (total, routed) = cfg.model, count_parameters(abstract_run_state(plain))
    active = total - routed + (routed * model.moe.top_k // model.moe.num_experts if model.moe else 0)
    held = sum(_part_bytes(leaf) for leaf in jax.tree.leaves(state))
    return [
        f"parameters  {total:,}, of which {active:,} active for a token",
        f"state       {held:,} bytes on a device (parameters, optimizer, router)",
    ]


def count_parameters(state: TrainState) -> tuple[int, int]:
    """(all parameters, those of routed experts)."""
    sizes = [
        (int(np.prod(leaf.shape)), "expert_" in jax.tree_util.keystr(path))
        for path, leaf in jax.tree.leaves_with_path(state.params)
    ]
    return sum(size for size, _ in sizes), sum(size for size, is_routed in sizes if is_routed)


def _memory_lines(analysis) -> list[str]:
    parts = [getattr(analysis, f"{name}_size_in_bytes", 0) for name in ("argument", "output", "alias", "temp")]
    if not any(parts):
        return ["memory      unverified: the compiler gave no figures"]
    arguments, outputs, alias, temp = parts
    peak = arguments + outputs - alias + temp
    shown = f"arguments {arguments:,} + outputs {outputs:,} - shared by both {alias:,} + temporary {temp:,}"
    return [f"memory      {peak:,} bytes on a device: {shown}"]


def _part_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
