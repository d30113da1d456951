"""The all-to-all in two hops (MoNTA, DeepSpeed-MoE): over the fast axis first, then the slow one.

Each device sends 1/F of the messages over the slow axis that a flat all-to-all sends, F times as long: fewer and larger ones.
S, F: devices along the slow and the fast axis, E = S*F*e experts, r: rows per expert and shard.
"""

from jax import lax

from moejax.exchange.cells import Route, through_cells
from moejax.exchange.wire import Wire


def hierarchical(x, plan, experts, wire: Wire):
    """x [t, d] -> (y [t, d], rows worked on here). `wire.axes` are (slow, fast); rows land as a flat all-to-all lands them."""
    if not wire.axes:
        return through_cells(x, plan, experts, wire, Route())
    slow, fast = wire.axes
    sizes = lax.axis_size(slow), lax.axis_size(fast)

    def there(rows):  # [E, r, d] -> [S, F, e, r, d] -> [S, 1, e, F*r, d] -> [1, 1, e, S*F*r, d]
        rows = rows.reshape(*sizes, -1, *rows.shape[1:])
        rows = lax.all_to_all(rows, fast, 1, 3, tiled=True)
        rows = lax.all_to_all(rows, slow, 0, 3, tiled=True)
        return rows.reshape(rows.shape[2:])

    def back(rows):
        rows = rows.reshape(1, 1, *rows.shape)
        rows = lax.all_to_all(rows, slow, 3, 0, tiled=True)
        rows = lax.all_to_all(rows, fast, 3, 1, tiled=True)
        return rows.reshape(-1, *rows.shape[3:])

    def swap(rows):  # [S*F, n, d] -> [S, F, n, d] and back
        blocks = rows.reshape(*sizes, *rows.shape[1:])
        blocks = lax.all_to_all(blocks, fast, 1, 1, tiled=True)
        return lax.all_to_all(blocks, slow, 0, 0, tiled=True).reshape(rows.shape)

    return through_cells(x, plan, experts, wire, Route(there, back, swap))
