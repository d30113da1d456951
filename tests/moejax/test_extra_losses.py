"""The losses besides balance and z: each its closed form in float64, each gradient a finite difference."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import Routing, Softmax
from moejax.losses import entropy_loss, expert_divergence, group_loss, importance_loss, load_loss
from moejax.routers import TopP

T, E, K = 10, 6, 2
logits_drawn = hnp.arrays(np.float32, (T, E), elements=st.integers(-32, 32).map(lambda n: n / 16))
valid_drawn = hnp.arrays(bool, (T,))
domains_drawn = hnp.arrays(np.int32, (T,), elements=st.integers(0, 2))
SIZES = (1.0, 2.0, 5.0)


def _routing(logits):
    routing = Softmax(renormalise=False)(logits, K)
    return Routing(routing.expert, routing.weight, logits, routing.probs, load=jax.nn.sigmoid(logits))


def _variation(values):
    return np.var(values) / np.mean(values) ** 2 if values.any() else 0.0


def _entropy(probs):
    return -sum(p * np.log(p) for p in probs if p > 0)


def _stated(logits, valid, domain, expert):
    """All five by loops, the choices given: importance, load, entropy, divergence, group."""
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gates, pairs = np.zeros(E), np.zeros(3)
    for i in np.flatnonzero(valid):
        for e in expert[i]:
            gates[e] += probs[i, e]
            pairs[e // 2] += 1
    load = (1 / (1 + np.exp(-logits)))[valid].sum(0)
    entropy = np.mean([_entropy(row) for row in probs[valid]]) if valid.any() else 0.0
    means = [probs[valid & (domain == d)].mean(0) for d in range(3) if (valid & (domain == d)).any()]
    apart = [_entropy((a + b) / 2) - (_entropy(a) + _entropy(b)) / 2 for i, a in enumerate(means) for b in means[i + 1 :]]
    prob = probs[valid].reshape(-1, 3, 2).sum(2).mean(0) if valid.any() else np.zeros(3)
    group = sum(3 * s / np.mean(SIZES) * f / max(pairs.sum(), 1) * p for s, f, p in zip(SIZES, pairs, prob, strict=True))
    return np.array([_variation(gates), _variation(load), entropy, -np.mean(apart) if apart else 0.0, group])


def _all(logits, valid, domain):
    routing = _routing(logits)
    return jnp.stack(
        [
            importance_loss(routing, valid),
            load_loss(routing, valid),
            entropy_loss(routing, valid),
            expert_divergence(routing.probs, domain, valid, num_domains=3),
            group_loss(routing, valid, SIZES),
        ]
    )


_values, _slopes = jax.jit(_all), jax.jit(jax.jacrev(_all))


@hypothesis.given(logits=logits_drawn, valid=valid_drawn, domain=domains_drawn)
def test_losses_are_their_closed_forms(logits, valid, domain):
    expert = np.argsort(-logits, 1, kind="stable")[:, :K]
    want = _stated(logits.astype(np.float64), valid, domain, expert)
    np.testing.assert_allclose(_values(*map(jnp.asarray, (logits, valid, domain))), want, rtol=2e-5, atol=2e-6)


@hypothesis.given(logits=logits_drawn, valid=valid_drawn, domain=domains_drawn, direction=logits_drawn)
def test_gradients_are_finite_differences(logits, valid, domain, direction):
    """Along a direction, in the loops' float64, with the choices held."""
    expert = np.argsort(-logits, 1, kind="stable")[:, :K]
    got = np.asarray(_slopes(*map(jnp.asarray, (logits, valid, domain))))
    up, down = (_stated(logits.astype(np.float64) + h * direction, valid, domain, expert) for h in (1e-5, -1e-5))
    np.testing.assert_allclose((got * direction).sum((1, 2)), (up - down) / 2e-5, rtol=1e-4, atol=1e-4)


def test_extremes_have_finite_gradients():
    logits = jnp.asarray(np.random.default_rng(0).choice([-1e4, 0, 1e4], (T, E)), jnp.float32)
    assert np.isfinite(_slopes(logits, jnp.ones(T, bool), jnp.arange(T, dtype=jnp.int32) % 3)).all()


def test_divergence_is_log_two_apart_and_zero_alike():
    apart = jnp.repeat(jnp.eye(2), 3, 0)
    domain = jnp.repeat(jnp.arange(2), 3)
    np.testing.assert_allclose(expert_divergence(apart, domain), -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(expert_divergence(jnp.full((6, 2), 0.5), domain), 0, atol=1e-7)
    with pytest.raises(ValueError, match="num_domains=None: inside jit it must be a number"):
        jax.jit(expert_divergence)(apart, domain)


def test_unused_choices_are_in_no_count():
    logits = jnp.tile(jnp.array([[9.0, 1.0, 0.0, 0.0, 0.0, 0.0]]), (T, 1))
    loss = functools.partial(group_loss, valid=jnp.ones(T, bool), sizes=SIZES)
    one, two = TopP(0.5)(logits, 2), TopP(1.0)(logits, 2)
    assert not one.used[:, 1].any()
    np.testing.assert_allclose(loss(one), loss(Softmax()(logits, 1)), rtol=1e-6)
    np.testing.assert_allclose(loss(two), loss(Softmax()(logits, 2)), rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_losses_refuse_what_they_cannot_read():
    routing = Softmax()(jnp.zeros((T, E)), K)
    with pytest.raises(ValueError, match=r"routing.load=None: the load loss is one of router 'noisy'"):
        load_loss(routing, jnp.ones(T, bool))
    with pytest.raises(ValueError, match=r"sizes=\(1.0, 2.0, 3.0, 4.0\): needs sizes above 0 of groups that divide"):
        group_loss(routing, jnp.ones(T, bool), (1.0, 2.0, 3.0, 4.0))
