"""Sums in parts: one all-reduce's answer and bytes, each part under way beside the products of the others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layouts.hlo import carriers, depends, parse, read
from moejax.ring_sum import split_round, sum_round
from tests.moejax.test_overlapped import mesh_of

T, F, D = 4, 16, 48


def _summed(axes, num_groups, check_vma, mesh):
    """(hidden [T, F], w [F, D]) -> their product, F over the axes; with and without ring."""

    def shard(hidden, w):
        groups = w.reshape(w.shape[0], num_groups, -1)
        parts = split_round(groups, axes)
        return sum_round(tuple(hidden @ part.reshape(w.shape[0], -1) for part in parts), axes, num_groups)

    specs = {"in_specs": (P(None, axes), P(axes)), "out_specs": P(), "check_vma": check_vma}
    return jax.shard_map(shard, mesh=mesh, **specs)


def _arguments(dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((T, F), (F, D), (T, D))]


def _step(run, hidden, w, dy):
    y, pull = jax.vjp(run, hidden, w)
    return y, *pull(dy)


@pytest.mark.parametrize(
    ("sizes", "num_groups", "check_vma"),
    [({"a": 2}, 1, True), ({"a": 4}, 3, True), ({"a": 8}, 1, False), ({"a": 2, "b": 2}, 2, True), ({"a": 1}, 1, True)],
)
def test_the_sum_and_its_gradients(sizes, num_groups, check_vma):
    mesh = mesh_of(**sizes)
    hidden, w, dy = _arguments()
    run = jax.jit(functools.partial(_step, _summed(tuple(sizes), num_groups, check_vma, mesh)))
    exact = [np.asarray(part, np.float64) for part in (hidden, w, dy)]
    for got, want in zip(run(hidden, w, dy), (exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_odd_rings():
    mesh, (hidden, w, dy) = mesh_of(a=3), _arguments()
    hidden, w = hidden[:, :15], w[:15]
    y, *_ = jax.jit(functools.partial(_step, _summed(("a",), 1, True, mesh)))(hidden, w, dy)
    np.testing.assert_allclose(y, hidden @ w, atol=1e-5)


def test_bytes_of_one_all_reduce_and_none_backward():
    size = 8
    run = _summed(("a",), 1, True, mesh_of(a=size))
    forward, both = (
        jax.jit(fn).lower(*_arguments()).compile().as_text()
        for fn in (lambda hidden, w, dy: run(hidden, w), functools.partial(_step, run))
    )
    for text in (forward, both):
        found = read(text)
        assert {one.kind: one.count for one in found.collectives} == {"collective-permute": size - 1, "all-gather": 1}
        assert found.wire_bytes == 2 * T * D * 4 * (size - 1) // size
    module = parse(forward)
    entry = module.computations[module.entry]
    products, permutes = (carriers(module, entry, op=op) for op in ("dot", "collective-permute"))
    assert len(products) == size
    assert not any(depends(entry, product, permutes) for product in products)
