"""Placement makers and moves: balance against the bound that no maker can pass, and moves only where they pay."""

import hypothesis
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import strategies as st

from layouts.errors import InputError
from layouts.moves import LoadHistory, MoveCost, View, improve
from layouts.placement import balanced_packing, devices_per_token, replicas, replicate, together
from moejax.migration import num_moved
from moejax.placement import ExpertPlacement

E, P, D = 16, 24, 4
loads_drawn = hnp.arrays(np.int64, (E,), elements=st.integers(0, 1000))
FREE = MoveCost(slot_bytes=1e-9, bytes_per_second=1.0, row_seconds=1.0, horizon_steps=1.0)


def zipf(seed=0, num_experts=E):
    return np.random.default_rng(seed).permutation(1000 / (1 + np.arange(num_experts)))


@hypothesis.given(weights=loads_drawn)
def test_packs_are_equal_in_number_and_close_in_weight(weights):
    pack = balanced_packing(weights, D)
    assert np.bincount(pack).tolist() == [E // D] * D
    total = np.bincount(pack, weights, D)
    assert total.max() - total.min() <= weights.max()  # no pack is a whole heaviest item behind another


def test_packing_places_the_heaviest_first():
    assert balanced_packing([1, 9, 8, 2], 2).tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match="num_packs=3 does not divide 4 items: needs a divisor"):
        balanced_packing([1, 1, 1, 1], 3)


@hypothesis.given(loads=loads_drawn)
def test_replicas_lower_the_largest_load_of_a_slot_as_far_as_can_be(loads):
    """By exhaustion from above: no smaller maximum is possible with as many slots."""
    count = replicas(loads, P)
    assert count.sum() == P
    assert count.min() >= 1
    largest = (loads / count).max()
    needed = np.maximum(1, np.ceil(loads / max(largest * (1 - 1e-9), 1e-12)))
    assert largest == 0 or needed.sum() > P


@hypothesis.given(loads=loads_drawn, nodes=st.sampled_from([1, 2]))
def test_every_expert_has_a_slot_and_devices_their_share(loads, nodes):
    made = replicate(loads, P, D, nodes, num_groups=4)
    np.testing.assert_allclose(made.device_loads(loads, D).sum(), loads.sum())
    if nodes == 1:
        return
    node_of = {e: {slot // (P // nodes) for slot in made.slots_of(e)} for e in range(E)}
    assert all(len(found) == 1 for found in node_of.values()), "replicas of an expert on two nodes"
    for group in range(4):
        assert len(set.union(*(node_of[e] for e in range(group * 4, group * 4 + 4)))) == 1


def test_replication_balances_what_packing_alone_cannot():
    loads = zipf()
    straggler = lambda made: made.device_loads(loads, D).max() / (loads.sum() / D) - 1
    packed, made = replicate(loads, E, D), replicate(loads, P, D)
    assert straggler(ExpertPlacement.even(E, E)) > straggler(packed) > 0.15
    assert straggler(made) < 0.02


def traced(seed=0):
    """Tokens that use experts of one of four hidden families, which are scattered over the indices."""
    rng = np.random.default_rng(seed)
    families = rng.permutation(E).reshape(4, 4)
    expert = np.stack([rng.permutation(families[rng.integers(4)])[:2] for _ in range(2000)])
    member = (expert[:, :, None] == np.arange(E)).any(1)
    pairs = member.T.astype(int) @ member
    return expert, np.bincount(expert.ravel(), minlength=E), pairs


def test_co_activation_lowers_the_devices_that_a_token_visits():
    expert, loads, pairs = traced()
    alone, near = replicate(loads, E, D), together(loads, pairs, E, D)
    assert devices_per_token(expert, alone, D) > 1.5
    assert devices_per_token(expert, near, D) == 1.0  # the families are found
    assert near.device_loads(loads, D).max() <= 1.1 * alone.device_loads(loads, D).max()


@hypothesis.given(loads=loads_drawn, seed=st.integers(0, 5))
@hypothesis.settings(max_examples=8)
def test_co_activation_keeps_the_balance(loads, seed):
    pairs = np.random.default_rng(seed).integers(0, 50, (E, E))
    before = replicate(loads, P, D).device_loads(loads, D).max()
    assert together(loads, pairs, P, D, slack=0.05).device_loads(loads, D).max() <= 1.05 * before + 1e-6


def test_moves_are_made_where_they_pay_and_nowhere_else():
    loads, start = zipf(), ExpertPlacement(E, (*range(E), *[-1] * (P - E)))
    free = improve(start, loads, D, FREE)
    mean = loads.sum() / D
    assert start.device_loads(loads, D).max() > 1.5 * mean
    assert free.device_loads(loads, D).max() < 1.1 * mean
    saved = start.device_loads(loads, D).max() - free.device_loads(loads, D).max()
    dear = MoveCost(slot_bytes=saved, bytes_per_second=1.0, row_seconds=1.0, horizon_steps=1.0)
    assert improve(start, loads, D, dear) is start, "one slot costs more than all moves together win"
    some = improve(start, loads, D, MoveCost(saved / 6, 1.0, 1.0, 1.0))
    assert 0 < num_moved(start, some) < num_moved(start, free)


@hypothesis.given(loads=loads_drawn, seed=st.integers(0, 9))
def test_what_a_move_is_said_to_do_is_what_it_does(loads, seed):
    """The devices' loads after each move that is weighed, beside those of the placement after it."""
    rng = np.random.default_rng(seed)
    more = rng.integers(-1, E, P - E)
    start = ExpertPlacement(E, tuple(rng.permutation([*range(E), *more]).tolist()), frozenset({int(rng.integers(P))}))
    view = View.of(start, loads.astype(float), D)
    swaps, puts = view.pairs(view.usable), view.pairs(view.free)
    for after, one, other in zip(view.after_swap(*swaps), *swaps, strict=True):
        np.testing.assert_allclose(after, start.swap(int(one), int(other)).device_loads(loads, D), atol=1e-6)
    for after, one, other in zip(view.after_put(*puts), *puts, strict=True):
        np.testing.assert_allclose(after, start.put(start.expert_of[one], int(other)).device_loads(loads, D), atol=1e-6)


def test_balanced_loads_move_nothing():
    even = ExpertPlacement.even(E, E)
    assert improve(even, np.ones(E), D, FREE) is even


def test_moves_leave_dead_slots_alone():
    start = ExpertPlacement.even(E, P).without_devices([3], D)
    made = improve(start, zipf(1), D, FREE)
    assert made.dead == start.dead
    assert made.expert_of[18:] == start.expert_of[18:]


def test_history_forgets():
    history = LoadHistory(decay=0.5)
    with pytest.raises(InputError, match="the history of loads is empty"):
        _ = history.mean
    for loads in ([4.0, 0.0], [0.0, 4.0]):
        history = history.add(np.array(loads))
    np.testing.assert_allclose(history.mean, [4 / 3, 8 / 3])
    with pytest.raises(InputError, match=r"decay=1: needs a number of at least 0 and below 1"):
        LoadHistory(decay=1)
    with pytest.raises(InputError, match=r"slot_bytes=0: needs a number above 0"):
        MoveCost(0, 1, 1, 1)
    with pytest.raises(InputError, match=r"num_slots=25 is not divisible by 4"):
        replicate(np.ones(E), 25, D)
    with pytest.raises(InputError, match=r"num_slots=8: 16 experts need that many at least"):
        replicas(np.ones(E), 8)
