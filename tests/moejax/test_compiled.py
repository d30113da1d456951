"""What the compiler makes of the layer: collectives counted, and nothing larger than it has to be.

T: tokens of the whole batch, t: tokens of one device, E: experts, c: rows of a cell, d: model width.
"""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from moejax import MoEConfig, SigmoidBias, make_mesh, moe
from moejax.layer import param_shapes
from tests.moejax import grid, hlo

# t = 512 tokens a device, c = ceil(1.25 * 512 * 2 / 8) = 160 rows a cell.
CFG = MoEConfig(d_model=16, d_ff=32, num_experts=8, top_k=2, dtype="float32")
BATCH, SEQ, DEVICES = 128, 32, 8
T, CELL = BATCH * SEQ, 160


def _lowered(cfg, mesh=None, backward=False, shape=(BATCH, SEQ)):
    """The forward, or everything that `grid.step` computes, lowered from shapes alone: no device work."""
    where = grid.Place(mesh)
    put = lambda shape, dtype, logical: jax.ShapeDtypeStruct(
        shape, dtype, sharding=mesh and jax.NamedSharding(mesh, where.rules.spec(logical, mesh))
    )
    params = {name: put(shape, cfg.param_dtype, logical) for name, (shape, logical) in param_shapes(cfg).items()}
    x, valid = put((*shape, cfg.d_model), "float32", ("batch",)), put(shape, bool, ("batch",))
    state = jax.eval_shape(lambda: cfg.router_rule.init_state(cfg.num_experts))
    if not backward:
        return jax.jit(functools.partial(moe, cfg=cfg)).lower(params, x, valid, state)
    return jax.jit(functools.partial(grid.step, cfg, where.rules)).lower(params, x, valid, state, x)


@functools.cache
def _texts(exchange, backward):
    cfg = MoEConfig(16, 32, 8, 2, dtype="float32", exchange=exchange)
    mesh = make_mesh(expert=DEVICES)
    with jax.set_mesh(mesh):
        lowered = _lowered(cfg, mesh, backward)
        return lowered.as_text(), lowered.compile().as_text()


def test_the_forward_has_two_all_to_alls():
    assert hlo.collectives(_texts("all_to_all", False)[1], "all-to-all") == ["f32"] * 2


def test_the_backward_adds_four_all_to_alls_at_most():
    count = len(hlo.collectives(_texts("all_to_all", True)[1], "all-to-all"))
    assert 3 <= count <= 6


def test_the_all_to_all_layer_gathers_nothing():
    for backward in (False, True):
        text = _texts("all_to_all", backward)[1]
        assert hlo.collectives(text, "all-gather") == hlo.collectives(text, "collective-permute") == []


def test_the_all_gather_layer_has_no_all_to_all():
    text = _texts("all_gather", True)[1]
    assert hlo.collectives(text, "all-to-all") == []
    assert hlo.collectives(text, "all-gather")


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("backward", [False, True])
def test_no_tensor_of_tokens_experts_capacity(exchange, backward):
    """Not before partitioning and not after: t*E*c is 655,360 on a device, and the largest array is far below."""
    lowered, compiled = _texts(exchange, backward)
    bound = T // DEVICES * CFG.num_experts * CELL
    assert CFG.cell_rows(T // DEVICES) == CELL
    assert hlo.larger_than(lowered, bound) == []
    assert hlo.larger_than(compiled, bound) == []


@pytest.mark.parametrize("backward", [False, True])
def test_every_activation_is_sharded_over_expert(backward):
    """No array of a device is as large as all tokens times the width, nor has a dimension as long as all tokens."""
    compiled = _texts("all_to_all", backward)[1]
    assert hlo.larger_than(compiled, T * CFG.d_model) == []
    assert [shape for shape in hlo.shapes(compiled) if T in shape or BATCH in shape] == []


def test_those_bounds_do_tell():
    """The same layer without a mesh holds all tokens: what the bounds above must see."""
    compiled = _lowered(CFG).compile().as_text()
    assert hlo.larger_than(compiled, T * CFG.d_model)
    assert [shape for shape in hlo.shapes(compiled) if T in shape]


@pytest.mark.parametrize(("exchange", "devices"), [("all_to_all", 1), ("weight_stream", DEVICES)])
def test_nothing_dropped_takes_no_cells_as_long_as_all_tokens(exchange, devices):
    """E*t rows, forward or backward: only where cells cross."""
    cfg, tokens = MoEConfig(16, 32, 8, 2, dtype="float32", capacity_factor=None, exchange=exchange), 512
    mesh = make_mesh(expert=devices) if devices > 1 else None
    bound = cfg.num_experts * tokens * cfg.d_model
    shape = (devices * tokens // SEQ, SEQ)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        assert hlo.larger_than(_lowered(cfg, mesh, backward=True, shape=shape).compile().as_text(), bound) == []
    if mesh is not None:
        cells = dataclasses.replace(cfg, exchange="all_to_all")
        with jax.set_mesh(mesh):
            assert hlo.larger_than(_lowered(cells, mesh, shape=shape).compile().as_text(), bound)


def _temp_bytes(cfg, seq):
    return _lowered(cfg, backward=True, shape=(seq // 32, 32)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_memory_is_linear_in_tokens(scope):
    """Four times the tokens, four times the temporaries: with four times the sequences too."""
    cfg = MoEConfig(16, 32, 8, 2, dtype="float32", loss_scope=scope)
    small, large = _temp_bytes(cfg, 1024), _temp_bytes(cfg, 4096)
    assert 3 < large / small < 4.5


def _operands(text, collective):
    """The type of what each such collective takes, in lowered text: that is before any backend widens a sum."""
    return re.findall(rf'"stablehlo\.{collective}".*?\}}[>)] : \((.*?)\) ->', text, re.DOTALL)


def test_gradients_of_float32_parameters_are_summed_in_float32():
    """Over the data axis, under bf16 products."""
    cfg = MoEConfig(16, 32, 8, 2, dtype="bfloat16", exchange="all_to_all")
    mesh = make_mesh(data=DEVICES)
    with jax.set_mesh(mesh):
        kinds = _operands(_lowered(cfg, mesh, backward=True).as_text(), "all_reduce")
    weights = [kind for kind in kinds if "8x16x32x" in kind or "8x32x16x" in kind]
    assert sorted(weights) == ["tensor<8x16x32xf32>"] * 2 + ["tensor<8x32x16xf32>"]
    assert not any("bf16" in kind for kind in kinds)


def test_gathered_weights_travel_in_bfloat16_and_their_gradients_in_float32():
    """Over the fsdp axis, of routed and shared experts."""
    cfg = MoEConfig(16, 32, 8, 2, dtype="bfloat16", num_shared_experts=1)
    mesh = make_mesh(fsdp=4, tensor=2)
    with jax.set_mesh(mesh):
        text = _lowered(cfg, mesh, backward=True).as_text()
    parts = [f"tensor<{e}x{part}xbf16>" for e in (1, 8) for part in ("16x4", "4x16", "4x16")]
    assert sorted(_operands(text, "all_gather")) == sorted(parts)
    wholes = [f"tensor<{e}x16x16xf32>" for e in (1, 8) for _ in range(3)]
    assert sorted(_operands(text, "reduce_scatter")) == wholes


def test_stages_carry_their_names():
    """Profiles, memory policies and these checks read the same words."""
    mesh = make_mesh(expert=DEVICES)
    cfg = MoEConfig(16, 32, 8, 2, dtype="float32", num_shared_experts=1, router=SigmoidBias())
    with jax.set_mesh(mesh):
        text = _lowered(cfg, mesh).as_text(debug_info=True)
    for name in ("moe/route", "moe/dispatch", "moe/experts", "moe/combine", "moe/shared"):
        assert name in text


def test_remat_policies_find_the_checkpoint_names():
    """A policy that saves a stage does not compute the product before it again."""

    def products(*names):
        def loss(params, x):
            return moe(params, x, None, None, cfg=CFG)[0].sum()

        policy = jax.checkpoint_policies.save_only_these_names(*names)
        grad = jax.grad(jax.checkpoint(loss, policy=policy))
        return str(jax.make_jaxpr(grad)(params, jnp.ones((2, 4, 16)))).count(" dot_general[")

    params = {name: jnp.ones(shape) for name, (shape, _) in param_shapes(CFG).items()}
    nothing = products("no such stage")
    assert products("moe/route") == nothing - 1
    assert products("moe/experts") == nothing - 1
    assert products("moe/route", "moe/experts") == nothing - 2
