"""The decoder: against a NumPy statement of its attention, across meshes, segments and remat policies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moejax
from moejax import MoEConfig, RoutingContext, Transformer, TransformerConfig
from moejax.remat import REMAT_POLICIES
from moejax.step import make_eval_step
from moejax.transformer import Attention, rotate
from tests.moejax import rules

MOE = MoEConfig(
    d_model=16, d_ff=8, num_experts=8, top_k=2, dtype="float32", capacity_factor=None, num_senders=8, num_shared_experts=1
)
CFG = TransformerConfig(
    vocab_size=32, num_layers=3, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, moe=MOE, num_dense_layers=1,
    qk_norm=True, dtype="float32",
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 12)).astype(np.int32)
SEGMENTS = np.repeat(np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32), 8, 0)
POSITIONS = np.repeat(np.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]], np.int32), 8, 0)


def logits_of(cfg, tokens=TOKENS, segments=SEGMENTS, positions=POSITIONS):
    model = Transformer(cfg, rngs=nnx.Rngs(0))
    return np.asarray(jax.jit(lambda *args: model(*args)[0])(tokens, segments, positions))


def test_attention_is_the_textbook_one():
    """Grouped heads, rotary positions, causal, within segments: a float64 loop over heads and queries."""
    cfg = dataclasses.replace(CFG, qk_norm=False)
    attention = Attention(cfg, rules=moejax.AxisRules(), rngs=nnx.Rngs(1))
    x = np.random.default_rng(1).standard_normal((1, 12, 16)).astype(np.float32)
    got = attention(jnp.asarray(x), jnp.asarray(SEGMENTS[:1]), jnp.asarray(POSITIONS[:1]))[0]
    wide = x.astype(np.float64)[0]
    heads = {name: np.einsum("sd,dhq->shq", wide, getattr(attention, name)[...]) for name in ("query", "key", "value")}
    angle = POSITIONS[0][:, None] / 1e4 ** (np.arange(2) / 2)

    def turn(head):
        pairs = (head[:, :2] + 1j * head[:, 2:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], 1)

    want = np.zeros((12, 4, 4))
    for head in range(4):
        query, key = turn(heads["query"][:, head]), turn(heads["key"][:, head // 2])
        for i in range(9):  # segment 0 is padding: whatever it holds is never used
            seen = [j for j in range(i + 1) if SEGMENTS[0, j] == SEGMENTS[0, i]]
            score = np.exp(query[i] @ key[seen].T / 2)
            want[i, head] = score / score.sum() @ heads["value"][seen, head // 2]
    want = np.einsum("shq,hqd->sd", want, np.asarray(attention.out[...], np.float64))
    np.testing.assert_allclose(got[:9], want[:9], rtol=1e-5, atol=1e-5)


def test_rotation_keeps_distances_only():
    """A score depends on the difference of two positions, not on where they are."""
    heads = jnp.asarray(np.random.default_rng(2).standard_normal((1, 2, 1, 8)), jnp.float32)
    score = lambda first: jnp.vdot(*rotate(heads, jnp.array([[first, first + 3]], jnp.int32), 1e4)[0])
    np.testing.assert_allclose(score(0), score(11), rtol=1e-5)


def test_a_later_token_changes_no_earlier_logits():
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 32
    before, after = logits_of(CFG), logits_of(CFG, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:5] - after[:, 3:5]).max() > 1e-3


def test_segments_do_not_see_each_other():
    """A document packed behind another has the logits that it has alone."""
    changed = TOKENS.copy()
    changed[:, :5] = (changed[:, :5] + 7) % 32
    np.testing.assert_array_equal(logits_of(CFG)[:, 5:9], logits_of(CFG, changed)[:, 5:9])
    alone = logits_of(CFG, TOKENS[:, 5:9], np.ones((8, 4), np.int32), POSITIONS[:, 5:9])
    np.testing.assert_allclose(logits_of(CFG)[:, 5:9], alone, rtol=2e-5, atol=2e-5)


def test_without_segments_and_positions_a_row_is_one_document():
    whole = logits_of(CFG, TOKENS, np.ones_like(TOKENS), np.repeat(np.arange(12, dtype=np.int32)[None], 8, 0))
    np.testing.assert_array_equal(whole, logits_of(CFG, TOKENS, None, None))


def test_recorded_routing_replays_and_ids_reach_the_router():
    """Layer by layer: what an evaluation records routes the same; router "hash" has the tokens' ids."""
    cfg = dataclasses.replace(CFG, moe=dataclasses.replace(MOE, router="hash", aux_loss=0.0))
    graphdef, params, rest = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)
    batch = {"tokens": TOKENS, "segment_ids": SEGMENTS, "positions": POSITIONS, "targets": TOKENS, "loss_mask": SEGMENTS > 0}
    step = jax.jit(make_eval_step(cfg, record=True))
    found = np.asarray(step(nnx.to_pure_dict(params), nnx.to_pure_dict(rest), batch)["expert"])
    want = np.stack([[rules.hashed(int(token), 2, 8, 0) for token in row] for row in TOKENS])
    np.testing.assert_array_equal(found, np.broadcast_to(np.where(SEGMENTS[:, :, None] > 0, want, -1), found.shape))
    model = nnx.merge(graphdef, params, rest)
    replay = jnp.stack([jnp.flip(found[0], -1), found[1]])
    run = jax.jit(lambda *args: model(*args)[1])
    stats = run(TOKENS, SEGMENTS, POSITIONS, RoutingContext(replay=replay, record=True))
    np.testing.assert_array_equal(np.where(SEGMENTS[:, :, None] > 0, stats.expert, -1), replay)


def gradient(cfg):
    graphdef, params, rest = nnx.split(Transformer(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params):
        logits, stats = nnx.merge(graphdef, params, rest)(*map(jnp.asarray, (TOKENS, SEGMENTS, POSITIONS)))
        return jnp.square(logits).mean() + stats.loss(cfg.moe)

    return jax.jit(jax.grad(loss)), params


@pytest.mark.parametrize("remat", [name for name in REMAT_POLICIES if name != "none"])
def test_remat_policies_change_no_gradient(remat):
    run, params = gradient(CFG)
    again, _ = gradient(dataclasses.replace(CFG, remat=remat))
    for want, got in zip(jax.tree.leaves(run(params)), jax.tree.leaves(again(params)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def num_exchanges(remat):
    with jax.set_mesh(moejax.make_mesh(expert=8)):
        run, params = gradient(dataclasses.replace(CFG, remat=remat))
        return run.lower(params).compile().as_text().count(" all-to-all(")


def test_remat_exchange_repeats_no_exchange():
    """Two all-to-alls forward and two backward a layer, as without remat; `full` sends the rows once more."""
    assert num_exchanges("none") == num_exchanges("exchange") == 4
    assert num_exchanges("full") > 4


@pytest.mark.parametrize(("num_dense", "every"), [(0, 1), (1, 1), (0, 2)])
def test_the_program_does_not_grow_with_depth(num_dense, every):
    def program_size(num_layers):
        cfg = dataclasses.replace(CFG, num_layers=num_layers, num_dense_layers=num_dense, moe_every=every)
        run, params = gradient(cfg)
        return len(run.lower(params).as_text().splitlines())

    # Not 8, the number of experts, nor a stack of one: what is alike by chance then is written once.
    assert program_size(6 + num_dense) == program_size(10 + num_dense)


@pytest.mark.parametrize(("num_dense", "every", "moe_layers"), [(0, 1, 6), (2, 1, 4), (0, 2, 3), (2, 2, 2), (6, 1, 0)])
def test_which_layers_are_moe(num_dense, every, moe_layers):
    cfg = dataclasses.replace(CFG, num_layers=6, num_dense_layers=num_dense, moe_every=every)
    assert cfg.num_moe_layers == moe_layers
    assert sum(repeats * len(kinds) for repeats, kinds in cfg.stacks) == 6
    _, stats = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))(jnp.asarray(TOKENS)))
    assert (stats.tokens_per_expert.shape[0] if stats else 0) == moe_layers


@pytest.mark.parametrize("axes", [{"data": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=str)
def test_logits_are_the_same_on_every_mesh(axes):
    want = logits_of(CFG)
    with jax.set_mesh(moejax.make_mesh(**axes)):
        np.testing.assert_allclose(logits_of(CFG), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": 3}, "d_model=16 is not divisible by num_heads=3: nearest 15 or 18"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4: legal are 1, 2, 4"),
        ({"head_dim": 5}, "head_dim=5: rotary positions need an even number"),
        ({"num_dense_layers": 4}, "num_dense_layers=4: needs 0 to num_layers=3"),
        ({"moe_every": 3}, "moe_every=3 does not divide the 2 layers"),
        ({"moe": dataclasses.replace(MOE, d_model=8)}, "moe.d_model=8: must be the model's d_model=16"),
        ({"remat": "all"}, "remat='all': legal values are"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0: needs a finite number above 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan: needs a finite number above 0"),
        ({"head_dim": 0}, "head_dim=0: needs a whole number of at least 1"),
        ({"num_layers": 0}, "num_layers=0: needs a whole number of at least 1"),
        ({"dtype": "int8"}, "dtype='int8': legal values are"),
    ],
)
def test_impossible_models_are_refused(change, says):
    with pytest.raises(ValueError, match="^" + says.replace("(", r"\(")):
        dataclasses.replace(CFG, **change)


@pytest.mark.parametrize(
    ("axes", "change", "says"),
    [
        ({"tensor": 8}, {}, "num_heads=4 is not divisible by mesh axis tensor of 8 devices: nearest num_heads 8"),
        ({"tensor": 4}, {}, "num_kv_heads=2 is not divisible by mesh axis tensor of 4 devices"),
        ({"tensor": 2}, {"vocab_size": 33}, "vocab_size=33 is not divisible by mesh axis tensor of 2 devices"),
        ({"expert": 8}, {"moe": dataclasses.replace(MOE, num_experts=12)}, "num_experts=12 is not divisible"),
    ],
)
def test_meshes_that_do_not_divide_the_model_are_refused(axes, change, says):
    with jax.set_mesh(moejax.make_mesh(**axes)), pytest.raises(ValueError, match="^" + says):
        Transformer(dataclasses.replace(CFG, **change), rngs=nnx.Rngs(0))
