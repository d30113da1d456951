"""Seconds that a collective takes on a cluster: rings and tori, switches and the networks between them (alpha-beta).

A mesh's devices are numbered with the last axis of `MESH_AXES` fastest, so the inner axes lie on the fast links. A group is
what its axes span of each level: a line or ring on every torus axis it touches, some devices of each switched domain, some
domains.
"""

import dataclasses
import functools
import math

from layouts.hardware import Chip, Cluster, DeviceClass, Link
from layouts.layout import Layout
from layouts.messages import Message


@dataclasses.dataclass(frozen=True)
class Span:
    """Where a group's devices lie.

    Attributes:
      inside: of them, those in one fast domain.
      domains: fast domains they are in.
      lines: for a torus, (extent, whether it is a ring) of each torus axis that they spread over; () for a switch.
    """

    inside: int
    domains: int
    lines: tuple[tuple[int, bool], ...] = ()


@functools.lru_cache(maxsize=65536)
def span(part: DeviceClass, layout: Layout, axes: tuple[str, ...]) -> Span:
    """Where the groups over these mesh axes lie on devices of this class."""
    inside, stride, covered = 1, 1, []
    for name, size in reversed(layout.sizes.items()):
        if name in axes:
            here = min(size, max(1, part.domain_devices // stride))
            inside *= here
            covered.append((stride, here))
        stride *= size
    group = math.prod(getattr(layout, name) for name in axes)
    return Span(inside, max(1, group // inside), _lines(part, covered) if part.rings else ())


def _lines(part: DeviceClass, covered: list[tuple[int, int]]) -> tuple[tuple[int, bool], ...]:
    """What strides cover of the torus, whose last axis is the fastest; devices of one chip count as that chip."""
    found: dict[int, int] = {}
    for stride, size in covered:
        low, high = stride, stride * size
        position = part.chip.devices
        for axis in range(len(part.shape) - 1, -1, -1):
            top = position * part.shape[axis]
            extent = min(high, top) // max(low, position)
            if extent > 1:
                found[axis] = found.get(axis, 1) * extent
            position = top
    return tuple((extent, part.rings[axis] and extent == part.shape[axis]) for axis, extent in sorted(found.items()))


@dataclasses.dataclass(frozen=True)
class LinkShares:
    """What of a link's bandwidth messages get.

    Attributes:
      fabric: of the fast link.
      network: of the network between domains.
      all_to_all: of either, once more, for an all-to-all's scattered parts.
    """

    fabric: float = 0.8
    network: float = 0.7
    all_to_all: float = 0.7


def seconds(cluster: Cluster, layout: Layout, message: Message, shares: LinkShares, top_k: int = 1) -> float:
    """One collective, once.

    Args:
      cluster: the devices; of several classes the slowest counts.
      layout: how they are used.
      message: what crosses.
      shares: what messages get of the links.
      top_k: experts a token goes to: under the exchange "hierarchical" it crosses once to each domain that holds some.
    """
    return max(_seconds(cluster, part, span(part, layout, message.axes), message, shares, top_k) for part in cluster.classes)


def once_per_domain(domains: int, top_k: int) -> float:
    """Rows that cross when a token crosses once to each domain of its experts, over one for each expert: evenly spread."""
    return domains * (1 - (1 - 1 / domains) ** top_k) / top_k


def _seconds(cluster: Cluster, part: DeviceClass, where: Span, message: Message, shares: LinkShares, top_k: int) -> float:
    if where.inside * where.domains == 1:
        return 0.0
    chip, size = part.chip, message.bytes
    out = cluster.between if cluster.is_mixed and where.domains > 1 else chip.network
    if message.kind == "permute":
        link, share = (chip.fabric, shares.fabric) if where.domains == 1 else (out, shares.network)
        return link.latency_seconds + size / (link.bytes_per_second * share)
    if message.kind == "all_to_all":
        return _all_to_all(where, size, chip, out, shares, once_per_domain(where.domains, top_k))
    return _reduction(message.kind, where, size, chip, out, shares)


def _fast(where: Span, link: float, share: float) -> float:
    """Bytes a second that a device sends in a ring collective inside a domain: both ways of a ring, all axes of a torus."""
    return link * share * (sum(2 if ring else 1 for _, ring in where.lines) or 1)


def _reduction(kind: str, where: Span, size: float, chip: Chip, out: Link, shares: LinkShares) -> float:
    """Inside a domain first, then between domains what each device has of the result; or the other way round."""
    inside, domains = where.inside, where.domains
    # The array that a group gathers or reduces.
    whole = size * inside * domains if kind == "all_gather" else size
    within = whole * (inside - 1) / inside / _fast(where, chip.fabric.bytes_per_second, shares.fabric)
    between = whole / inside * (domains - 1) / domains / (out.bytes_per_second * shares.network)
    steps = sum(extent - 1 for extent, _ in where.lines) or (inside - 1)
    latency = chip.fabric.latency_seconds * steps + out.latency_seconds * (domains - 1)
    return (2 if kind == "all_reduce" else 1) * (within + between + latency)


def _all_to_all(where: Span, size: float, chip: Chip, out: Link, shares: LinkShares, crossing: float) -> float:
    """Each device's parts to all others: on a torus the longest axis carries the most, of a switch the network does."""
    group = where.inside * where.domains
    fast = chip.fabric.bytes_per_second * shares.fabric * shares.all_to_all
    if where.lines:
        # On a ring of n an eighth of n operands pass each link each way, on a line a quarter.
        within = max(size * extent / (8 if ring else 4) for extent, ring in where.lines) / fast
        hops = sum(extent // 2 for extent, _ in where.lines)
    else:
        within, hops = size * (where.inside - 1) / group / fast, 1
    between = crossing * size * (group - where.inside) / group / (out.bytes_per_second * shares.network * shares.all_to_all)
    return max(within, between) + chip.fabric.latency_seconds * hops + (out.latency_seconds if where.domains > 1 else 0.0)
