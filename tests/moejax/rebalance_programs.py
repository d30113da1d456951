"""What the ahead-of-time tests of lent experts compile: a builder that `layouts.aot` calls in its child process."""

import jax

import moejax
from tests.layouts.programs import layer


def lending_layer(devices, rebalance: dict, **config) -> jax.stages.Lowered:
    """`tests.layouts.programs.layer` with experts lent along its axis; `rebalance` overrides the rule's fields."""
    return layer(devices, rebalance=moejax.RebalanceConfig(**rebalance), **config)
