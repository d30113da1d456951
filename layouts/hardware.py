"""Chips, links and clusters: numbers with units and sources, read from data/chips.toml and data/instances.toml."""

import dataclasses
import difflib
import functools
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from layouts.errors import InputError

DATA = Path(__file__).resolve().parent / "data"
FORMATS = ("fp4", "fp8", "bf16", "fp32")


@dataclasses.dataclass(frozen=True)
class Link:
    """What joins devices.

    Attributes:
      kind: "ici", "nvlink", "infinity_fabric", "infiniband", "dcn", "memory" ...
      bytes_per_second: in one direction; for "ici" of one link along one axis, else of one device.
      latency_seconds: of one message over one hop.
    """

    kind: str
    bytes_per_second: float
    latency_seconds: float


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator; figures are those of one *jax device* (a TPU7x chip is two).

    Attributes:
      name: key in data/chips.toml.
      title: the vendor's name.
      kind: "tpu", "gpu" or "cpu".
      devices: jax devices on one chip.
      device_kinds: what jax calls such a device.
      flops_per_second: (format, dense peak) pairs.
      hbm_bytes: memory.
      hbm_bytes_per_second: its bandwidth.
      fabric: the fast link.
      axes: torus axes of the fabric; 0 for a switch.
      ring: an axis of the torus is a ring where its length is a multiple of this.
      domain: chips that a switched fabric joins.
      network: the link between domains.
      host_link: a device's link to its host's memory.
      host_chips: chips of one host.
      host_bytes: memory of one host.
      sources: (figure, where it comes from) pairs.
    """

    name: str
    title: str
    kind: str
    devices: int
    device_kinds: tuple[str, ...]
    flops_per_second: tuple[tuple[str, float], ...]
    hbm_bytes: float
    hbm_bytes_per_second: float
    fabric: Link
    axes: int
    ring: int
    domain: int
    network: Link
    host_link: Link
    host_chips: int
    host_bytes: float
    sources: tuple[tuple[str, str], ...]

    def peak(self, number_format: str) -> float:
        """Dense FLOP/s in this format; a format that the chip lacks runs at the rate of the next wider one it has.

        Raises:
          InputError: for an unknown format.
        """
        if number_format not in FORMATS:
            raise InputError(unknown("number format", number_format, FORMATS))
        have = dict(self.flops_per_second)
        wider = [name for name in FORMATS[FORMATS.index(number_format) :] if name in have]
        return have[wider[0] if wider else max(have, key=FORMATS.index)]


@dataclasses.dataclass(frozen=True)
class DeviceClass:
    """Devices of one kind, wired alike.

    Attributes:
      chip: the kind.
      shape: chips along each torus axis; (hosts, chips a host); (devices,) for the CPU.
      slices: how many of these, joined by the network.
      source_name: the name it was written under.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1
    source_name: str = ""

    @property
    def num_chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def num_devices(self) -> int:
        """jax devices in all slices."""
        return self.num_chips * self.chip.devices

    @property
    def domain_devices(self) -> int:
        """jax devices that the fast link joins: a slice of a torus; of a switch whole hosts, the same number in each domain."""
        if self.chip.axes:
            return math.prod(self.shape) * self.chip.devices
        hosts, chips = self.shape if len(self.shape) == 2 else (1, self.shape[0])
        across = self.chip.domain // chips if self.chip.domain > self.chip.host_chips else 1
        joined = max(n for n in range(1, hosts + 1) if hosts % n == 0 and n <= max(across, 1))
        return joined * chips * self.chip.devices

    @property
    def rings(self) -> tuple[bool, ...]:
        """For each torus axis whether it wraps around; () for a switch. Three axes all do, or none does."""
        found = tuple(size % self.chip.ring == 0 for size in self.shape) if self.chip.axes else ()
        return (all(found),) * 3 if len(found) == 3 else found

    def __str__(self) -> str:
        times = f"{self.slices}*" if self.slices > 1 else ""
        return f"{times}{self.chip.name}:{'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices of a job: one class of them, or several that differ.

    Attributes:
      classes: in the order of their devices.
      between: the link between classes; the slowest of their networks unless a file says otherwise.
      excluded: indices of devices not to be used.
      slow: (device index, its speed as a fraction of the others') pairs.
    """

    classes: tuple[DeviceClass, ...]
    between: Link
    excluded: tuple[int, ...] = ()
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        count = sum(part.num_devices for part in self.classes)
        for index in (*self.excluded, *(index for index, _ in self.slow)):
            if type(index) is not int or not 0 <= index < count:
                raise InputError(f"device {index!r} of {self}: legal are 0 to {count - 1}")
        for index, speed in self.slow:
            if not 0 < speed <= 1:
                raise InputError(f"speed {speed!r} of device {index} of {self}: needs a fraction above 0 and at most 1")

    @property
    def num_devices(self) -> int:
        """Devices that can be used."""
        return sum(part.num_devices for part in self.classes) - len(set(self.excluded))

    @property
    def is_mixed(self) -> bool:
        """Whether its device classes differ."""
        return len(self.classes) > 1

    def __str__(self) -> str:
        return "+".join(map(str, self.classes))


@functools.cache
def chips() -> dict[str, Chip]:
    """All known chips by name."""
    return {name: _chip(name, entry) for name, entry in tomllib.loads((DATA / "chips.toml").read_text()).items()}


@functools.cache
def instances() -> dict[str, dict[str, Any]]:
    """Machine types by the clouds' own names: chip, gpus a host, network_bytes_per_second a chip, source."""
    return tomllib.loads((DATA / "instances.toml").read_text())


def _chip(name: str, entry: Mapping[str, Any]) -> Chip:
    parts = entry["devices"]
    fabric, network, host = entry["fabric"], entry["network"], entry["host"]
    return Chip(
        name=name,
        title=entry["title"],
        kind=entry["kind"],
        devices=parts,
        device_kinds=tuple(entry["device_kinds"]),
        flops_per_second=tuple((key, value / parts) for key, value in entry["flops_per_second"].items()),
        hbm_bytes=entry["hbm_bytes"] / parts,
        hbm_bytes_per_second=entry["hbm_bytes_per_second"] / parts,
        fabric=link_from(fabric, parts),
        axes=fabric.get("axes", 0),
        ring=fabric.get("ring", 1),
        domain=fabric.get("domain", 0),
        network=link_from(network, parts),
        host_link=link_from(host, parts),
        host_chips=host["chips"],
        host_bytes=host["bytes"],
        sources=tuple(entry["sources"].items()),
    )


def link_from(entry: Mapping[str, Any], parts: int = 1) -> Link:
    """A link out of a table; its bandwidth is shared by `parts` devices."""
    return Link(entry["kind"], entry["bytes_per_second"] / parts, entry["latency_seconds"])


def unknown(what: str, name: str, known: Iterable[str], legal: Iterable[str] = ()) -> str:
    """The message for a name that is not among the `known` ones: the nearest of them, and the legal ones."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{what} {name!r} is not known; {hint}legal are {', '.join(legal or known)}"
