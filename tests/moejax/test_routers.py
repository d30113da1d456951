"""Every further router against the NumPy statement of its rule: ties, extremes, masks, replay, and gradients."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax import BiasState, MoEConfig, RoutingContext
from moejax.route import route
from moejax.router import ROUTERS
from moejax.routers import ExpertChoice, Grouped, Hash, Noisy, Prototype, Queue, QueueState, Sinkhorn, Softmax, Sticky, TopP
from moejax.routers.sticky import switch_rate
from moejax.routing import Tokens
from tests.moejax import rules

T, E, K, SEQ = 8, 6, 2, 4
PLAIN = RoutingContext()
# -80 has a sigmoid whose square underflows, -1e4 one that does itself.
logit = st.one_of(st.integers(-20, 20).map(lambda n: n / 2), st.sampled_from([-1e4, 1e4, -80.0, -50.0, 50.0, 0.0]))
logits_drawn = hnp.arrays(np.float32, (T, E), elements=logit)
bias_drawn = hnp.arrays(np.float32, (E,), elements=st.integers(-8, 8).map(lambda n: n / 4))
valid_drawn = hnp.arrays(bool, (T,))
close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-30)
equal = np.testing.assert_array_equal


def _tokens(valid=None, context=PLAIN, **kwargs):
    valid = jnp.ones(T, bool) if valid is None else jnp.asarray(valid)
    return Tokens(valid, jnp.arange(T, dtype=jnp.int32), context, seq=SEQ, **kwargs)


def _context(**kwargs):
    """A flat context, as a shard sees it: [T, ...]."""
    return RoutingContext(**{name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in kwargs.items()})


@pytest.mark.parametrize("router", [Grouped(3, 2), Grouped(2, 1), Grouped(6, 2, renormalise=False, scale=2.5)], ids=repr)
@hypothesis.given(logits=logits_drawn, bias=bias_drawn)
def test_grouped_is_the_rule_of_deepseek_v3(router, logits, bias):
    got = router(jnp.asarray(logits), K, BiasState(jnp.asarray(bias), 1e-3))
    for i, row in enumerate(logits):
        expert = rules.grouped(row, K, bias, router.num_groups, router.max_groups)
        weight, probs = rules.sigmoid_weights(row, expert, router.renormalise, router.scale)
        equal(got.expert[i], expert)
        close(got.weight[i], weight)
        close(got.probs[i], probs)


@hypothesis.given(logits=logits_drawn)
def test_prototype_takes_the_best_of_each_group(logits):
    got = Prototype()(jnp.asarray(logits), K)
    for i, row in enumerate(logits):
        expert, weight, probs = rules.prototype(row, K)
        equal(got.expert[i], expert)
        close(got.weight[i], weight)
        close(got.probs[i], probs)


@hypothesis.given(ids=hnp.arrays(np.int32, (T,)), seed=st.integers(0, 2**32 - 1))
def test_hash_goes_by_the_id_alone(ids, seed):
    got = Hash(seed)(jnp.zeros((T, E)), K, None, _tokens(context=_context(token_ids=ids)))
    equal(got.expert, [rules.hashed(int(i) % 2**32, K, E, seed) for i in ids])
    equal(got.weight, np.full((T, K), 0.5))
    close(got.probs.sum(1), np.ones(T))


def test_hash_spreads_ids_evenly_and_growth_moves_few():
    ids = jnp.arange(6000, dtype=jnp.int32)
    tokens = Tokens(jnp.ones(6000, bool), ids, RoutingContext(token_ids=ids))
    expert = Hash()(jnp.zeros((6000, E)), 1, None, tokens).expert[:, 0]
    assert abs(np.bincount(expert) - 1000).max() < 100
    grown = Hash()(jnp.zeros((6000, E + 1)), 1, None, tokens).expert[:, 0]
    assert set(np.asarray(grown)[np.asarray(grown != expert)]) == {E}


@pytest.mark.parametrize("router", [TopP(), TopP(0.9, renormalise=True)], ids=repr)
@hypothesis.given(logits=logits_drawn)
def test_top_p_uses_the_fewest_that_reach_p(router, logits):
    got = router(jnp.asarray(logits), 3)
    for i, row in enumerate(logits):
        expert, weight, used = rules.top_p(row, 3, router.p)
        before = np.cumsum(rules.softmax(row)[expert]) - rules.softmax(row)[expert]
        hypothesis.assume(abs(before - router.p).min() > 1e-6)  # where float32's sum decides, it may
        equal(got.expert[i], expert)
        equal(got.used[i], used)
        close(got.weight[i], weight / weight.sum() if router.renormalise else weight)
    assert got.used[:, 0].all()


@hypothesis.given(logits=logits_drawn, valid=valid_drawn, bonus=st.sampled_from([0.0, 0.5, 3.0, 100.0]))
def test_sticky_prefers_the_last_valid_tokens_experts(logits, valid, bonus):
    got = Sticky(bonus)(jnp.asarray(logits), K, None, _tokens(valid))
    want = [rules.sticky(logits[i : i + SEQ], valid[i : i + SEQ], K, bonus) for i in range(0, T, SEQ)]
    equal(got.expert, np.concatenate(want))
    close(got.weight, np.stack([rules.softmax(row[e]) for row, e in zip(logits, np.concatenate(want), strict=True)]))


def test_a_bonus_lowers_the_switch_rate():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, E)), jnp.float32)
    rate = lambda bonus: float(switch_rate(Sticky(bonus)(logits, K).expert[None]))
    assert rate(0.0) > rate(1.0) > rate(100.0) == 0


def test_switch_rate_counts_new_experts_of_valid_neighbours():
    expert = jnp.array([[[0, 1], [1, 0], [1, 2], [3, 4]]])
    np.testing.assert_allclose(switch_rate(expert), (0 + 0.5 + 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(switch_rate(expert, jnp.array([[True, True, True, False]])), 0.25)
    assert switch_rate(expert, jnp.array([[True, False, True, False]])) == 0


@hypothesis.given(logits=logits_drawn, valid=valid_drawn)
def test_sinkhorn_takes_the_largest_shares_of_the_transport(logits, valid):
    router = Sinkhorn(num_iterations=8)
    got = router(jnp.asarray(logits), K, None, _tokens(valid))
    for start in range(0, T, SEQ):
        part = slice(start, start + SEQ)
        shares = rules.transport(logits[part], valid[part], 8)
        chosen = np.take_along_axis(shares, np.asarray(got.expert[part]), 1)
        largest = -np.sort(-shares, 1)[:, :K]
        # Near-ties may go either way: float32 has 1e-3 between numbers around 1e4.
        np.testing.assert_allclose(chosen[valid[part]], largest[valid[part]], atol=1e-4 + 1e-6 * abs(shares).max())
    close(got.weight, np.take_along_axis(np.stack([rules.softmax(row) for row in logits]), np.asarray(got.expert), 1))


def test_sinkhorn_balances_each_sequence_in_training_only():
    skewed = jnp.asarray(np.random.default_rng(1).normal(size=(T, E)) + 4 * np.eye(E)[0], jnp.float32)
    train = Sinkhorn()(skewed, 1, None, _tokens()).expert
    evaluation = Sinkhorn()(skewed, 1, None, _tokens(context=RoutingContext(train=False))).expert
    assert np.bincount(evaluation[:, 0]).max() >= 6
    assert np.bincount(train[:, 0], minlength=E).max() <= 3
    again = Sinkhorn()(skewed.at[SEQ:].multiply(-3), 1, None, _tokens()).expert
    equal(again[:SEQ], train[:SEQ])


@pytest.mark.parametrize("router", [ExpertChoice(), ExpertChoice(causal=True), ExpertChoice(max_experts=2)], ids=repr)
@hypothesis.given(logits=logits_drawn, valid=valid_drawn)
def test_experts_take_their_best_tokens(router, logits, valid):
    got = router(jnp.asarray(logits), K, None, _tokens(valid))
    scores = np.asarray(jax.nn.log_softmax(logits))  # its rounding decides what ties
    parts = [slice(i, i + SEQ) for i in range(0, T, SEQ)]
    taken = np.concatenate([rules.expert_choice(scores[part], valid[part], K, router.causal) for part in parts])
    assert taken.sum() <= valid.sum() * K
    assert router.causal or taken.sum() == valid.sum() * K
    for i, row in enumerate(logits):
        wanted = [e for e in rules.best(scores[i], E) if taken[i, e]][: router.max_experts]
        used = np.asarray(got.used[i])
        equal(np.asarray(got.expert[i])[used], wanted)
        close(np.asarray(got.weight[i])[used], rules.softmax(row)[wanted])
        assert not np.asarray(got.weight[i])[~used].any()
    for e, mine in enumerate(np.asarray(got.token)):
        assert sorted(mine[mine < T]) == list(np.flatnonzero(taken[:, e]))


def test_causal_expert_choice_does_not_read_the_future():
    logits = np.random.default_rng(3).normal(size=(64, E)).astype(np.float32)
    later = logits.copy()
    later[40:] += np.random.default_rng(4).normal(size=(24, E)) * 3
    choose = lambda router, values: np.asarray(router(jnp.asarray(values), K).record)[:40]
    equal(choose(ExpertChoice(causal=True), later), choose(ExpertChoice(causal=True), logits))
    assert (choose(ExpertChoice(), later) != choose(ExpertChoice(), logits)).any()
    loads = np.bincount(choose(ExpertChoice(causal=True), logits).ravel() + 1, minlength=E + 1)[1:]
    assert loads.min() > 5, "each expert's quota of 40 tokens is 13"


@hypothesis.given(logits=logits_drawn, noise=logits_drawn)
def test_noisy_is_the_rule_of_shazeer(logits, noise):
    context = RoutingContext(key=jax.random.key(3))
    got = Noisy()(jnp.asarray(logits), K, None, _tokens(context=context, noise_logits=jnp.asarray(noise)))
    for i in range(T):
        drawn = np.asarray(jax.random.normal(jax.random.fold_in(context.key, i), (E,)))
        deviation = np.logaddexp(0, noise[i].astype(np.float64)).astype(np.float32) + np.float32(1e-2)
        noisy = logits[i] + drawn * deviation
        equal(got.expert[i], rules.best(noisy, K))
        np.testing.assert_allclose(got.weight[i], rules.softmax(noisy[rules.best(noisy, K)]), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got.load[i], rules.in_top_k(logits[i], noisy, deviation, K), rtol=1e-3, atol=1e-5)


def test_noisy_has_no_noise_at_evaluation_and_asks_for_a_key_in_training():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(T, E)), jnp.float32)
    still = Noisy()(logits, K, None, _tokens(context=RoutingContext(train=False), noise_logits=logits))
    equal(still.expert, Softmax()(logits, K).expert)
    equal(still.load.sum(0), np.bincount(np.ravel(still.expert), minlength=E))
    with pytest.raises(ValueError, match=r"context.key=None: router 'noisy' draws random numbers"):
        Noisy()(logits, K, None, _tokens(noise_logits=logits))


def test_hash_asks_for_ids():
    with pytest.raises(ValueError, match=r"context.token_ids=None: router 'hash' goes by them"):
        Hash()(jnp.zeros((T, E)), K, None, _tokens())


@hypothesis.given(logits=logits_drawn, backlog=hnp.arrays(np.float32, (3,), elements=st.integers(0, 200)))
def test_queue_charges_the_backlog_of_the_device(logits, backlog):
    router = Queue((1.0, 2.0, 1.0), price=1 / 64)
    got = router(jnp.asarray(logits), K, QueueState(jnp.asarray(backlog), router.rates, E))
    for i, row in enumerate(logits):
        expert = rules.best(rules.biased(row, -np.repeat(backlog, 2) / 64), K)
        equal(got.expert[i], expert)
        close(got.weight[i], rules.sigmoid_weights(row, expert, True)[0])


@hypothesis.given(loads=hnp.arrays(np.int32, (E,), elements=st.integers(0, 1000)), backlog=st.integers(0, 5))
def test_backlogs_grow_by_what_exceeds_a_devices_share(loads, backlog):
    state = QueueState(jnp.full(3, float(backlog)), (1.0, 2.0, 1.0), E)
    close(state.update(jnp.asarray(loads)).backlog, rules.next_backlog([backlog] * 3, loads, state.rates).astype(np.float32))


def test_queues_share_the_load_by_service_rate():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(512, 4)) + 2 * np.eye(4)[0], jnp.float32)
    router = Queue((1.0, 3.0))

    def update(state, _):
        loads = jnp.bincount(router(logits, 1, state).expert[:, 0], length=4)
        return state.update(loads), loads

    loads = np.asarray(jax.lax.scan(update, router.init_state(4), length=200)[1])
    assert loads[0, :2].sum() > 300
    np.testing.assert_allclose(loads[-50:, :2].sum(1).mean(), 128, rtol=0.1)


WAYS = [*sorted(ROUTERS)]


def _run(name, logits, context, valid=None, jitter=0.0):
    """The router of that name, with everything that it could ask for, through `route` with an identity matrix."""
    valid = np.ones(T, bool) if valid is None else valid
    return _compiled(name, jitter)(jnp.asarray(logits), context, jnp.asarray(valid))


def _rule(name):
    return {"grouped": Grouped(3, 2), "expert_choice": ExpertChoice(max_experts=K)}.get(name) or ROUTERS[name]()


@functools.cache
def _compiled(name, jitter=0.0):
    rule = _rule(name)
    cfg = MoEConfig(E, 8, E, K, router=rule, jitter=jitter)
    noise, state = jnp.eye(E) if name == "noisy" else None, rule.init_state(E)
    return jax.jit(lambda logits, context, valid: route(logits, jnp.eye(E), state, cfg, _tokens(valid, context), noise))


IDS = np.arange(T, dtype=np.int32) * 7


@pytest.mark.parametrize("name", WAYS)
@hypothesis.given(logits=logits_drawn, mask=hnp.arrays(bool, (T, E)))
@hypothesis.settings(max_examples=6)
def test_masks_hold_for_every_router(name, logits, mask):
    context = _context(key=jax.random.key(0), token_ids=IDS, expert_mask=mask)
    got = _run(name, logits, context)
    allowed = np.take_along_axis(mask, np.asarray(got.expert), 1)
    assert np.isfinite(got.weight).all()
    equal(np.asarray(got.used) & ~allowed, np.zeros((T, K), bool))
    assert not np.asarray(got.weight)[~allowed].any()
    some = mask.any(1)
    if name not in ("prototype", "grouped", "expert_choice"):  # those may find a group without, or nobody who wants it
        assert np.asarray(got.used)[some].any(1).all()
    if name not in ("prototype", "hash"):  # a group may be ruled out whole, and hashes know no probabilities
        close(np.where(mask, got.probs, 0)[some].sum(1), np.asarray(got.probs)[some].sum(1))


@pytest.mark.parametrize("name", WAYS)
def test_replay_takes_recorded_choices_with_todays_weights(name):
    rng = np.random.default_rng(5)
    logits, replay = rng.normal(size=(T, E)).astype(np.float32), rng.permuted(np.tile(np.arange(E), (T, 1)), axis=1)[:, :K]
    base = {"key": jax.random.key(0), "token_ids": IDS}
    first = _run(name, logits, _context(**base))
    again = _run(name, logits, _context(**base, replay=np.asarray(first.record)))
    for field in ("record", "weight", "probs", "logits"):
        equal(getattr(again, field), getattr(first, field))
    other = _run(name, logits, _context(**base, replay=replay.astype(np.int32)))
    equal(other.expert, replay)
    close(other.probs, first.probs if name != "hash" else (np.eye(E)[replay].sum(1) / K))


@pytest.mark.parametrize("name", WAYS)
def test_forced_balance_is_exact(name):
    got = _run(name, np.zeros((T, E), np.float32), _context(key=jax.random.key(0), token_ids=IDS, force_balance=True))
    equal(np.ravel(got.expert), np.arange(T * K) % E)


@pytest.mark.parametrize("name", WAYS)
def test_a_budget_bounds_the_experts_of_an_evaluation(name):
    logits = np.random.default_rng(6).normal(size=(T, E)).astype(np.float32)
    free = _run(name, logits, _context(token_ids=IDS, train=False))
    got = _run(name, logits, _context(token_ids=IDS, train=False, expert_budget=3))
    used = np.asarray(got.expert)[np.asarray(got.used)]
    best = set(rules.best(np.asarray(free.probs).sum(0), 3))
    assert set(used) <= best < set(range(E))
    assert set(np.ravel(free.expert)) - best, "these logits do not need the budget"
    unbounded = _context(key=jax.random.key(0), token_ids=IDS, expert_budget=3)
    assert _run(name, logits, unbounded).used is None or name in ("top_p", "expert_choice")


@pytest.mark.parametrize("name", WAYS)
def test_parameters_in_bfloat16_route_as_their_values_do(name):
    """No product is rounded to the parameters' dtype: the same choices as of the same numbers in float32."""
    rng = np.random.default_rng(8)
    x, matrix = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((T, E), (E, E)))
    narrow = matrix.astype(jnp.bfloat16)
    context = _context(key=jax.random.key(0), token_ids=IDS)
    rule = _rule(name)
    cfg, state = MoEConfig(E, 8, E, K, router=rule), rule.init_state(E)
    found = [route(x, m, state, cfg, _tokens(context=context), m) for m in (narrow, narrow.astype(jnp.float32))]
    jax.tree.map(equal, *found)
    np.testing.assert_allclose(found[0].logits, np.asarray(x, np.float64) @ np.asarray(narrow, np.float64), rtol=1e-5)


@pytest.mark.parametrize("name", WAYS)
@hypothesis.given(logits=logits_drawn, valid=valid_drawn)
@hypothesis.settings(max_examples=6)
def test_gradients_are_finite_at_extremes(name, logits, valid):
    context = _context(key=jax.random.key(0), token_ids=IDS)

    def total(logits):
        got = _run(name, logits, context, valid)
        return (
            (got.weight * jnp.arange(1.0, K + 1)).sum()
            + (got.probs[:, 0]).sum()
            + (0 if got.load is None else got.load[:, 1].sum())
        )

    assert np.isfinite(jax.grad(total)(jnp.asarray(logits))).all()


def test_jitter_scales_the_inputs_of_training_alone():
    logits = np.full((T, E), 8.0, np.float32)
    train = _run("softmax", logits, _context(key=jax.random.key(1)), jitter=0.25)
    scale = np.asarray(train.logits) / 8
    assert ((scale >= 0.75) & (scale <= 1.25)).all()
    assert scale.std() > 0.1
    equal(_run("softmax", logits, RoutingContext(train=False), jitter=0.25).logits, logits)
    with pytest.raises(ValueError, match=r"context.key=None: jitter=0.25 draws random numbers"):
        _run("softmax", logits, RoutingContext(), jitter=0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grouped(0), r"num_groups=0: needs a whole number of at least 1"),
        (lambda: Grouped(2, 3), r"max_groups=3: needs 1 to num_groups=2"),
        (lambda: Grouped(rule="eror"), r"rule='eror': legal values are 'sign', 'error' \(did you mean 'error'\?\)"),
        (lambda: TopP(1.5), r"p=1.5: needs a probability, above 0 and at most 1"),
        (lambda: TopP(0), r"p=0: needs a finite number above 0"),
        (lambda: Queue([1.0]), r"rates=\[1.0\]: needs a tuple of numbers above 0"),
        (lambda: Queue((1.0, -1)), r"rates=-1: needs a finite number above 0"),
        (lambda: Hash(-1), r"seed=-1: needs a whole number from 0"),
        (lambda: Noisy(0), r"floor=0: needs a finite number above 0"),
        (lambda: Sticky(-1), r"bonus=-1: needs a finite number of at least 0"),
        (lambda: ExpertChoice(max_experts=0), r"max_experts=0: needs a whole number of at least 1"),
        (lambda: ExpertChoice(causal=1), r"causal=1: needs True or False"),
        (lambda: MoEConfig(8, 8, E, K, router=ExpertChoice(max_experts=1)), r"max_experts=1: needs top_k=2 to num_experts=6"),
        (lambda: Sinkhorn(0), r"num_iterations=0: needs a whole number of at least 1"),
        (lambda: Sinkhorn(temperature=0), r"temperature=0: needs a finite number above 0"),
        (lambda: Softmax(scale=-1), r"scale=-1: needs a finite number of at least 0"),
        (lambda: Queue()(jnp.zeros((2, 4)), 1, None), r"router state=None: Queue needs a QueueState"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_routers_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
