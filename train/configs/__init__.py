"""Configs: functions in files of their own names, whose docstrings state hardware, step time and evidence."""

import difflib
from collections.abc import Callable

from train.config import TrainConfig
from train.configs.demo import demo
from train.configs.olmoe_1b_7b import olmoe_1b_7b
from train.configs.tiny import tiny
from train.errors import InputError

CONFIGS: dict[str, Callable[[], TrainConfig]] = {made.__name__: made for made in (demo, tiny, olmoe_1b_7b)}


def get_config(name: str) -> TrainConfig:
    """The config of this name.

    Raises:
      InputError: for an unknown name, offering the nearest.
    """
    if name not in CONFIGS:
        near = difflib.get_close_matches(name, CONFIGS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"unknown config {name!r}; {hint}legal are {', '.join(CONFIGS)}")
    return CONFIGS[name]()


def list_configs() -> str:
    """A line for each config: its name and the first line of its docstring."""
    width = max(map(len, CONFIGS))
    return "\n".join(f"{name:<{width}}  {_summary(made)}" for name, made in CONFIGS.items())


def _summary(made: Callable[[], TrainConfig]) -> str:
    """The first line of the docstring; nothing where docstrings are stripped (python -OO)."""
    return (made.__doc__ or "").strip().partition("\n")[0]
