"""The layer that drops nothing against Hugging Face transformers' MoE block in PyTorch, on the same cores.

The block is Mixtral's with its "grouped_mm" experts, in eager mode, as transformers runs it; weights, tokens and routing
are the layer's, and outputs and gradients are compared before anything is timed. float32. The last columns say how much
of the rest is the compiler's own matrix product: XLA's bare products, on grouped rows, over the whole block, and one
dense product of the same FLOPs, jnp.dot over torch.mm.
"""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, harness
from benchmarks.cases import Shape

AIM = "over the block of transformers <= 1.0"
PACKAGES = ("torch", "transformers")
NAMES = ("layer", "torch")
ROUNDS = 7
TOLERANCE = 1e-4


def unavailable() -> str | None:
    """Why this benchmark cannot run here; None where it can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"no {' and '.join(missing)} here: install a CPU build of torch, then .venv/bin/pip install '.[bench]'"


def run() -> list[dict]:
    """A row per shape and direction."""
    _torch().set_num_threads(harness.measured_on()["num_cores"])
    return [_row(shape, direction) for shape in cases.SHAPES for direction in cases.DIRECTIONS]


def _row(shape: Shape, direction: str) -> dict:
    runs = _runs(shape, direction)
    layer, block = (_outputs(runs[name](), name, direction) for name in NAMES)
    harness.check_equal(layer, block, TOLERANCE)
    seconds = harness.interleaved_seconds(runs, ROUNDS)
    over = lambda a, b: harness.ratio(seconds, a, b)["ratio"]
    medians = harness.median_seconds({name: seconds[name] for name in NAMES})
    figures = {"ratio": over("layer", "torch"), "bare_over_torch": over("bare", "torch"), "dot_over_mm": over("dot", "mm")}
    return {**shape.columns(), "direction": direction, **medians, **figures}


def _runs(shape: Shape, direction: str) -> dict:
    wrap, params, x = cases.DIRECTIONS[direction], cases.weights(shape), cases.tokens(shape, cases.uniform)
    layer = cases.layer(shape.config(**cases.DROPLESS, aux_loss=0.0, z_loss=0.0))
    rows = cases.grouped(shape, shape.num_experts, shape.num_rows // shape.num_experts)
    experts = {name: value for name, value in params.items() if name != "router"}
    return {
        "layer": cases.bound(wrap(layer), params, x),
        "torch": _block(shape, params, x, gradients=direction != "forward"),
        "bare": cases.bound(wrap(cases.products), experts, rows),
        "dot": cases.bound(jax.jit(jnp.dot), rows.reshape(-1, shape.d_model), params["expert_up"][0]),
        "mm": _mm(rows.reshape(-1, shape.d_model), params["expert_up"][0]),
    }


def _outputs(found: Any, name: str, direction: str) -> tuple:
    """Of a run of the layer or of the block: y, and the gradients of router, up, gate, down and tokens."""
    if direction == "forward":
        return (found[0],)
    if name == "layer":
        (_, y), (gradients, d_x) = found
        return (y, *(gradients[name] for name in ("router", "expert_up", "expert_gate", "expert_down")), d_x)
    y, d_router, d_both, d_down, d_x = found
    d_gate, d_up = np.split(np.asarray(d_both), 2, axis=1)
    return (y, *(np.swapaxes(part, -1, -2) for part in (d_router, d_up, d_gate, d_down)), d_x)


def _block(shape: Shape, params, x, gradients: bool):
    """A run of the block: y, and where asked the gradients of its parameters, in its own layout, and of its tokens."""
    torch, modeling_mixtral = _torch(), importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    config = modeling_mixtral.MixtralConfig(
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        experts_implementation="grouped_mm",
    )
    block = modeling_mixtral.MixtralSparseMoeBlock(config)
    both = jnp.concatenate([params["expert_gate"], params["expert_up"]], -1)
    state = {"gate.weight": params["router"], "experts.gate_up_proj": both, "experts.down_proj": params["expert_down"]}
    block.load_state_dict({name: _tensor(value).mT.contiguous() for name, value in state.items()})
    tokens = _tensor(x).requires_grad_(gradients)

    def forward():
        with torch.no_grad():
            return (block(tokens),)

    def backward():
        y = block(tokens)
        leaves = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj, tokens]
        return y.detach(), *torch.autograd.grad(y.square().mean(), leaves)

    return backward if gradients else forward


def _mm(a, b):
    a, b = _tensor(a), _tensor(b)
    return lambda: _torch().mm(a, b)


def _tensor(value):
    return _torch().from_numpy(np.array(value))


def _torch() -> Any:
    """The package, which only this benchmark needs."""
    return importlib.import_module("torch")
