"""How a cluster is written: its topology, "v5p:8x8x8" (chips along each torus axis), "h100:32x8" (hosts x GPUs), "cpu:8"
(virtual devices), "local" (the devices at hand), a cloud's own name ("v5p-1024", "p5.48xlarge:32"), "4*v6e:16x16" (slices
joined by the data centre's network), several of these joined by "+" (device classes that differ), or a TOML or JSON file.
"""

import dataclasses
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layouts.errors import InputError
from layouts.hardware import Chip, Cluster, DeviceClass, chips, instances, link_from, unknown

ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "a100": "a100-80", "v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x"}
# TPU names of the cloud: the number after the dash counts cores for these, chips for the others.
CORES_A_CHIP = {"v4": 2, "v5p": 2, "tpu7x": 2, "v5e": 1, "v6e": 1}
# Figures of a device that a cluster file may state anew, and how each is read.
FIGURES = {
    "hbm_bytes": float,
    "hbm_bytes_per_second": float,
    "flops_per_second": lambda entry: tuple((name, float(value)) for name, value in entry.items()),
    "fabric": link_from,
    "domain": int,
    "network": link_from,
    "host_link": link_from,
    "host_bytes": float,
}


def parse_cluster(text: str) -> Cluster:
    """The cluster that `text` writes; see the head of this module.

    Raises:
      InputError: for an unknown name (the nearest ones named), a shape of the wrong form, or a file that is none.
    """
    if Path(text).suffix in (".toml", ".json"):
        return _from_file(Path(text))
    if text == "local":
        return _cluster([_local()])
    return _cluster([_parse_class(part) for part in text.split("+")])


def _cluster(classes: list[DeviceClass], **fields: Any) -> Cluster:
    slowest = min((part.chip.network for part in classes), key=lambda link: link.bytes_per_second)
    return Cluster(**{"classes": tuple(classes), "between": slowest, **fields})


def _parse_class(text: str) -> DeviceClass:
    """One device class: [SLICES*]NAME:SHAPE or a cloud's name."""
    times, star, rest = text.strip().rpartition("*")
    slices = _count(text, times) if star else 1
    name, colon, sizes = rest.partition(":")
    if name in instances():
        return _of_instance(text, name, slices * (_count(text, sizes) if colon else 1))
    if not colon and ALIASES.get(name.lower(), name.lower()) not in chips():
        return dataclasses.replace(_of_cloud_tpu(text, rest), slices=slices)
    chip = _find_chip(text, name)
    return DeviceClass(chip, _shape(text, chip, sizes), slices, text.strip())


def _find_chip(text: str, name: str) -> Chip:
    name = ALIASES.get(name.lower(), name.lower())
    if name not in chips():
        raise InputError(unknown(f"cluster {text!r}: chip", name, [*chips(), *ALIASES, *instances()], legal=list(chips())))
    return chips()[name]


def _shape(text: str, chip: Chip, sizes: str) -> tuple[int, ...]:
    rank = chip.axes or {"gpu": 2, "cpu": 1}[chip.kind]
    form = {
        "tpu": f"chips along {rank} axes, as in {chip.name}:{'x'.join('4' * rank)}",
        "gpu": f"hosts x GPUs, as in {chip.name}:2x{min(chip.host_chips, 8)}",
        "cpu": "a number of devices, as in cpu:8",
    }
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 != rank:
        raise InputError(f"cluster {text!r}: after {chip.name!r} needs {form[chip.kind]}")
    shape = tuple(map(int, sizes.split("x")))
    if chip.kind == "gpu" and shape[1] > chip.host_chips:
        hosts = -(-math.prod(shape) // chip.host_chips)
        raise InputError(
            f"cluster {text!r}: a host has at most {chip.host_chips} of {chip.name}; legal would be "
            f"{chip.name}:{hosts}x{chip.host_chips}"
        )
    return shape


def _of_instance(text: str, name: str, hosts: int) -> DeviceClass:
    entry = instances()[name]
    chip = _find_chip(text, entry["chip"])
    network = dataclasses.replace(chip.network, bytes_per_second=entry["network_bytes_per_second"])
    return DeviceClass(dataclasses.replace(chip, network=network), (hosts, entry["gpus"]), 1, text.strip())


def _of_cloud_tpu(text: str, name: str) -> DeviceClass:
    """A slice by the cloud's name: FAMILY-NUMBER, where the number counts cores for v4, v5p and tpu7x, chips for the rest."""
    family, _, number = name.rpartition("-")
    family = ALIASES.get(family.lower(), family.lower())
    if family not in CORES_A_CHIP or not number.isdigit():
        known = [*chips(), *instances(), "local", *(f"{tpu}-" for tpu in CORES_A_CHIP)]
        raise InputError(
            unknown("cluster", text, known, legal=["v5p:8x8x8", "h100:32x8", "cpu:8", "local", "v5p-1024", "a file"])
        )
    chip, cores = chips()[family], CORES_A_CHIP[family]
    if int(number) % cores or not int(number):
        low = max(cores, int(number) // cores * cores)
        raise InputError(
            f"cluster {text!r}: {family} counts cores, {cores} a chip; nearest {family}-{low} or {family}-{low + cores}"
        )
    count = int(number) // cores
    return DeviceClass(chip, _usual_shape(text, chip, count), 1, text.strip())


def _usual_shape(text: str, chip: Chip, count: int) -> tuple[int, ...]:
    """The shape that a cloud gives `count` chips: the most cubic one, of whole cubes of 4x4x4 in 3 axes, whole rings in 2."""
    found = _slices(chip, count)
    if not found:
        low = max(n for n in range(1, count) if _slices(chip, n))
        high = next((n for n in range(count + 1, 2 * count + 1) if _slices(chip, n)), None)
        near = f"{low} or {high}" if high else str(low)
        raise InputError(f"cluster {text!r}: {count} chips of {chip.name} make no slice; nearest {near} chips")
    shape = min(found, key=lambda sizes: (max(sizes) - min(sizes), sizes))
    # The clouds write one host of four chips as 2x2x1, and the larger sizes last elsewhere.
    return tuple(sorted(shape, reverse=True)) if count == 4 and chip.axes == 3 else shape


def _slices(chip: Chip, count: int) -> list[tuple[int, ...]]:
    """The shapes of `count` chips that can be had: in 3 axes whole cubes or a part of one, in 2 within one pod."""
    shapes = _factors(count, chip.axes)
    if chip.axes == 2:
        return [shape for shape in shapes if max(shape) <= chip.ring]
    part = [shape for shape in shapes if all(size in (1, 2, 4) for size in shape)]
    return part or [shape for shape in shapes if all(size % chip.ring == 0 for size in shape)]


def _factors(count: int, rank: int, least: int = 1) -> list[tuple[int, ...]]:
    """All ways of writing `count` as a product of `rank` factors that do not decrease."""
    if rank == 1:
        return [(count,)] if count >= least else []
    heads = [n for n in range(least, math.isqrt(count) + 1) if count % n == 0]
    return [(head, *tail) for head in heads for tail in _factors(count // head, rank - 1, head)]


def _local() -> DeviceClass:
    """The devices that jax finds here."""
    import jax  # asked only for "local": looking for devices takes a second

    found = jax.devices()
    kind = found[0].device_kind
    chip = next((chip for chip in chips().values() if kind in chip.device_kinds), None)
    if chip is None:
        known = ", ".join(name for chip in chips().values() for name in chip.device_kinds)
        raise InputError(f"cluster 'local': jax's devices are {kind!r}; known are {known}; describe them in a cluster file")
    hosts = len({device.process_index for device in found})
    shape = {"cpu": (len(found),), "gpu": (hosts, len(found) // hosts)}.get(chip.kind) or _torus_shape(found)
    return DeviceClass(chip, shape, 1, "local")


def _torus_shape(found: list[Any]) -> tuple[int, ...]:
    """Chips along each axis, from the devices' coordinates."""
    coordinates = [device.coords for device in found]
    return tuple(len(set(axis)) for axis in zip(*coordinates, strict=True))


def _from_file(path: Path) -> Cluster:
    """A cluster file: {schema: 1, classes: [{cluster, ...figures that differ}], excluded, slow, between}."""
    entry = _read_table(path)
    wrong = set(entry) - {"schema", "classes", "excluded", "slow", "between"}
    if entry.get("schema") != 1 or wrong or not entry.get("classes"):
        what = f"keys {sorted(wrong)}" if wrong else f"schema {entry.get('schema')!r}"
        raise InputError(f"cluster file {path}: {what}; needs schema 1, classes, and optionally between, excluded, slow")
    fields: dict[str, Any] = {"excluded": tuple(entry.get("excluded", ()))}
    fields["slow"] = tuple((int(index), float(speed)) for index, speed in entry.get("slow", {}).items())
    try:
        if "between" in entry:
            fields["between"] = link_from(entry["between"])
        return _cluster([_class_from_file(path, part) for part in entry["classes"]], **fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"cluster file {path}: {type(error).__name__} {error}; see docs/layouts.md for its form") from error


def _read_table(path: Path) -> dict[str, Any]:
    """A TOML or JSON file's table.

    Raises:
      InputError: where there is none, or it does not parse.
    """
    try:
        text = path.read_text()
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"file {str(path)!r}: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"file {str(path)!r}: holds a {type(found).__name__}, needs a table")
    return found


def _class_from_file(path: Path, entry: Mapping[str, Any]) -> DeviceClass:
    """A device class: {cluster: "h100:4x8"} and, where they differ from the known chip's, its figures under their own names."""
    part = _parse_class(entry["cluster"])
    changed = {key: value for key, value in entry.items() if key != "cluster"}
    if set(changed) - set(FIGURES):
        raise InputError(f"cluster file {path}: figure {sorted(set(changed) - set(FIGURES))}: legal are {', '.join(FIGURES)}")
    read = {key: FIGURES[key](value) for key, value in changed.items()}
    return dataclasses.replace(part, chip=dataclasses.replace(part.chip, **read))


def _count(text: str, number: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", number):
        raise InputError(f"cluster {text!r}: {number!r} is no count; needs a whole number of at least 1")
    return int(number)
