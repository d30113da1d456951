"""Experts that move between steps: nothing is lost, nothing compiled, and training goes on as if they had stayed."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from moejax import ExpertPlacement, make_mesh
from moejax.migration import by_expert, map_slots, migrate, num_moved, placements_of, tables_of
from moejax.step import init_state, make_train_step
from tests.moejax.test_step import BATCH, assert_close
from tests.moejax.test_transformer import CFG, MOE

E, P, LAYERS = 8, 12, 2
PLAIN = dataclasses.replace(CFG, num_layers=LAYERS, num_dense_layers=0, moe=dataclasses.replace(MOE, router="sigmoid_bias"))
SLOTS = dataclasses.replace(PLAIN, moe=dataclasses.replace(PLAIN.moe, num_slots=P))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
MESH = {"data": 2, "expert": 4}


@functools.cache
def trained(cfg, num_steps):
    """(state, losses) after steps on the mesh."""
    with jax.set_mesh(make_mesh(**MESH)):
        return train(cfg, init_state(cfg, OPTIMIZER, jax.random.key(0)), num_steps)


def train(cfg, state, num_steps):
    losses = []
    for _ in range(num_steps):
        state, metrics = step(cfg)(state, BATCH)
        losses.append(float(metrics["total_loss"]))
    return state, losses


@functools.cache
def step(cfg):
    return jax.jit(make_train_step(cfg, OPTIMIZER))


def drawn(rng, placement):
    """A few random moves: swaps, and slots that another expert takes or that become empty."""
    for _ in range(rng.integers(1, 4)):
        one, other = rng.choice(P, 2, replace=False)
        placement = placement.swap(int(one), int(other))
        free = [s for s, e in enumerate(placement.expert_of) if e < 0 or placement.expert_of.count(e) > 1]
        placement = placement.put(int(rng.integers(-1, E)), int(rng.choice(free)))
    return placement


def values(state):
    """What the state says of every expert, whatever its slots."""
    tree = by_expert({"params": state.params, "opt_state": state.opt_state}, state.router)
    return jax.tree.map(np.asarray, (state.step, tree))


def test_after_fifty_migrations_the_state_is_bit_for_bit_the_one_that_stayed():
    state, _ = trained(SLOTS, 1)
    rng, start = np.random.default_rng(0), placements_of(state.router)
    assert start == [ExpertPlacement.even(E, P)] * LAYERS
    placements, now, moved = start, state, 0
    with jax.set_mesh(make_mesh(**MESH)):
        for turn in range(50):
            before, placements = placements, [drawn(rng, placement) for placement in placements]
            moved += sum(map(num_moved, before, placements))
            now = migrate(now, placements)
            if turn % 10 == 0:
                jax.tree.map(assert_same_bits, values(now), values(state))
        assert placements_of(now.router) == placements
        back = migrate(now, start)
        _, stayed = train(SLOTS, state, 3)
        compilations = step(SLOTS)._cache_size()
        _, travelled = train(SLOTS, now, 3)
    assert moved > 200
    for leaf, old in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == old.sharding
        assert_same_bits(leaf, old)
    np.testing.assert_allclose(travelled, stayed, rtol=1e-5)
    assert step(SLOTS)._cache_size() == compilations, "a migration compiled the step again"


def assert_same_bits(got, want):
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_replicas_train_as_one_expert():
    """Under clipping by the global norm, momentum and weight decay, beside a model without slots; replicas stay alike."""
    (got, losses), (want, plain) = trained(SLOTS, 3), trained(PLAIN, 3)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    assert_close(values(got)[1]["params"], jax.tree.map(np.asarray, want.params), 1e-3)  # Adam divides by tiny numbers
    layer = got.params["stacks"][0]["blocks"][0]["feed_forward"]["expert_up"]
    assert_same_bits(layer[:, E:], layer[:, : P - E])
    (adam,) = [part for part in jax.tree.leaves(got.opt_state, is_leaf=lambda n: hasattr(n, "mu")) if hasattr(part, "mu")]
    moment = adam.mu["stacks"][0]["blocks"][0]["feed_forward"]["expert_up"]
    assert_same_bits(moment[:, E:], moment[:, : P - E])
    assert np.abs(moment).max() > 0


def test_replicas_survive_the_loss_of_a_device():
    """A device is gone and comes back with garbage: what it holds then comes from the replicas, moments included."""
    state, _ = trained(SLOTS, 1)
    start = ExpertPlacement(E, (0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, -1))
    with jax.set_mesh(make_mesh(**MESH)):
        gone = migrate(migrate(state, [start] * LAYERS), [start.without_devices([0], 4)] * LAYERS)
        spoil = lambda tree: map_slots(lambda leaf, _: leaf.at[:, :3].set(7), tree, tables_of(gone.router))
        spoilt = dataclasses.replace(gone, params=spoil(gone.params), opt_state=spoil(gone.opt_state))
        back = migrate(spoilt, [start] * LAYERS)
    jax.tree.map(assert_same_bits, values(back), values(state))


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_moved_is_refused():
    state, _ = trained(SLOTS, 1)
    even = ExpertPlacement.even(E, P)
    with pytest.raises(ValueError, match=r"^3 placements with slots \(12,\): the state has \(\(2, 12\), \(2, 8\)\)"):
        migrate(state, [even] * 3)
    with pytest.raises(ValueError, match=r"^the state has 0 tables of experts: needs one"):
        migrate(dataclasses.replace(state, router={}), [even] * LAYERS)
    lost = even.without_devices([1], 4)  # experts 3, 4 and 5 had no replica elsewhere, but for 3
    with jax.set_mesh(make_mesh(**MESH)):
        gone = migrate(state, [lost] * LAYERS)
        with pytest.raises(ValueError, match=r"^layer 0, slot 0: its expert is missing, there is no slot to take it from"):
            migrate(gone, [even.swap(0, 4)] * LAYERS)
