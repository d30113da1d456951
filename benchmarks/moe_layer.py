"""The whole layer against the bare expert products that it cannot do without, at equal FLOPs.

The plain product gets its rows already grouped: what a ratio says above 1 is routing, moving rows and adding them up.
One device, float32. With capacity: over the product of all the rows that the capacity holds, padding included. Dropless:
over the product of the true rows, T * k of them, under three loads. Even: each expert has as many tokens as the next.
Uniform: tokens draw their experts. Worst: all tokens go to the same k experts, and the plain product is that of those.
"""

import moejax
from benchmarks import cases, harness
from benchmarks.cases import Shape

AIM = "over the plain products: with capacity <= 1.25, dropless <= 1.5; worst load over even <= 1.3"
CAPACITY_FACTOR = 1.25
LOADS = {"even": cases.even, "uniform": cases.uniform, "worst": cases.worst}
# Rounds of a shape: as many as it takes to see small differences of short runs, and no more than minutes of long ones.
ROUNDS_GFLOP = 60
MAX_ROUNDS = 21


def run() -> list[dict]:
    """A row per shape and direction."""
    return [_row(shape, direction) for shape in cases.SHAPES for direction in cases.DIRECTIONS]


def rounds(shape: Shape) -> int:
    """How many rounds a shape is run, an odd number of at least 5."""
    gflop = 3 * 2 * shape.num_rows * shape.d_model * shape.d_ff / 1e9
    return min(MAX_ROUNDS, max(5, round(ROUNDS_GFLOP / gflop) // 2 * 2 + 1))


def _row(shape: Shape, direction: str) -> dict:
    seconds = harness.interleaved_seconds(_runs(shape, direction), rounds(shape))
    over = lambda a, b: harness.ratio(seconds, a, b)["ratio"]
    return {
        **shape.columns(),
        "direction": direction,
        "plain_seconds": harness.median_seconds(seconds)["plain_seconds"],
        "capacity": over("capacity", "plain_capacity"),
        "dropless": over("even", "plain"),
        "dropless_uniform": over("uniform", "plain"),
        "dropless_worst": over("worst", "plain_worst"),
        "worst_over_even": over("worst", "even"),
        "rounds": rounds(shape),
    }


def _runs(shape: Shape, direction: str) -> dict:
    wrap, params = cases.DIRECTIONS[direction], cases.weights(shape)
    capacity = shape.config(capacity_factor=CAPACITY_FACTOR)
    with_capacity, dropless = wrap(cases.layer(capacity)), wrap(cases.layer(shape.config(**cases.DROPLESS)))
    plain = wrap(cases.products)
    experts = {name: value for name, value in params.items() if name != "router"}
    groups = lambda num_groups, num_rows: cases.bound(plain, experts, cases.grouped(shape, num_groups, num_rows))
    runs = {load: cases.bound(dropless, params, cases.tokens(shape, draw)) for load, draw in LOADS.items()}
    return runs | {
        "capacity": cases.bound(with_capacity, params, cases.tokens(shape, cases.uniform)),
        "plain": groups(shape.num_experts, shape.num_rows // shape.num_experts),
        "plain_worst": groups(shape.top_k, shape.num_tokens),
        "plain_capacity": groups(shape.num_experts, _cell_rows(capacity, shape)),
    }


def _cell_rows(cfg: moejax.MoEConfig, shape: Shape) -> int:
    return cfg.cell_rows(shape.num_tokens)
