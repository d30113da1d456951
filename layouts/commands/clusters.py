"""The known hardware with its sources, or what one cluster's name means."""

import argparse
import json
from pathlib import Path

from layouts.clusters import CORES_A_CHIP, parse_cluster
from layouts.hardware import Chip, Cluster, DeviceClass, chips, instances

_HEAD = (
    f"{'chip':9} {'TFLOP/s bf16':>12} {'fp8':>6} {'fp4':>6} {'GB':>6} {'GB/s':>6}  {'fast link, GB/s one way':31} network, GB/s"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "cluster", nargs="?", help="v5p:8x8x8, h100:32x8, cpu:8, local, v5p-1024, a file ...; default: all chips"
    )
    parser.add_argument("--sources", action="store_true", help="where each figure comes from")
    parser.add_argument("--json", metavar="FILE", help="writes the figures, per jax device, with their sources")


def run(chosen: argparse.Namespace) -> int:
    """Prints the table; returns the exit code."""
    cluster = parse_cluster(chosen.cluster) if chosen.cluster else None
    known = list(chips().values()) if cluster is None else [part.chip for part in cluster.classes]
    if cluster is not None:
        print("\n".join(describe(cluster)))
    print("\n".join([_HEAD, *(_line(chip) for chip in known)]))
    if chosen.sources:
        print("\n".join(f"{chip.name}.{figure}: {source}" for chip in known for figure, source in chip.sources))
    if cluster is None:
        print(f"machine types: {', '.join(instances())} (add :HOSTS)")
    if chosen.json:
        Path(chosen.json).write_text(
            json.dumps({"schema": 1, "chips": {chip.name: _figures(chip) for chip in known}}, indent=1)
        )
    return 0


def describe(cluster: Cluster) -> list[str]:
    """A line for each device class: how many chips and devices, and what joins them."""
    return [_describe_class(part) for part in cluster.classes]


def _describe_class(part: DeviceClass) -> str:
    chip = part.chip
    cores = f", {part.num_chips * CORES_A_CHIP[chip.name]} cores" if chip.name in CORES_A_CHIP else ""
    rings = f" (rings along {sum(part.rings)} of {len(part.rings)} axes)" if part.rings else ""
    return (
        f"{part.source_name}: {part} = {part.num_chips} chips{cores}, {part.num_devices} jax devices; "
        f"{chip.fabric.kind} joins {part.domain_devices}{rings}, {chip.network.kind} beyond"
    )


def _line(chip: Chip) -> str:
    have = dict(chip.flops_per_second)
    peaks = [f"{have[name] * chip.devices / 1e12:.0f}" if name in have else "-" for name in ("bf16", "fp8", "fp4")]
    memory, bandwidth = chip.hbm_bytes * chip.devices, chip.hbm_bytes_per_second * chip.devices
    joined = f"torus of {chip.axes} axes, a link" if chip.axes else f"{chip.domain} chips"
    fabric = f"{chip.fabric.kind} {chip.fabric.bytes_per_second * chip.devices / 1e9:.0f}, {joined}"
    network = f"{chip.network.kind} {chip.network.bytes_per_second * chip.devices / 1e9:.3g}"
    figures = f"{chip.name:9} {peaks[0]:>12} {peaks[1]:>6} {peaks[2]:>6} {memory / 1e9:6.0f} {bandwidth / 1e9:6.0f}"
    return f"{figures}  {fabric:31} {network}"


def _figures(chip: Chip) -> dict:
    return {
        "kind": chip.kind,
        "devices_per_chip": chip.devices,
        "flops_per_second": dict(chip.flops_per_second),
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bytes_per_second": chip.hbm_bytes_per_second,
        "fabric": vars(chip.fabric) | {"axes": chip.axes, "ring": chip.ring, "domain": chip.domain},
        "network": vars(chip.network),
        "host": vars(chip.host_link) | {"chips": chip.host_chips, "bytes": chip.host_bytes},
        "sources": dict(chip.sources),
    }
