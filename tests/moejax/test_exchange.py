"""Exchanges alone, with experts that tell who they are: rows reach their expert, and come home to their token."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax import Routing
from moejax.axes import axis_index
from moejax.exchange import EXCHANGES, Wire
from moejax.plan import make_plan

SHARDS, T, K, E, D, ROWS = 4, 6, 2, 8, 3, 2


def _numbered(rows, axes, landed):
    """Expert e multiplies its rows by e + 1."""
    local = rows.shape[0]
    landed.append(rows.shape)
    number = axis_index(axes) * local + jnp.arange(local) + 1
    return rows * number[:, None, None]


def _draw(seed):
    rng = np.random.default_rng(seed)
    expert = np.argsort(rng.random((SHARDS * T, E)) + np.arange(E) / 4, axis=1)[:, :K].astype(np.int32)
    weight = rng.integers(1, 8, (SHARDS * T, K)).astype(np.float32)
    return tuple(map(jnp.asarray, (rng.integers(-8, 8, (SHARDS * T, D)).astype(np.float32), expert, weight)))


def _stated(x, expert, weight):
    """Whole numbers, so the sums are exact in any order."""
    x, expert, weight = map(np.asarray, (x, expert, weight))
    y, used = np.zeros_like(x), {}
    for i, j in np.ndindex(expert.shape):
        cell = (i // T, expert[i, j])
        used[cell] = used.get(cell, 0) + 1
        if used[cell] <= ROWS:
            y[i] += weight[i, j] * (expert[i, j] + 1) * x[i]
    assert max(used.values()) > ROWS, "something should be dropped"
    return y


def _line(name, axes, landed, x, expert, weight):
    zeros = jnp.zeros((x.shape[0], E))
    plan = make_plan(Routing(expert, weight, zeros, zeros), jnp.ones(x.shape[0], bool), cell_rows=ROWS)
    experts = functools.partial(_numbered, axes=axes, landed=landed)
    return EXCHANGES["cell", name](x, plan, experts, Wire(axes))[0]


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("axes", [("ep",), ("a", "b"), ("b", "a")], ids="-".join)
def test_rows_reach_their_expert_and_come_home(name, axes):
    names, sizes = (("ep",), (4,)) if axes == ("ep",) else (("a", "b"), (2, 2))
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    landed = []
    line = functools.partial(_line, name, axes, landed)
    run = jax.jit(jax.shard_map(line, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))
    for seed in range(3):
        args = _draw(seed)
        np.testing.assert_array_equal(run(*args), _stated(*args))
    assert landed == [(E // SHARDS, SHARDS * ROWS, D)]


@pytest.mark.parametrize("name", ["all_to_all", "all_gather"])
def test_without_axes_nothing_is_sent(name):
    x, expert, weight = _draw(0)
    got = _line(name, (), [], x[:T], expert[:T], weight[:T])
    np.testing.assert_array_equal(got, _stated(x, expert, weight)[:T])
    text = str(jax.make_jaxpr(functools.partial(_line, name, (), []))(x[:T], expert[:T], weight[:T]))
    assert not re.search(r"all_to_all|all_gather|psum|reduce_scatter", text)


def test_explicit_axes_serve_as_well():
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Explicit,))
    args = _draw(1)
    line = functools.partial(_line, "all_to_all", ("ep",), [])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(arg, jax.NamedSharding(mesh, P("ep"))) for arg in args]
        got = jax.jit(jax.shard_map(line, in_specs=P("ep"), out_specs=P("ep")))(*placed)
    np.testing.assert_array_equal(got, _stated(*args))
