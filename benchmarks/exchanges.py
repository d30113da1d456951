"""Every way across the expert axis against the bare products of the true FLOPs, on 8 virtual CPU devices.

The plain products get every device's even share of the true rows, grouped already. Routing: logits are a token's own, normal
with deviation 0.5, plus, for Zipf, -log(1 + rank) of the expert: exponent 1. Runs in a child process, since the number of
virtual devices is fixed when jax starts. t: tokens of a device, d: model width, f: expert width, k: experts per token.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import moejax
from benchmarks import harness

AIM = "uniform at 1.25: <= 1.2 forward, <= 1.35 forward+backward; Zipf with nothing dropped: <= 2 and <= 2.2"
NUM_DEVICES, NUM_TOKENS, D_MODEL, D_FF, TOP_K = 8, 512, 256, 512, 2
WAYS = {
    "cells": {},
    "pools": {"capacity": "pool"},
    "all_gather": {"exchange": "all_gather"},
    "weight_stream": {"exchange": "weight_stream"},
}
ROUNDS = 7


def run() -> list[dict]:
    """A row per number of experts, load, way across and direction."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    environment = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.exchanges"]
    done = subprocess.run(command, env=environment, cwd=harness.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _rows() -> list[dict]:
    loads = {"uniform": 1.25, "zipf": None}
    with jax.set_mesh(moejax.make_mesh(expert=NUM_DEVICES)):
        return [row for e in (16, 64) for load, factor in loads.items() for row in _case(e, load, factor)]


def _case(num_experts: int, load: str, capacity_factor: float | None) -> list[dict]:
    base = {"d_model": D_MODEL, "d_ff": D_FF, "num_experts": num_experts, "top_k": TOP_K, "dtype": "float32"}
    found = []
    params, x = _inputs(moejax.MoEConfig(**base), load)
    for direction, wrap in (("forward", lambda fn: fn), ("forward+backward", _with_gradients)):
        runs = {"plain": _bound(wrap(_plain), *_grouped(params, num_experts))}
        for name, way in WAYS.items():
            cfg = moejax.MoEConfig(**base, **way, capacity_factor=capacity_factor)
            runs[name] = _bound(wrap(_layer(cfg)), params, x)
        seconds = harness.interleaved_seconds(runs, ROUNDS)
        for name in WAYS:
            case = {"num_experts": num_experts, "load": load, "capacity_factor": str(capacity_factor), "way": name}
            found.append({**case, "direction": direction, **harness.ratio(seconds, name, "plain")})
    return found


def _inputs(cfg, load):
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape) / shape[-2] ** 0.5 for name, shape in _shapes(cfg).items()}
    x = rng.standard_normal((NUM_DEVICES, NUM_TOKENS, D_MODEL))
    x[..., 0] = 1
    params["router"] *= 0.5
    params["router"][0] = -np.log1p(np.arange(cfg.num_experts)) if load == "zipf" else 0
    place = lambda value, spec: jax.device_put(
        jnp.asarray(value, jnp.float32), jax.NamedSharding(jax.sharding.get_mesh(), spec)
    )
    specs = {name: jax.P() if name == "router" else jax.P("expert") for name in params}
    return {name: place(value, specs[name]) for name, value in params.items()}, place(x, jax.P("expert"))


def _shapes(cfg):
    wide, narrow = (cfg.num_experts, D_MODEL, D_FF), (cfg.num_experts, D_FF, D_MODEL)
    return {"router": (D_MODEL, cfg.num_experts), "expert_up": wide, "expert_gate": wide, "expert_down": narrow}


def _layer(cfg):
    return lambda params, x: moejax.moe(params, x, None, None, cfg=cfg)[0]


def _grouped(params, num_experts):
    rows = NUM_DEVICES * NUM_TOKENS * TOP_K // num_experts
    x = jax.random.normal(jax.random.key(1), (num_experts, rows, D_MODEL))
    return params, jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("expert")))


def _plain(params, x):
    def products(up, gate, down, x):
        hidden = jax.nn.silu(jnp.einsum("erd,edf->erf", x, gate)) * jnp.einsum("erd,edf->erf", x, up)
        return jnp.einsum("erf,efd->erd", hidden, down)

    weights = (params[f"expert_{name}"] for name in ("up", "gate", "down"))
    return jax.shard_map(products, in_specs=jax.P("expert"), out_specs=jax.P("expert"))(*weights, x)


def _with_gradients(forward):
    def loss(params, x):
        y = forward(params, x)
        return jnp.square(y).mean(), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


def _bound(fn, params, x):
    run = jax.jit(fn)
    return lambda: run(params, x)


if __name__ == "__main__":
    json.dump(_rows(), sys.stdout)
