"""AdamW with warm-up and cosine decay, after clipping by the global norm."""

from typing import Any

import jax
import optax

from train.config import TrainConfig


def make_schedule(cfg: TrainConfig) -> optax.Schedule:
    """Learning rate by step: linear from 0 over the warm-up, then a cosine to `final_fraction` at the last step."""
    rate, warmup = cfg.optimizer.learning_rate, cfg.optimizer.warmup_steps
    decay_steps = max(cfg.steps, warmup + 1)
    return optax.warmup_cosine_decay_schedule(0.0, rate, warmup, decay_steps, rate * cfg.optimizer.final_fraction)


def make_optimizer(cfg: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of a run."""
    chosen = cfg.optimizer
    adamw = optax.adamw(make_schedule(cfg), chosen.b1, chosen.b2, chosen.eps, weight_decay=chosen.weight_decay, mask=_decays)
    return optax.chain(optax.clip_by_global_norm(chosen.clip_norm), adamw)


def _decays(params: Any) -> Any:
    """True for matrices. Norms' scales are told by name: stacked over layers they have two axes as well."""
    return jax.tree.map_with_path(lambda path, _: getattr(path[-1], "key", None) != "scale", params)
