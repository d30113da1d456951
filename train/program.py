"""The run's jitted programs, with the compiler options of the mesh's platform."""

import jax

from moejax import compiler_options
from moejax.axes import platform
from moejax.pipeline_step import make_pipeline_eval, make_pipeline_step
from moejax.step import make_eval_step, make_train_step
from train.config import RULES, TrainConfig
from train.optimizer import make_optimizer
from train.stages import make_pipeline


def train_program(cfg: TrainConfig) -> jax.stages.Wrapped:
    """(state, batch) -> (next state, metrics); the state is donated. Under `jax.set_mesh`."""
    optimizer, pipeline = make_optimizer(cfg), make_pipeline(cfg)
    if pipeline is None:
        step = make_train_step(cfg.model, optimizer, cfg.num_microbatches, RULES, cfg.microbatch_overlap, cfg.seed)
    else:
        step = make_pipeline_step(cfg.model, optimizer, pipeline, RULES)
    return jax.jit(step, donate_argnums=0, compiler_options=_options(cfg))


def eval_program(cfg: TrainConfig) -> jax.stages.Wrapped:
    """(params, router, batch) -> {"loss_sum", "num_targets"}, and "expert" where it is traced. Under `jax.set_mesh`."""
    pipeline = make_pipeline(cfg)
    if pipeline is None:
        step = make_eval_step(cfg.model, RULES, record=cfg.trace_tokens > 0)
    else:
        step = make_pipeline_eval(cfg.model, pipeline, RULES)
    return jax.jit(step, compiler_options=_options(cfg))


def _options(cfg: TrainConfig) -> dict[str, str | bool]:
    return compiler_options(platform(), deterministic=cfg.deterministic)
