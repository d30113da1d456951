"""The padded all-to-all (GShard): every cell travels whole, one collective each way, or one per local expert."""

import functools

from jax import lax

from moejax.exchange.cells import Route, through_cells
from moejax.exchange.wire import Wire


def all_to_all(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here)."""
    if not wire.axes:
        return through_cells(x, plan, experts, wire, Route())
    cross = functools.partial(lax.all_to_all, axis_name=wire.axes, tiled=True)
    route = Route(
        there=functools.partial(cross, split_axis=0, concat_axis=1),
        back=functools.partial(cross, split_axis=1, concat_axis=0),
        swap=functools.partial(cross, split_axis=0, concat_axis=0),
    )
    return through_cells(x, plan, experts, wire, route)
