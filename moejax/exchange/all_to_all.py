"""The padded all-to-all (GShard): every cell travels whole, one collective each way, or one per local expert."""

import functools

from jax import lax

from moejax.exchange.cells import Route, through_cells
from moejax.exchange.wire import Wire


def all_to_all(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here)."""
    return through_cells(x, plan, experts, wire, flat_route(wire.axes))


def flat_route(axes: tuple[str, ...]) -> Route:
    """One all-to-all; without axes nothing moves."""
    if not axes:
        return Route()
    cross = functools.partial(lax.all_to_all, axis_name=axes, tiled=True)
    return Route(
        there=functools.partial(cross, split_axis=0, concat_axis=1),
        back=functools.partial(cross, split_axis=1, concat_axis=0),
        swap=functools.partial(cross, split_axis=0, concat_axis=0),
    )
