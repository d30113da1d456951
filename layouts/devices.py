"""Where a layout's axes lie on the cluster's links, and a picture of its devices."""

import html
import math

from layouts.hardware import Cluster
from layouts.layout import Layout
from layouts.network import Span, span
from layouts.search import Problem
from layouts.svg import COLOURS
from moejax.axes import MESH_AXES

# More devices than this are not drawn one by one: the first ones stand for the rest.
_DRAWN = 128


def axis_links(problem: Problem, layout: Layout) -> list[tuple[str, str, str, str]]:
    """(axis, devices along it, stride between neighbours, the links it lies on) of each axis larger than 1."""
    part, found, stride = problem.cluster.classes[0], [], layout.num_devices
    for name in MESH_AXES:
        size = getattr(layout, name)
        stride //= size
        if size > 1:
            words = _links(problem.cluster, span(part, layout, (name,)))
            found.append((name, str(size), str(stride), words))
    return found


def _links(cluster: Cluster, where: Span) -> str:
    chip = cluster.classes[0].chip
    fast, slow = chip.fabric, chip.network
    inside = f"{fast.kind}, {fast.bytes_per_second / 1e9:.4g} GB/s one way"
    if where.lines:
        shapes = ", ".join(f"a {'ring' if ring else 'line'} of {extent}" for extent, ring in where.lines)
        inside = f"{fast.kind} torus ({shapes}), {fast.bytes_per_second / 1e9:.4g} GB/s a link one way"
    if where.domains == 1:
        return inside
    outside = f"{slow.kind}, {slow.bytes_per_second / 1e9:.4g} GB/s one way"
    return f"{where.inside} by {inside}; across {where.domains} domains by {outside}" if where.inside > 1 else outside


def device_grid(cluster: Cluster, layout: Layout) -> str:
    """The first devices as cells, in their fast domains (or parts of the torus), with their place along each axis.

    Colours are places along the axes of the experts, or along the innermost axis where these are one device.
    """
    part, used = cluster.classes[0], layout.num_devices
    size = part.domain_devices if not part.rings else math.prod(part.shape[1:]) * part.chip.devices
    size = min(size, used)
    named = "plane of the torus" if part.rings else "domain"
    shown = max(size, _DRAWN // size * size) if size <= _DRAWN else _DRAWN
    domains = []
    for first in range(0, min(used, shown), size):
        cells = "".join(_cell(layout, device) for device in range(first, min(first + size, used, first + _DRAWN)))
        columns = part.shape[-1] * part.chip.devices if part.rings else min(size, part.shape[-1] * part.chip.devices)
        body = f'<div class=cells style="grid-template-columns:repeat({min(columns, 8)},auto)">{cells}</div>'
        domains.append(f"<div class=domain><h4>{named} {first // size}</h4>{body}</div>")
    left = used - min(used, shown)
    more = f"<p class=says>{left:,} more devices go on in the same way.</p>" if left > 0 else ""
    axes = [name for name in MESH_AXES if getattr(layout, name) > 1]
    legend = ", ".join(f"{name[0]}: {name}" for name in axes) or "one device"
    return f"<p class=says>Place of each device along {html.escape(legend)}.</p><div class=grid>{''.join(domains)}</div>{more}"


def place(layout: Layout, device: int) -> dict[str, int]:
    """A device's place along each axis larger than 1."""
    found, rest = {}, device
    for name in reversed(MESH_AXES):
        size = getattr(layout, name)
        if size > 1:
            found[name] = rest % size
        rest //= size
    return dict(reversed(found.items()))


def _cell(layout: Layout, device: int) -> str:
    at = place(layout, device)
    axes = [name for name in layout.expert_axes if name in at] or list(at)[-1:]
    number = 0
    for name in axes:
        number = number * getattr(layout, name) + at[name]
    words = " ".join(f"{name[0]}{index}" for name, index in at.items()) or "0"
    return f'<div class=cell style="background:{COLOURS[number % (len(COLOURS) - 2)]}66">{words}</div>'
