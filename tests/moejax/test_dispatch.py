"""dispatch and combine, and their hand-written backwards, against the same said with scatters and left to jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import Routing
from moejax.dispatch import combine, dispatch
from moejax.plan import make_plan

T, K, E, D, ROWS = 9, 2, 5, 4, 3


def _plan(seed, weight=None):
    rng = np.random.default_rng(seed)
    # Half a point makes experts 0 and 1 crowded, and leaves rows of the others empty.
    expert = jnp.asarray(np.argsort(rng.random((T, E)) + (np.arange(E) > 1) / 2, axis=1)[:, :K].astype(np.int32))
    weight = jnp.asarray(rng.random((T, K)), jnp.float32) if weight is None else weight
    valid = jnp.asarray(rng.random(T) < 0.8)
    plan = make_plan(Routing(expert, weight, jnp.zeros((T, E)), jnp.zeros((T, E))), valid, cell_rows=ROWS)
    assert (np.asarray(plan.slot) == E * ROWS).any(), "some pair should be dropped"
    assert (np.asarray(plan.source) == T * K).any(), "some row should be empty"
    return plan


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _scattered_rows(x, plan):
    """The send buffer by a scatter over slots; jax differentiates it."""
    rows = jnp.zeros((E * ROWS, D)).at[plan.slot].add(x[:, None, :], mode="drop")
    return rows.reshape(E, ROWS, D)


def _gathered_sum(rows, plan):
    padded = jnp.concatenate([rows.reshape(-1, D), jnp.zeros((1, D))])
    return (padded[plan.slot] * plan.weight[..., None]).sum(1)


@pytest.mark.parametrize("seed", range(4))
def test_dispatch_places_rows_and_its_backward_collects_them(seed):
    plan, x, d_rows = _plan(seed), _normal(seed, T, D), _normal(seed + 9, E, ROWS, D)
    got, pull = jax.vjp(lambda x: dispatch(x, plan), x)
    want, want_pull = jax.vjp(lambda x: _scattered_rows(x, plan), x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(pull(d_rows)[0], want_pull(d_rows)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_combine_weighs_rows_and_so_does_its_backward(seed):
    rows, dy = _normal(seed, E, ROWS, D), _normal(seed + 9, T, D)
    weight = jnp.asarray(np.random.default_rng(seed).random((T, K)), jnp.float32)
    got, pull = jax.vjp(lambda rows, weight: combine(rows, _plan(seed, weight)), rows, weight)
    want, want_pull = jax.vjp(lambda rows, weight: _gathered_sum(rows, _plan(seed, weight)), rows, weight)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(pull(dy), want_pull(dy), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rows_that_nobody_sent_are_never_read():
    plan, x = _plan(0), _normal(0, T, D)
    empty = (plan.source == T * K).reshape(E, ROWS, 1)
    poisoned = jnp.where(empty, jnp.nan, dispatch(x, plan))
    np.testing.assert_array_equal(combine(poisoned, plan), combine(dispatch(x, plan), plan))
    d_weightless = jax.grad(lambda x: jnp.where(empty, 0, dispatch(x, plan)).sum())(x)
    assert np.isfinite(np.asarray(d_weightless)).all()


def test_bf16_rows_are_added_up_in_float32():
    """256 + 1 is 256 in bf16: a sum kept in bf16 would lose both ones."""
    rows = jnp.array([256.0, 1.0, 1.0], jnp.bfloat16)[:, None, None] * jnp.ones((3, 1, 2), jnp.bfloat16)
    expert, zeros = jnp.array([[0, 1, 2]], jnp.int32), jnp.zeros((1, 3))
    plan = make_plan(Routing(expert, jnp.ones((1, 3)), zeros, zeros), jnp.ones(1, bool), cell_rows=1)
    got = combine(rows, plan)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), [[258, 258]])
