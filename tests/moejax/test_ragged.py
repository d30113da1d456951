"""The ragged all-to-all's stand-in, the rows that a destination takes, and plans without padding: each against loops."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax import MoEConfig, Routing
from moejax.flat_plan import Bounds, place_flat, with_rest
from moejax.plan import rank_pairs
from moejax.ragged_all_to_all import ragged_all_to_all
from moejax.receive import ReceiveRule, take_in, water_level
from tests.moejax import grid

# S shards, n segments from one to another, rows of operand and output, rows of a pair at most.
SHARDS, SEGMENTS, ROWS, OUT, PAIR = 4, 2, 12, 15, 7


@st.composite
def exchanges(draw):
    """Sizes [sender, receiver, segment] that fit, and offsets: of slices that may overlap, and of places that may not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fill = draw(st.sampled_from([0, 1, 3, 40]))  # nothing at all ... more than fits
    sizes = np.zeros((SHARDS, SHARDS, SEGMENTS), np.int32)
    for _ in range(fill * SHARDS):
        s, r, i = (rng.integers(high) for high in sizes.shape)
        grown = sizes.copy()
        grown[s, r, i] += rng.integers(1, 5)
        if grown[s].max() <= ROWS and grown[:, r].sum() <= OUT and grown[s, r].sum() <= PAIR:
            sizes = grown
    at = np.zeros_like(sizes)
    for r in range(SHARDS):  # the segments of a receiver in any order, with gaps between them
        gaps = rng.multinomial(OUT - sizes[:, r].sum(), np.ones(SHARDS * SEGMENTS + 1) / (SHARDS * SEGMENTS + 1))
        row = 0
        for gap, flat in zip(gaps, rng.permutation(SHARDS * SEGMENTS), strict=False):
            at[flat // SEGMENTS, r, flat % SEGMENTS] = row + gap
            row += gap + sizes[flat // SEGMENTS, r, flat % SEGMENTS]
    return rng.integers(0, ROWS - sizes + 1).astype(np.int32), sizes, at


@functools.cache
def _exchange(axes):
    names, shape = (("ep",), (4,)) if axes == ("ep",) else (("a", "b"), (2, 2))
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    run = functools.partial(ragged_all_to_all, axis_name=axes, pair_rows=PAIR)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))


@pytest.mark.parametrize("axes", [("ep",), ("a", "b")], ids="-".join)
@hypothesis.given(what=exchanges())
@hypothesis.settings(max_examples=40)
def test_the_stand_in_does_what_the_contract_says(axes, what):
    begin, sizes, at = what
    operand = np.arange(SHARDS * ROWS * 2, dtype=np.float32).reshape(SHARDS, ROWS, 2)
    want = -1 - np.arange(SHARDS * OUT * 2, dtype=np.float32).reshape(SHARDS, OUT, 2)
    received = sizes.swapaxes(0, 1)
    got = _exchange(axes)(
        operand.reshape(-1, 2), want.reshape(-1, 2), begin.ravel(), sizes.ravel(), at.ravel(), received.ravel()
    )
    for s, r, i in np.ndindex(sizes.shape):
        first, size, row = begin[s, r, i], sizes[s, r, i], at[s, r, i]
        want[r, row : row + size] = operand[s, first : first + size]
    np.testing.assert_array_equal(got, want.reshape(-1, 2))


def _fill(cells, room):
    """One row to each cell that has one left, in turn, until the room is full."""
    taken = np.zeros_like(cells)
    while (cells > taken).any() and taken.sum() < room:
        for i in np.flatnonzero(cells > taken):
            taken.flat[i] += taken.sum() < room
    return taken


@hypothesis.given(st.lists(st.sampled_from([0, 1, 2, 3, 7, 30]), min_size=6, max_size=6), st.integers(0, 80))
@hypothesis.settings(max_examples=100)
def test_the_largest_cells_are_cut_first_and_evenly(cells, room):
    cells = np.asarray(cells, np.int32)
    np.testing.assert_array_equal(water_level(jnp.asarray(cells), room), _fill(cells, room))


def test_groups_of_senders_share_their_own_destinations():
    """Two groups of two senders, two destinations of three experts each."""
    sent = np.random.default_rng(0).integers(0, 9, (6, 4)).astype(np.int32)
    want = np.empty_like(sent)
    for group, dest in np.ndindex(2, 2):
        senders, experts = slice(2 * group, 2 * group + 2), slice(3 * dest, 3 * dest + 3)
        want[experts, senders] = _fill(sent[experts, senders].T.ravel(), 14).reshape(2, 3).T
    assert (want < sent).any()
    np.testing.assert_array_equal(take_in(jnp.asarray(sent), ReceiveRule(14, 2), ()), want)


E, T, K, SENDERS = 5, 12, 2, 3


@functools.cache
def _plans(drop_by):
    def plans(expert, weight, valid, kept, taken):
        zeros = jnp.zeros((T, E))
        ranks = rank_pairs(Routing(expert, weight, zeros, zeros), valid, SENDERS, drop_by)
        kept = jnp.minimum(ranks.count, kept)
        taken = jnp.minimum(kept, taken)
        plan = place_flat(ranks, weight, kept, taken, Bounds(T * K, T * K, T * K))
        return with_rest(plan, ranks, weight, kept, taken)

    return jax.jit(plans)


@pytest.mark.parametrize("drop_by", ["position", "weight"])
@hypothesis.given(st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=40)
def test_flat_rows_stand_by_expert_sender_and_rank(drop_by, seed):
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((T, E)) + np.arange(E) / 3, axis=1)[:, :K].astype(np.int32)
    weight, valid = rng.integers(1, 5, (T, K)).astype(np.float32), rng.random(T) < 0.8
    kept, taken = rng.integers(0, 5, (2, E, SENDERS)).astype(np.int32)
    plan = jax.device_get(_plans(drop_by)(expert, weight, valid, kept, taken))
    rows, rest = [], []
    for e, sender in np.ndindex(E, SENDERS):
        cell = [(i, j) for i, j in np.argwhere(expert == e) if valid[i] and i // (T // SENDERS) == sender]
        if drop_by == "weight":
            cell.sort(key=lambda pair: (-weight[pair], pair))
        cell = cell[: kept[e, sender]]
        rows += cell[: taken[e, sender]]
        rest += cell[taken[e, sender] :]
    for part, pairs in ((plan, rows), (plan.rest, rest)):
        places = np.full((T, K), T * K)
        for row, pair in enumerate(pairs):
            places[pair] = row
        np.testing.assert_array_equal(part.slot, places)
        np.testing.assert_array_equal(part.source, [i * K + j for i, j in pairs] + [T * K] * (T * K - len(pairs)))
        np.testing.assert_array_equal(part.weight, np.where(places < T * K, weight, 0))
        np.testing.assert_array_equal(part.group_sizes, np.bincount([expert[pair] for pair in pairs], minlength=E))
        np.testing.assert_array_equal(part.kept, np.bincount([expert[pair] for pair in rows + rest], minlength=E))


def test_rows_that_nobody_sent_are_read_by_nobody(monkeypatch):
    """Where a backend hands out memory as it is found, that can hold anything."""
    found = []

    def garbage(shape, dtype):
        found.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(jax.lax, "empty", garbage)
    layer = grid.LAYERS["shared"]
    layer = dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, exchange="ragged", receive_factor=8.0))
    inputs = grid.draw(layer, 0, "random", "random")
    got, want = grid.run(layer, grid.place("expert8"), inputs.garbage()), grid.reference(layer, inputs)
    assert len(found) == 6
    stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
    grid.assert_close({**got, "stats": stats}, want)


def test_bounds_are_what_routing_cannot_exceed():
    """512 tokens, two of 16 experts each, 8 devices: to one of them at most a pair per token and expert, or its cells."""
    cfg = MoEConfig(8, 8, 16, 2, capacity_factor=None)
    assert cfg.flat_bounds(512, 1, 8, None) == Bounds(1024, 1024, 8192)
    assert cfg.flat_bounds(512, 1, 16, None) == Bounds(1024, 512, 8192)
    cells = dataclasses.replace(cfg, capacity_factor=1.25)
    assert cells.flat_bounds(512, 1, 8, None) == Bounds(1024, 160, 1280)
    rule = dataclasses.replace(cfg, receive_factor=1.1).receive_rule(512, 1, 8)
    assert rule == ReceiveRule(1127, 8)
    assert cfg.flat_bounds(512, 1, 8, rule) == Bounds(1024, 1024, 1127)
    assert dataclasses.replace(cfg, receive_factor=8.0).receive_rule(512, 1, 8) is None
