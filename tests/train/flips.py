"""Which experts every token chose, and where two runs first choose differently."""

from collections.abc import Callable
from unittest import mock

import jax
import numpy as np
from jax.experimental import io_callback

import moejax.line
from moejax import make_mesh
from moejax.step import TrainState, make_eval_step
from moejax.transformer import TransformerConfig


def make_choices(cfg: TransformerConfig) -> Callable[[TrainState, dict], np.ndarray]:
    """A function from (state, batch) to the experts [layers, tokens, k] of every token, worked out on one device."""
    found, route = [], moejax.line.route

    def recording(*args):
        routing = route(*args)
        io_callback(lambda expert: found.append(np.array(expert)), None, routing.expert, ordered=True)
        return routing

    evaluate = jax.jit(make_eval_step(cfg))

    def choices(state: TrainState, batch: dict) -> np.ndarray:
        found.clear()
        params, router, batch = jax.device_get((state.params, state.router, batch))
        with mock.patch.object(moejax.line, "route", recording), jax.set_mesh(make_mesh(data=1)):
            jax.block_until_ready(evaluate(params, router, batch))
            jax.effects_barrier()
        return np.stack(found)

    return choices


def first_flip(here: np.ndarray, there: np.ndarray, first_step: int = 0) -> str:
    """Says where the experts of two runs [steps, layers, tokens, k] first differ; the order within k does not count."""
    differs = (np.sort(here) != np.sort(there)).any(-1)
    if not differs.any():
        return "no routing choice differs"
    step, layer, token = np.argwhere(differs)[0]
    return (
        f"first routing choice that differs: step {first_step + step}, MoE layer {layer}, token {token}: "
        f"experts {here[step, layer, token].tolist()} here, {there[step, layer, token].tolist()} there; "
        f"{differs[step].sum()} choices differ in that step"
    )
