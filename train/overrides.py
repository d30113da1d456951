"""`key=value` on the command line: dotted keys into a nested dataclass, values checked against its types."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from train.config import TrainConfig
from train.errors import InputError

# Facts that the model and its MoE layers must share: an override of the model's goes to the layers' too.
SHARED_WITH_MOE = ("d_model", "dtype", "param_dtype")
_WORDS = {"none": None, "null": None, "true": True, "false": False}
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a pair ('A', 'B')",
    type(None): "none",
}


def apply_overrides(cfg: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """The config with every override applied at once, so that their order does not matter.

    An override of `model.d_model`, `model.dtype` or `model.param_dtype` also sets the same key of `model.moe`, unless
    that key has an override of its own.

    Args:
      cfg: a config.
      overrides: texts "dotted.key=value"; values are Python literals or plain words, none, true and false among them.

    Raises:
      InputError: for an unknown key (the nearest ones offered), a value of the wrong type, or an impossible config.
    """
    values = dict(_read(cfg, text) for text in overrides)
    if cfg.model.moe is not None and "model.moe" not in values:
        for name in SHARED_WITH_MOE:
            if f"model.{name}" in values:
                values.setdefault(f"model.moe.{name}", values[f"model.{name}"])
    return _replace(cfg, values, "")


def all_keys(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a config that takes a value, with the value."""
    found = {}
    for field in dataclasses.fields(cfg):
        value, key = getattr(cfg, field.name), prefix + field.name
        found |= all_keys(value, f"{key}.") if _is_config(value) else {key: value}
    return found


def _read(cfg: TrainConfig, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r}: overrides are key=value, e.g. steps=100")
    keys = all_keys(cfg)
    if key == "model.moe" and value.lower() == "none":
        return key, None
    if key not in keys:
        raise InputError(_unknown(key, keys))
    return key, _parse(key, value, _hint(cfg, key))


def _unknown(key: str, keys: dict[str, Any]) -> str:
    """What to say of an unknown key: the nearest by spelling, and those that end in the same name."""
    last = key.rsplit(".", 1)[-1]
    same_end = [known for known in keys if known.rsplit(".", 1)[-1] == last]
    near = list(dict.fromkeys([*same_end, *difflib.get_close_matches(key, keys, n=3)]))[:4]
    offered = f"nearest keys: {', '.join(near)}" if near else f"legal keys: {', '.join(keys)}"
    return f"unknown key {key!r}; {offered}"


def _hint(cfg: Any, key: str) -> Any:
    for part in key.split(".")[:-1]:
        cfg = getattr(cfg, part)
    return typing.get_type_hints(type(cfg))[key.rsplit(".", 1)[-1]]


def _parse(key: str, text: str, hint: Any) -> Any:
    """The value that the text stands for under this type: the literal it spells or, failing that, the text itself."""
    for candidate in _candidates(text):
        try:
            return _adapter(hint).validate_python(candidate, strict=True)
        except ValidationError:
            continue
    raise InputError(f"{key}={text!r}: needs {_describe(hint)}")


def _candidates(text: str):
    if text.lower() in _WORDS:
        yield _WORDS[text.lower()]
    with contextlib.suppress(ValueError, SyntaxError):
        yield ast.literal_eval(text)
    yield text


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _describe(hint: Any) -> str:
    args = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    named = [_NAMES[typing.get_origin(arg) or arg] for arg in args if (typing.get_origin(arg) or arg) in _NAMES]
    return " or ".join(named)


def _replace(node: Any, values: dict[str, Any], prefix: str) -> Any:
    changes = {}
    for field in dataclasses.fields(node):
        key, child = prefix + field.name, getattr(node, field.name)
        if key in values:
            changes[field.name] = values[key]
        elif _is_config(child) and any(name.startswith(f"{key}.") for name in values):
            changes[field.name] = _replace(child, values, f"{key}.")
    try:
        return dataclasses.replace(node, **changes)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{prefix}{error}") from error


def _is_config(value: Any) -> bool:
    """Whether keys go on inside the value: routers are dataclasses too, but given by name."""
    return dataclasses.is_dataclass(value) and type(value).__name__.endswith("Config")
