"""The train step: one answer for every mesh, micro-batches that change nothing, states born sharded."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import moejax
from moejax.step import abstract_state, init_state, make_eval_step, make_train_step
from tests.moejax.test_transformer import CFG, MOE, POSITIONS, SEGMENTS, TOKENS

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
BATCH = {
    "tokens": TOKENS,
    "targets": np.roll(TOKENS, -1, 1),
    "segment_ids": SEGMENTS,
    "positions": POSITIONS,
    "loss_mask": (SEGMENTS > 0) & (np.random.default_rng(3).random(TOKENS.shape) < 0.8),
}
BIASED = dataclasses.replace(CFG, moe=dataclasses.replace(MOE, router="sigmoid_bias", capacity_factor=1.0))


def run(cfg, num_microbatches=1, num_steps=2):
    step = jax.jit(make_train_step(cfg, OPTIMIZER, num_microbatches), donate_argnums=0)
    state, metrics = init_state(cfg, OPTIMIZER, jax.random.key(0)), []
    for _ in range(num_steps):
        state, found = step(state, BATCH)
        metrics.append(jax.tree.map(np.asarray, found))
    return jax.tree.map(np.asarray, state), metrics


reference = functools.cache(run)


def assert_close(got, want, tolerance=1e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(np.asarray(a, np.float64) - b).max()
        assert error <= tolerance * max(np.abs(b).max(), 1e-3), (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("cfg", [CFG, BIASED], ids=["softmax", "sigmoid_bias"])
def test_steps_are_the_same_on_every_mesh(cfg, axes):
    """Losses, counts, router states and the global gradient norm (a clipped optimizer would show a wrong one)."""
    want, want_metrics = reference(cfg)
    with jax.set_mesh(moejax.make_mesh(**axes)):
        got, got_metrics = run(cfg)
    straggler = [metrics.pop("token_straggler") for metrics in got_metrics]
    assert np.isfinite(straggler).all()
    want_metrics = [{k: v for k, v in metrics.items() if k != "token_straggler"} for metrics in want_metrics]
    assert_close(got_metrics, want_metrics)
    assert_close(got.router, want.router)
    assert_close(got.params, want.params, 1e-3)  # Adam divides by the root of tiny second moments


def test_the_same_run_is_bit_equal():
    with jax.set_mesh(moejax.make_mesh(data=2, expert=4)):
        first, second = run(BIASED), run(BIASED)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_microbatches_change_nothing_where_nothing_depends_on_them():
    """Nothing dropped, losses counted by sequence: the same gradient whatever the accumulation."""
    cfg = dataclasses.replace(CFG, moe=dataclasses.replace(MOE, loss_scope="sequence", z_loss=0.0))
    (_, want), (_, got) = run(cfg), run(cfg, 4)
    names = ("loss", "total_loss", "aux_loss", "grad_norm", "num_targets", "tokens_per_expert", "dropped_fraction")
    assert_close([{k: m[k] for k in names} for m in got], [{k: m[k] for k in names} for m in want])


def test_losses_of_scope_batch_are_those_of_the_whole_batch():
    """On a mesh, in micro-batches with unlike numbers of tokens: losses, gradients and counts of one call on one device."""
    moe = dataclasses.replace(MOE, loss_scope="batch", z_loss=0.1, aux_loss=0.5)
    cfg = dataclasses.replace(CFG, moe=moe, num_layers=2, num_dense_layers=0)
    step = lambda *options: jax.jit(make_train_step(cfg, optax.sgd(1.0), *options))
    segments = np.where(np.arange(8)[:, None] < 3, 0, SEGMENTS)
    batch = {**BATCH, "segment_ids": segments, "loss_mask": BATCH["loss_mask"] & (segments > 0)}
    start = init_state(cfg, optax.sgd(1.0), jax.random.key(0))
    want = step()(start, batch)
    with jax.set_mesh(moejax.make_mesh(data=2, expert=2)):
        got = step(4, moejax.AxisRules(), 2)(init_state(cfg, optax.sgd(1.0), jax.random.key(0)), batch)
    for metrics in (got[1], want[1]):
        del metrics["token_straggler"], metrics["routing_entropy"]
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))


RANDOM = dataclasses.replace(
    CFG,
    num_layers=2,
    num_dense_layers=0,
    remat="full",
    moe=dataclasses.replace(MOE, router="noisy", jitter=0.1, extra_losses=(("load", 0.1),)),
)


def test_routers_that_draw_get_a_key_for_each_step_and_layer():
    optimizer = optax.sgd(0.0)
    want = step_twice(RANDOM, optimizer)
    with jax.set_mesh(moejax.make_mesh(data=2, expert=4)):
        got = step_twice(RANDOM, optimizer)
    assert_close(got, want)
    first, second = (metrics["tokens_per_expert"] for metrics in want)
    assert (first != second).any(), "no noise, or the same in both steps"
    quiet = dataclasses.replace(RANDOM, moe=dataclasses.replace(RANDOM.moe, router="softmax", jitter=0.0, extra_losses=()))
    state = init_state(RANDOM, optimizer, jax.random.key(0))
    still = jax.jit(make_eval_step(RANDOM))(state.params, state.router, BATCH)
    del state.params["stacks"][0]["blocks"][0]["feed_forward"]["router_noise"]
    plain = jax.jit(make_eval_step(quiet))(state.params, state.router, BATCH)
    np.testing.assert_allclose(still["loss_sum"], plain["loss_sum"], rtol=1e-6)


def step_twice(cfg, optimizer):
    step, state, found = jax.jit(make_train_step(cfg, optimizer)), init_state(cfg, optimizer, jax.random.key(0)), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        metrics.pop("token_straggler")
        found.append(jax.tree.map(np.asarray, metrics))
    return found


def test_micro_batches_that_walk_together_give_what_they_give_apart():
    """All gradients (the parameters after plain descent), losses, counts and router states; tokens are dropped."""
    cfg, optimizer = dataclasses.replace(BIASED, num_layers=2, num_dense_layers=0, remat="full"), optax.sgd(1.0)
    with jax.set_mesh(moejax.make_mesh(data=2, expert=2)):
        apart, together = (one_step(cfg, optimizer, 4, overlap) for overlap in (1, 2))
    assert_close(together, apart)
    assert together[1]["dropped_fraction"] > 0


def one_step(cfg, optimizer, num_microbatches, overlap):
    step = jax.jit(make_train_step(cfg, optimizer, num_microbatches, microbatch_overlap=overlap))
    return jax.tree.map(np.asarray, step(init_state(cfg, optimizer, jax.random.key(0)), BATCH))


def test_a_router_state_changes_once_a_step_from_all_microbatches():
    state, metrics = run(BIASED, 4, 1)
    load = metrics[0]["tokens_per_expert"].astype(np.float64)
    assert load.sum() == (SEGMENTS > 0).sum() * BIASED.moe.top_k * BIASED.num_moe_layers
    (bias,) = jax.tree.leaves(state.router)
    np.testing.assert_allclose(bias, 1e-3 * np.sign(load.mean(1, keepdims=True) - load), rtol=1e-6)


def test_router_states_change_without_touching_the_forward():
    state = init_state(BIASED, OPTIMIZER, jax.random.key(0))
    before = jax.tree.map(np.asarray, state.router)
    jax.jit(make_eval_step(BIASED))(state.params, state.router, BATCH)
    assert_close(jax.tree.map(np.asarray, state.router), before, 0)


def test_targets_that_do_not_count_add_nothing():
    """A micro-batch without any counted target neither divides by zero nor moves the mean."""
    mask = BATCH["loss_mask"].copy()
    mask[:4] = False
    cfg = dataclasses.replace(CFG, moe=dataclasses.replace(MOE, aux_loss=0.0, z_loss=0.0))
    garbage = np.where(mask, BATCH["targets"], 31 - BATCH["targets"])
    step = jax.jit(make_train_step(cfg, OPTIMIZER, 2))
    state = init_state(cfg, OPTIMIZER, jax.random.key(0))
    (_, a), (_, b) = (step(state, {**BATCH, "loss_mask": mask, "targets": t}) for t in (BATCH["targets"], garbage))
    assert a["loss"] == b["loss"]
    assert a["grad_norm"] == b["grad_norm"]
    evaluated = jax.jit(make_eval_step(cfg))(state.params, state.router, {**BATCH, "loss_mask": mask})
    assert evaluated["num_targets"] == mask.sum()
    np.testing.assert_allclose(evaluated["loss_sum"] / mask.sum(), a["loss"], rtol=1e-5)


def test_a_state_is_born_sharded_as_the_abstract_one_says():
    with jax.set_mesh(moejax.make_mesh(fsdp=2, expert=2, tensor=2)):
        state = init_state(BIASED, OPTIMIZER, jax.random.key(0))
        abstract = abstract_state(BIASED, OPTIMIZER, jax.random.key(0))
    for real, promised in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (real.shape, real.dtype, real.sharding) == (promised.shape, promised.dtype, promised.sharding)
    moe_block = state.params["stacks"][1]["blocks"][0]["feed_forward"]
    assert moe_block["expert_up"].addressable_shards[0].data.shape == (2, 4, 8, 4)
    assert state.opt_state[1][0].mu["stacks"][1]["blocks"][0]["feed_forward"]["expert_down"].sharding.spec[1] == "expert"
    assert state.params["embedding"].addressable_shards[0].data.shape == (16, 8)


def test_initial_values_do_not_depend_on_the_mesh():
    want = jax.tree.map(np.asarray, init_state(CFG, OPTIMIZER, jax.random.key(0)))
    with jax.set_mesh(moejax.make_mesh(fsdp=2, expert=2, tensor=2)):
        assert_close(jax.tree.map(np.asarray, init_state(CFG, OPTIMIZER, jax.random.key(0))), want, 1e-6)


def test_replicated_results_are_equal_on_all_devices():
    with jax.set_mesh(moejax.make_mesh(fsdp=2, expert=2, tensor=2)):
        state, metrics = jax.jit(make_train_step(BIASED, OPTIMIZER))(init_state(BIASED, OPTIMIZER, jax.random.key(0)), BATCH)
    checked = 0
    for leaf in jax.tree.leaves((state, metrics)):
        by_index = {}
        for shard in leaf.addressable_shards:
            by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for copies in by_index.values():
            checked += len(copies) - 1
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0])
    assert checked > 50


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_no_tensor_is_replicated_for_want_of_a_sharding(axes, capfd):
    """XLA says so when it gives up on a sharding. Compiled anew: a cached program would not say it."""
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with jax.set_mesh(moejax.make_mesh(**axes)):
            state = abstract_state(CFG, OPTIMIZER, jax.random.key(0))
            jax.jit(make_train_step(CFG, OPTIMIZER), donate_argnums=0).lower(state, BATCH).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert "Involuntary full rematerialization" not in capfd.readouterr().err


def test_microbatches_must_divide_the_batch():
    state = abstract_state(CFG, OPTIMIZER, jax.random.key(0))
    with pytest.raises(ValueError, match=r"^num_microbatches=3 does not divide the batch of 8: legal are 1, 2, 4, 8"):
        jax.eval_shape(make_train_step(CFG, OPTIMIZER, 3), state, BATCH)


def test_those_that_walk_together_must_divide_the_micro_batches():
    with pytest.raises(ValueError, match=r"^microbatch_overlap=3 does not divide num_microbatches=4: legal are 1, 2, 4"):
        make_train_step(CFG, OPTIMIZER, 4, microbatch_overlap=3)
    with pytest.raises(ValueError, match=r"^microbatch_overlap=0: needs a whole number of at least 1"):
        make_train_step(CFG, OPTIMIZER, 4, microbatch_overlap=0)
