"""Routers: choices, weights, ties, extremes, gradients, the bias and its update."""

import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import BiasState, MoEConfig, RoutingStats, SigmoidBias, Softmax, update_router
from moejax.line import route
from moejax.router import Router
from moejax.routers import Grouped
from tests.moejax import oracle

T, E = 5, 6
ROUTERS = [
    Softmax(),
    Softmax(renormalise=False),
    SigmoidBias(),
    SigmoidBias(renormalise=False),
    SigmoidBias(scale=2.5),
]
# -80 has a sigmoid whose square underflows, -1e4 one that does itself. (Between -88 and -104 backends differ.)
logit = st.one_of(st.integers(-20, 20).map(lambda n: n / 2), st.sampled_from([-1e4, 1e4, -80.0, -50.0, 50.0, 0.0]))
logits_drawn = hnp.arrays(np.float32, (T, E), elements=logit)
bias_drawn = hnp.arrays(np.float32, (E,), elements=st.integers(-8, 8).map(lambda n: n / 4))


def _state(router, bias):
    return BiasState(jnp.asarray(bias), 1e-3) if isinstance(router, SigmoidBias) else None


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@pytest.mark.parametrize("top_k", [1, 3, E])
@hypothesis.given(logits=logits_drawn, bias=bias_drawn)
def test_routes_as_stated(router, top_k, logits, bias):
    got = router(jnp.asarray(logits), top_k, _state(router, bias))
    want = [oracle.route_token(row, top_k, router, bias) for row in logits.astype(np.float64)]
    expert, weight, probs = (np.stack(part) for part in zip(*want, strict=True))
    np.testing.assert_array_equal(got.expert, expert)
    np.testing.assert_allclose(got.weight, weight, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(got.probs, probs, rtol=2e-6, atol=1e-30)
    np.testing.assert_array_equal(got.logits, logits)
    assert got.expert.dtype == jnp.int32
    assert {got.weight.dtype, got.probs.dtype, got.logits.dtype} == {jnp.dtype("float32")}


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@hypothesis.given(logits=logits_drawn, bias=bias_drawn)
def test_gradients_are_finite_differences_in_float64(router, logits, bias):
    """Moves each logit by +-1e-6 in the loops' float64, with the choices held; flat stretches must come out flat."""
    top_k, rng = 3, np.random.default_rng(0)
    d_weight, d_probs = rng.normal(size=(T, top_k)), rng.normal(size=(T, E))

    def loss(logits):
        routing = router(logits, top_k, _state(router, bias))
        return (routing.weight * d_weight).sum() + (routing.probs * d_probs).sum()

    got, wide = np.asarray(jax.grad(loss)(jnp.asarray(logits))), logits.astype(np.float64)
    for i in range(T):
        chosen = oracle.route_token(wide[i], top_k, router, bias)[0]
        for e in range(E):
            up, down = (_held(router, wide[i] + sign * 1e-6 * (np.arange(E) == e), chosen) for sign in (1, -1))
            slope = [(a - b) / 2e-6 for a, b in zip(up, down, strict=True)]
            np.testing.assert_allclose(got[i, e], slope[0] @ d_weight[i] + slope[1] @ d_probs[i], rtol=1e-4, atol=1e-5)


def _held(router, row, chosen):
    """Weights of the given choices, and the normalised scores."""
    log_scores = row - row.max() if isinstance(router, Softmax) else -np.logaddexp(0, -row)
    probs = oracle.ratios(log_scores)
    if router.renormalise:
        weight = oracle.ratios(log_scores[chosen])
    else:
        weight = probs[chosen] if isinstance(router, Softmax) else np.exp(log_scores[chosen])
    return weight * getattr(router, "scale", 1.0), probs


def test_equal_logits_go_to_the_lowest_experts():
    for router in ROUTERS:
        routing = router(jnp.zeros((2, E)), 3, _state(router, np.zeros(E, np.float32)))
        np.testing.assert_array_equal(routing.expert, [[0, 1, 2]] * 2)


def test_bias_steers_the_choice_and_not_the_weight():
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    router = SigmoidBias(renormalise=False)
    routing = router(logits, 2, BiasState(jnp.array([-1.0, 0.0, 0.0, 1.0]), 1e-3))
    np.testing.assert_array_equal(routing.expert, [[3, 1]])
    np.testing.assert_allclose(routing.weight, jax.nn.sigmoid(jnp.array([[-1.0, 1.0]])), rtol=1e-6)


def test_bias_has_no_gradient():
    def loss(bias):
        routing = SigmoidBias()(jnp.array([[2.0, 1.0, 0.0, -1.0]]), 2, BiasState(bias, 1e-3))
        return (routing.weight * jnp.array([[1.0, 3.0]])).sum() + routing.probs[0, 0]

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([0.1, 0.2, 0.3, 0.4])), np.zeros(4))


@pytest.mark.parametrize("rule", [Softmax(), SigmoidBias()], ids=repr)
def test_bf16_parameters_route_as_float32_ones_of_the_same_values(rule):
    """Logits that bf16 products would round together: the router must not compute in the parameters' dtype."""
    rng = np.random.default_rng(3)
    x, router = (jnp.asarray(rng.normal(size=shape) / 3, jnp.bfloat16) for shape in ((512, 64), (64, 16)))
    cfg = MoEConfig(64, 8, 16, 4, router=rule, param_dtype="bfloat16")
    state = rule.init_state(16)
    narrow = route(x, router, state, cfg)
    wide = route(x.astype(jnp.float32), router.astype(jnp.float32), state, cfg)
    np.testing.assert_array_equal(narrow.expert, wide.expert)
    np.testing.assert_array_equal(narrow.weight, wide.weight)
    assert narrow.weight.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    np.testing.assert_array_equal(narrow.expert, np.argsort(-exact, kind="stable", axis=1)[:, :4])
    coarse = rule((x @ router).astype(jnp.float32), 4, state)
    assert (coarse.expert != narrow.expert).any(), "these values do not tell the two apart"


def _stats(loads):
    stats = RoutingStats(**{field.name: jnp.zeros(()) for field in dataclasses.fields(RoutingStats)})
    return dataclasses.replace(stats, tokens_per_expert=jnp.asarray(loads, jnp.int32))


@hypothesis.given(hnp.arrays(np.int32, (2, 4), elements=st.integers(0, 2**20)))
def test_update_raises_the_bias_of_starved_experts(loads):
    state = BiasState(jnp.full((2, 4), 0.5), 0.25)
    got = update_router(state, _stats(loads))
    want = 0.5 + 0.25 * np.sign(loads.mean(1, keepdims=True) - loads)
    np.testing.assert_array_equal(got.bias, want)
    assert got.rate == 0.25


@hypothesis.given(hnp.arrays(np.int32, (2, 4), elements=st.integers(0, 2**20)))
def test_updates_by_error_are_in_proportion_to_it(loads):
    got = update_router(BiasState(jnp.full((2, 4), 0.5), 0.25, "error"), _stats(loads))
    mean = loads.mean(1, keepdims=True)
    want = 0.5 + 0.25 * (mean - loads) / np.where(mean > 0, mean, 1)
    np.testing.assert_allclose(got.bias, want, rtol=1e-5, atol=1e-6)
    assert (got.rate, got.rule) == (0.25, "error")


BALANCING = [
    SigmoidBias(rate=1e-2),
    SigmoidBias(rate=5e-2, rule="error"),
    Grouped(2, 1, rate=1e-2),
    Grouped(2, 1, rate=5e-2, rule="error"),
]


@pytest.mark.parametrize("router", BALANCING, ids=lambda router: f"{type(router).__name__}-{router.rule}")
def test_updates_balance_a_skewed_router(router):
    """Tokens that all prefer expert 0 are spread evenly after a few hundred updates."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(256, 4)) + 1.5 * np.eye(4)[0], jnp.float32)

    def update(state, _):
        loads = jnp.bincount(router(logits, 1, state).expert[:, 0], length=4)
        return update_router(state, _stats(loads)), loads

    _, loads = jax.lax.scan(update, router.init_state(4), length=200)
    assert loads[0, 0] > 150
    assert router.init_state(4).rule == router.rule
    assert abs(loads[-20:].mean(0) - 64).max() < 8


def test_a_router_without_state_has_nothing_to_update():
    assert update_router(None, _stats([1, 2])) is None
    assert Softmax().init_state(4) is None


def test_update_refuses_loads_of_another_shape():
    with pytest.raises(ValueError, match=r"tokens_per_expert of shape \(5,\).*state has shape \(4,\)"):
        update_router(SigmoidBias().init_state(4), _stats(np.ones(5)))


def test_sigmoid_refuses_to_route_without_its_bias():
    with pytest.raises(ValueError, match=r"state=None: SigmoidBias needs a BiasState"):
        SigmoidBias()(jnp.zeros((2, 4)), 2, None)


def test_routers_are_routers():
    assert all(isinstance(router, Router) for router in ROUTERS)
