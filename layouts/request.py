"""What a user asks `search`, `explain` and `verify` for, as a Problem: options, and the head of a JSON file."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layouts.clusters import parse_cluster
from layouts.cost import Efficiency
from layouts.errors import InputError
from layouts.hardware import FORMATS, Cluster, unknown
from layouts.layout import Layout, load_layout
from layouts.network import LinkShares
from layouts.presets import load_model
from layouts.search import OBJECTIVES, Problem
from layouts.space import Space
from layouts.workload import MEGATRON, MOEJAX, Batch, Recipe
from moejax.codec import CODECS

RECIPES = {"moejax": MOEJAX, "megatron": MEGATRON}
# Of the whole batch where none is given: as many sequences a device, and at most so many.
_SEQUENCES, _MOST = 16, 1024


def add_problem(parser: argparse.ArgumentParser, required: bool) -> None:
    """The options that say what model, batch and devices a layout is for."""
    add = parser.add_argument
    add("--model", required=required, metavar="NAME|FILE", help="a name of `layouts models`, or a file")
    add("--cluster", required=required, metavar="NAME|FILE", help="v5p:8x8x8, h100:32x8, cpu:8, local, v5p-1024, a file")
    add("--global-batch", type=int, metavar="TOKENS", help="of one step; default 16 sequences a device, at most 1024")
    add("--seq", type=int, metavar="N", help="tokens of a sequence (4096)")
    add("--recipe", choices=list(RECIPES), help="how numbers are kept: moejax (default) or megatron")
    add("--format", choices=FORMATS, help="of the products: bf16, or fp32 on CPUs")
    add("--memory", type=float, metavar="GB", help="what a device may hold; default all it has")
    add("--imbalance", type=float, metavar="X", help="rows of the fullest device's experts over the mean; drops nothing")
    add("--loads", metavar="FILE", help="JSON list, each expert's share of the rows (or several such lists: their sum)")
    add("--efficiency", metavar="FILE", help="what `calibrate --json` wrote")


def problem_of(chosen: argparse.Namespace, head: Mapping[str, Any] | None = None) -> Problem:
    """The problem that options state, and where they are silent the head of a file.

    Raises:
      InputError: naming the value and what would be legal.
    """
    given = {key: getattr(chosen, key, None) for key in KEYS}
    said = {**dict(head or {}), **{key: value for key, value in given.items() if value is not None}}
    wrong = sorted(set(said) - set(KEYS))
    missing = [key for key in ("model", "cluster") if key not in said]
    if wrong or missing:
        what = f"unknown keys {wrong} in the file's problem" if wrong else f"needs --{missing[0]}: the file does not say"
        raise InputError(what)
    return _problem(said)


KEYS = (
    "model",
    "cluster",
    "global_batch",
    "seq",
    "recipe",
    "format",
    "memory",
    "imbalance",
    "loads",
    "efficiency",
    "objective",
    "codecs",
    "runnable",
)


def _problem(said: Mapping[str, Any]) -> Problem:
    model, cluster = load_model(said["model"]), parse_cluster(said["cluster"])
    on_cpu = all(part.chip.kind == "cpu" for part in cluster.classes)
    number_format = said.get("format") or ("fp32" if on_cpu else "bf16")
    memory = said.get("memory")
    if memory is not None and not memory > 0:
        raise InputError(f"--memory {memory:g}: needs GB above 0")
    space = Space(codecs=_codecs(said.get("codecs") or "plain"))
    return Problem(
        model,
        _batch(said, cluster),
        cluster,
        _recipe(said, number_format),
        number_format,
        read_efficiency(said["efficiency"]) if said.get("efficiency") else None,
        None if memory is None else memory * 1e9,
        space.runnable() if said.get("runnable") else space,
        said.get("objective") or OBJECTIVES[0],
    )


def _batch(said: Mapping[str, Any], cluster: Cluster) -> Batch:
    seq = said.get("seq") or 4096
    tokens = said.get("global_batch")
    if tokens is None:
        return Batch(seq, min(_MOST, _SEQUENCES * cluster.num_devices))
    if seq < 1 or tokens < 1 or tokens % seq:
        near = max(seq, tokens // max(seq, 1) * seq)
        raise InputError(f"--global-batch {tokens}: needs a multiple of the sequence's {seq} tokens, nearest {near}")
    return Batch(seq, tokens // seq)


def _recipe(said: Mapping[str, Any], number_format: str) -> Recipe:
    name = said.get("recipe") or "moejax"
    if name not in RECIPES:
        raise InputError(unknown("recipe", name, RECIPES))
    recipe = RECIPES[name]
    if number_format == "fp32":
        recipe = dataclasses.replace(recipe, compute_bytes=4)
    if said.get("imbalance") is not None:
        recipe = dataclasses.replace(recipe, capacity="exact", imbalance=said["imbalance"])
    if said.get("loads"):
        recipe = dataclasses.replace(recipe, capacity="exact", loads=read_loads(said["loads"]))
    return recipe


def read_loads(path: str) -> tuple[float, ...]:
    """Each expert's load: a JSON list of numbers, or a recorded trace, a list of such lists (steps or layers), summed.

    Raises:
      InputError: where the file is none of these.
    """
    found = read_json(path)
    rows = found if isinstance(found, list) and found and isinstance(found[0], list) else [found]
    try:
        return tuple(float(sum(column)) for column in zip(*rows, strict=True))
    except (TypeError, ValueError) as error:
        raise InputError(f"loads file {path!r}: needs a list of numbers, or several of one length ({error})") from error


def read_json(path: str) -> Any:
    """A JSON file's value.

    Raises:
      InputError: where there is none.
    """
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"file {path!r}: {error}") from error


def read_efficiency(path: str) -> Efficiency:
    """What `calibrate` wrote.

    Raises:
      InputError: for another schema, or names that are no constants.
    """
    found = read_json(path)
    if not isinstance(found, dict) or found.get("schema") != 1 or not isinstance(found.get("efficiency"), dict):
        raise InputError(f"efficiency file {path!r}: needs schema 1 and the table efficiency, as calibrate writes them")
    fields = dict(found["efficiency"])
    try:
        return Efficiency(**{**fields, "links": LinkShares(**fields.get("links", {}))})
    except TypeError as error:
        raise InputError(f"efficiency file {path!r}: {error}") from error


def _codecs(text: str) -> tuple[str | tuple[str, str], ...]:
    """ "plain,fp8+bf16": names, or forward+backward pairs."""
    found: list[str | tuple[str, str]] = []
    for word in text.split(","):
        names = word.split("+")
        for name in names:
            if name not in CODECS:
                raise InputError(unknown("codec", name, CODECS))
        if len(names) > 2:
            raise InputError(f"codec {word!r}: needs a name, or a pair forward+backward")
        found.append(names[0] if len(names) == 1 else (names[0], names[1]))
    return tuple(found)


def head_of(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options as a file's head keeps them, so that `explain` and `verify` ask the same question."""
    said = {key: getattr(chosen, key, None) for key in KEYS}
    return {key: value for key, value in said.items() if value not in (None, False)}


def read_layout(chosen: argparse.Namespace) -> tuple[Layout, Problem]:
    """The layout that a command names, and the problem that its file, or the options, state."""
    layout, entry = load_layout(chosen.layout)
    head = entry.get("problem")
    if head is not None and not isinstance(head, Mapping):
        raise InputError(f"layout file {chosen.layout!r}: problem={head!r}: needs a table, as search writes it")
    return layout, problem_of(chosen, head)
