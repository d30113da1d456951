"""The router losses in closed form, and what they say of balanced and collapsed routing."""

import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import MoEConfig, Routing, RoutingStats, Softmax
from moejax.context import BatchCounts
from moejax.losses import load_balance_loss, router_z_loss
from moejax.stats import add_microbatches
from tests.moejax import oracle

T, E, K, SEQ = 12, 4, 2, 5
CFG = MoEConfig(8, 8, E, K)
logits_drawn = hnp.arrays(np.float32, (T, E), elements=st.integers(-64, 64).map(lambda n: n / 16))
valid_drawn = hnp.arrays(bool, (T,))
INDEX = np.arange(T) // SEQ


def _stated(logits, valid, group):
    wide = logits.astype(np.float64)
    found = oracle.routes(CFG, np.eye(E), wide, valid, None, 1)
    return oracle.losses(CFG, wide, valid, found, group)


@pytest.mark.parametrize("scope", ["microbatch", "shard", "sequence"])
@hypothesis.given(logits=logits_drawn, valid=valid_drawn)
def test_losses_are_their_closed_forms(scope, logits, valid):
    routing = Softmax()(jnp.asarray(logits), K)
    got = load_balance_loss(routing, jnp.asarray(valid), scope=scope, sequence=(jnp.asarray(INDEX), 3))
    balance, z = _stated(logits, valid, INDEX if scope == "sequence" else np.zeros(T, int))
    np.testing.assert_allclose(got, balance, rtol=1e-6)
    np.testing.assert_allclose(router_z_loss(routing, jnp.asarray(valid)), z, rtol=1e-6)


@hypothesis.given(logits=logits_drawn, valid=valid_drawn, noise=logits_drawn)
def test_invalid_tokens_change_no_loss_and_get_no_gradient(logits, valid, noise):
    def loss(logits):
        routing = Softmax()(logits, K)
        return load_balance_loss(routing, jnp.asarray(valid)) + router_z_loss(routing, jnp.asarray(valid))

    other = np.where(valid[:, None], logits, noise)
    np.testing.assert_allclose(loss(jnp.asarray(logits)), loss(jnp.asarray(other)), rtol=1e-6)
    assert not np.asarray(jax.grad(loss)(jnp.asarray(logits)))[~valid].any()


@hypothesis.given(logits=logits_drawn, valid=valid_drawn)
def test_micro_batches_of_a_counted_batch_average_to_its_losses(logits, valid):
    """However unevenly its tokens are divided, in values and in gradients."""

    def loss(logits, parts):
        routing = [Softmax()(logits[part], K) for part in parts]
        counts = [jax.nn.one_hot(r.expert, E)[valid[part]].sum((0, 1)) for r, part in zip(routing, parts, strict=True)]
        batch = BatchCounts(sum(counts).astype(jnp.int32), jnp.asarray(valid.sum()), jnp.asarray(len(parts)))
        rest = [(r, jnp.asarray(valid[part])) for r, part in zip(routing, parts, strict=True)]
        each = [load_balance_loss(*one, scope="batch", batch=batch) + router_z_loss(*one, batch=batch) for one in rest]
        return sum(each) / len(each)

    whole, parts = [slice(0, T)], [slice(0, 2), slice(2, 9), slice(9, T)]
    got, want = (jax.value_and_grad(loss)(jnp.asarray(logits), part) for part in (parts, whole))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-7)
    balance, z = _stated(logits, valid, np.zeros(T, int))
    np.testing.assert_allclose(got[0], balance + z, rtol=1e-5)


def test_balance_is_one_when_even_and_num_experts_when_collapsed():
    even = jnp.tile(jnp.eye(E), (3, 1)) * 30
    loss = lambda logits: load_balance_loss(Softmax()(logits, 1), jnp.ones(T, bool))
    np.testing.assert_allclose(loss(even), 1, rtol=1e-5)
    np.testing.assert_allclose(loss(jnp.tile(jnp.eye(E)[:1] * 30, (T, 1))), E, rtol=1e-5)


def test_balance_descent_lowers_the_favourites_probability():
    logits = jnp.tile(jnp.array([[1.0, 0.0, 0.0, 0.0]]), (T, 1))
    grad = jax.grad(lambda logits: load_balance_loss(Softmax()(logits, 1), jnp.ones(T, bool)))(logits)
    assert (grad[:, 0] > 0).all()
    assert (grad[:, 1:] < 0).all()


def test_z_loss_of_equal_logits():
    routing = Softmax()(jnp.full((T, E), 2.0), K)
    np.testing.assert_allclose(router_z_loss(routing, jnp.ones(T, bool)), (2 + np.log(E)) ** 2, rtol=1e-6)


def test_counts_beyond_what_bf16_and_float16_hold_are_exact():
    """4097 tokens on one expert: bf16 stops counting ones at 256, float16 at 2048."""
    t = 4097
    routing = Routing(jnp.zeros((t, 1), jnp.int32), jnp.ones((t, 1)), jnp.zeros((t, 2)), jnp.full((t, 2), 0.5))
    np.testing.assert_allclose(load_balance_loss(routing, jnp.ones(t, bool)), 1, rtol=1e-6)


def _stats(n, **kwargs):
    """Zeros, but for what is given."""
    fields = [field.name for field in dataclasses.fields(RoutingStats)]
    counts = {name: jnp.zeros(n, jnp.int32) for name in fields if name.startswith("num_")}
    losses = {name: jnp.zeros(n) for name in fields if name not in {*counts, "expert"}}
    return RoutingStats(**{**losses, **counts, "tokens_per_expert": jnp.zeros((*n, E), jnp.int32), **kwargs})


def test_stats_weigh_and_reduce_over_layers():
    stats = _stats((2,), aux_loss=jnp.array([1.0, 3.0]), z_loss=jnp.array([2.0, 6.0]))
    cfg = MoEConfig(8, 8, E, K, aux_loss=0.5, z_loss=0.25)
    np.testing.assert_allclose(stats.loss(cfg), 2.0)
    np.testing.assert_allclose(stats.loss(cfg, reduce="sum"), 4.0)
    with pytest.raises(ValueError, match=r"reduce='max': legal values are 'mean', 'sum'"):
        stats.loss(cfg, reduce="max")


def test_dropped_fraction_of_nothing_is_zero():
    stats = _stats((2,), num_assignments=jnp.array([0, 8]), num_dropped=jnp.array([0, 2]))
    np.testing.assert_array_equal(stats.dropped_fraction, [0, 0.25])


def test_microbatches_add_counts_and_average_losses():
    stats = _stats((3, 2), aux_loss=jnp.arange(6.0).reshape(3, 2), num_dropped=jnp.arange(6).reshape(3, 2))
    stats = add_microbatches(stats)
    np.testing.assert_array_equal(stats.aux_loss, [2, 3])
    np.testing.assert_array_equal(stats.num_dropped, [6, 9])
    assert stats.tokens_per_expert.shape == (2, E)
