"""The plan: a permutation in both directions that keeps capacity, priority and validity, against loops."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import Routing
from moejax.plan import by_chunk, by_expert, make_plan
from tests.moejax import oracle

E = 6
# (tokens, choices, senders, rows of a cell): one row, odd, everything to everyone, cells longer than a sender.
SHAPES = [(12, 2, 1, 1), (15, 1, 3, 2), (8, E, 2, 3), (20, 3, 4, 5), (6, 2, 6, 4)]


@st.composite
def routings(draw, t, k):
    """Distinct experts for each token, few weights (so that ties are common), and which tokens count."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    preferred = draw(st.sampled_from([E, 2, 1]))  # how many experts the tokens crowd on
    score = rng.random((t, E)) + (np.arange(E) < preferred)
    expert = np.argsort(-score, axis=1)[:, :k].astype(np.int32)
    weight = draw(hnp.arrays(np.float32, (t, k), elements=st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])))
    return expert, weight, draw(hnp.arrays(bool, (t,)))


@functools.cache
def _compiled(rows, senders, drop_by):
    def plan(expert, weight, valid):
        logits = jnp.zeros((expert.shape[0], E))
        routing = Routing(expert, weight, logits, logits)
        return make_plan(routing, valid, cell_rows=rows, num_senders=senders, drop_by=drop_by)

    return jax.jit(plan)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("drop_by", ["position", "weight"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=40)
def test_plan_is_the_stated_one(shape, drop_by, data):
    t, k, senders, rows = shape
    expert, weight, valid = data.draw(routings(t, k))
    plan = jax.device_get(_compiled(rows, senders, drop_by)(expert, weight, valid))
    kept = oracle.keep(expert, weight, valid, num_senders=senders, rows=rows, drop_by=drop_by)
    size = E * senders * rows
    assert plan.slot.dtype == plan.source.dtype == plan.routed.dtype == plan.kept.dtype == np.int32
    assert plan.source.shape == (size,)
    np.testing.assert_array_equal(plan.slot < size, kept)
    np.testing.assert_array_equal(plan.slot[~kept], size)
    np.testing.assert_array_equal(plan.weight, np.where(kept, weight, 0))
    _check_permutation(plan, kept, t * k)
    _check_cells(plan, expert, weight, kept, senders, rows, drop_by)
    np.testing.assert_array_equal(plan.routed, np.bincount(expert[valid].ravel(), minlength=E))
    np.testing.assert_array_equal(plan.kept, np.bincount(expert[kept], minlength=E))


def _check_permutation(plan, kept, nowhere):
    """slot and source undo each other, and every other row is empty."""
    pairs = np.flatnonzero(kept)
    rows = plan.slot.ravel()[pairs]
    assert len(set(rows)) == len(rows)
    np.testing.assert_array_equal(plan.source[rows], pairs)
    np.testing.assert_array_equal(np.delete(plan.source, rows), nowhere)


def _check_cells(plan, expert, weight, kept, senders, rows, drop_by):
    """A pair sits in its (expert, sender) cell, and cells fill from the front in the order of priority."""
    t = len(expert) // senders
    places = {}
    for i, j in np.argwhere(kept):
        cell, place = divmod(int(plan.slot[i, j]), rows)
        assert cell == expert[i, j] * senders + i // t
        places.setdefault(cell, []).append((place, i, j))
    for cell in places.values():
        assert [place for place, _, _ in sorted(cell)] == list(range(len(cell)))
        order = [(i, j) for _, i, j in sorted(cell)]
        key = (lambda pair: (-weight[pair], pair)) if drop_by == "weight" else (lambda pair: pair)
        assert order == sorted(order, key=key)


def test_padding_takes_no_capacity():
    """One row for expert 0: the first token is padding, so the second one gets it."""
    plan = _compiled(1, 1, "position")(jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1)), jnp.array([False, True, True]))
    np.testing.assert_array_equal(plan.slot[:, 0] == 0, [False, True, False])


def test_the_heaviest_is_kept_when_dropping_by_weight():
    weight = jnp.array([[0.1], [0.9], [0.5]])
    plan = _compiled(1, 1, "weight")(jnp.zeros((3, 1), jnp.int32), weight, jnp.ones(3, bool))
    np.testing.assert_array_equal(plan.slot[:, 0] == 0, [False, True, False])


def test_weights_get_gradients_only_where_kept():
    def loss(weight):
        valid = jnp.array([True, True, False])
        return (_compiled(1, 1, "weight")(jnp.zeros((3, 1), jnp.int32), weight, valid).weight * 2).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([[0.1], [0.9], [1.0]])), [[0], [2], [0]])


def _cut(plan, by, number):
    """The reordered plan's arrays and its parts, in NumPy, after checking that it is a permutation still."""
    ordered, parts = jax.device_get(by(plan, number))
    np.testing.assert_array_equal(np.concatenate(parts), ordered.source)
    np.testing.assert_array_equal(ordered.slot == ordered.source.size, plan.slot == plan.source.shape[0])
    pair = np.arange(ordered.slot.size).reshape(ordered.slot.shape)
    kept = ordered.slot < ordered.source.size
    np.testing.assert_array_equal(ordered.source[ordered.slot[kept]], pair[kept])
    return parts


@pytest.mark.parametrize("number", [1, 2, 3, 4, 9])
def test_chunks_cut_every_experts_rows(number):
    """Five rows an expert: as even as can be, never more chunks than rows."""
    rng = np.random.default_rng(number)
    expert = np.argsort(rng.random((20, E)), axis=1)[:, :3].astype(np.int32)
    plan = _compiled(5, 1, "position")(expert, rng.random((20, 3), np.float32), np.ones(20, bool))
    parts = [part.reshape(E, -1) for part in _cut(plan, by_chunk, number)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), np.asarray(plan.source).reshape(E, 5))
    widths = [part.shape[1] for part in parts]
    assert len(widths) == min(number, 5)
    assert max(widths) - min(widths) <= 1


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_each_local_experts_rows_stand_together(shards):
    rng = np.random.default_rng(shards)
    expert = np.argsort(rng.random((20, E)), axis=1)[:, :3].astype(np.int32)
    plan = _compiled(5, 1, "position")(expert, rng.random((20, 3), np.float32), np.ones(20, bool))
    parts = [part.reshape(shards, 5) for part in _cut(plan, by_expert, shards)]
    np.testing.assert_array_equal(np.stack(parts, 1).reshape(E, 5), np.asarray(plan.source).reshape(E, 5))
