"""grouped_matmul against plain batched products of the same true FLOPs, for an even load and the worst one.

Even: every group has the same rows, and the plain product is one einsum over groups. Worst: all rows in two of the
groups, and the plain product is that of those two. One device, float32. K: width of x, N: of the result, G: groups.
"""

import jax
import jax.numpy as jnp
import numpy as np

import moejax
from benchmarks import harness

AIM = "over the plain products <= 1.5; worst load over even <= 1.3"
SHAPES = ((4096, 256, 512, 8), (4096, 256, 512, 64), (16384, 512, 1024, 64))
ROUNDS = 21


def run() -> list[dict]:
    """A row per shape and direction."""
    return [row for shape in SHAPES for row in _case(*shape)]


def _case(num_rows: int, k: int, n: int, num_groups: int) -> list[dict]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x, w, dy = draw(num_rows, k), draw(num_groups, k, n), draw(num_rows, n)
    even = jnp.full(num_groups, num_rows // num_groups, jnp.int32)
    worst = jnp.zeros(num_groups, jnp.int32).at[jnp.array([1, num_groups // 2])].set(num_rows // 2)
    tiles = lambda x, w, sizes: moejax.grouped_matmul(x, w, sizes, implementation="tiles")
    capacity = lambda x, w, sizes: moejax.grouped_matmul(
        x, w, sizes, implementation="capacity", max_group_size=num_rows // num_groups
    )
    calls = {
        "tiles": (tiles, w, even),
        "tiles_worst": (tiles, w, worst),
        "capacity": (capacity, w, even),
        "plain": (_plain, w, even),
        "plain_worst": (_plain, w[:2], worst[:2]),
    }
    rows = []
    for direction, wrap in (("forward", _forward), ("forward+backward", _with_gradients)):
        runs = {name: _bound(wrap(fn), (x, w, sizes, dy)) for name, (fn, w, sizes) in calls.items()}
        seconds = harness.interleaved_seconds(runs, ROUNDS)
        over = lambda a, b, seconds=seconds: harness.ratio(seconds, a, b)["ratio"]
        rows.append(
            {
                "rows": num_rows,
                "k": k,
                "n": n,
                "groups": num_groups,
                "direction": direction,
                "plain_seconds": harness.median_seconds(seconds)["plain_seconds"],
                "tiles": over("tiles", "plain"),
                "tiles_worst": over("tiles_worst", "plain_worst"),
                "worst_over_even": over("tiles_worst", "tiles"),
                "capacity": over("capacity", "plain"),
            }
        )
    return rows


def _plain(x, w, sizes):
    """The rows are known to be spread evenly over the groups of w: their sizes are not looked at."""
    del sizes
    return jnp.einsum("grk,gkn->grn", x.reshape(w.shape[0], -1, x.shape[1]), w).reshape(x.shape[0], w.shape[2])


def _forward(fn):
    return jax.jit(lambda x, w, sizes, dy: fn(x, w, sizes))


def _with_gradients(fn):
    @jax.jit
    def run(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: fn(x, w, sizes), x, w)
        return y, *pull(dy)

    return run


def _bound(fn, args):
    return lambda: fn(*args)
