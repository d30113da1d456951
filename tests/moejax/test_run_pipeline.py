"""run_pipeline with layers of a user's own: what runs is the table, op for op, and what it is refused for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import moejax
from layouts.schedules import make_schedule
from layouts.tables import Shape
from moejax import LayerKind, PipelineModel, PipelineParams, StageLayers, run_pipeline
from tests.moejax.test_ticks import order_of

TOKENS = ("fsdp",)


def apply(params, given, x, inputs):
    h = jnp.tanh(x @ params["up"])
    loss = lax.pmean(jnp.square(h).mean(), TOKENS)
    return x + h @ params["down"] * given, 0.1 * loss, {"loss": loss, "calls": jnp.int32(1)}


KIND = LayerKind(apply, {"up": P("fsdp"), "down": P()})
MODEL = PipelineModel(
    kinds=(KIND,),
    order=(0,) * 9,
    embed=lambda ends, inputs: ends["table"][inputs["tokens"]],
    head=lambda ends, x, inputs: jnp.square(x @ ends["table"].T).sum() / 100,
    end_specs={"table": P(None, "fsdp")},
    tokens=TOKENS,
    gathered=TOKENS,
)


def parts(num_layers, num_microbatches):
    keys = jax.random.split(jax.random.key(0), 4)
    layers = {name: jax.random.normal(key, (num_layers, 4, 4)) * 0.4 for name, key in zip(("up", "down"), keys, strict=False)}
    table = jax.random.normal(keys[2], (8, 4))
    tokens = jax.random.randint(keys[3], (num_microbatches, 4, 3), 0, 8)
    return layers, {"table": table}, jnp.linspace(0.5, 1, num_layers), {"tokens": tokens}


def staged(model, schedule, **options):
    """Runs the model over a mesh (stage, fsdp 2); the result with layers back in the model's order."""
    layers, ends, scale, inputs = parts(len(model.order), schedule.num_microbatches)
    where = StageLayers.even(schedule.placement, model.order)
    there = lambda tree: jax.tree.map(lambda leaf: where.to_stages(0, leaf), tree)
    back = lambda tree: jax.tree.map(lambda leaf: where.to_model(0, leaf), tree)

    @jax.jit
    def run(layers, ends, scale, inputs):
        result = run_pipeline(schedule, model, PipelineParams((there(layers),), ends, (there(scale),)), inputs, **options)
        return dataclasses.replace(result, layers=back(result.layers), stats=back(result.stats))

    with jax.set_mesh(moejax.make_mesh(stage=schedule.num_stages, fsdp=2)):
        result = jax.block_until_ready(run(layers, ends, scale, inputs))
        jax.effects_barrier()
        return result


def test_what_runs_is_the_table_and_gathers_as_often():
    """ZeroPP, 4 stages: 9 layers, so that one part has two; (2V - 2) M/U + 1 gathers a stage, a reduce a (unit, chunk)."""
    schedule, seen = make_schedule("zeropp", Shape(4, 8, chunks=2, unit=4)), set()
    result = staged(MODEL, schedule, observer=lambda *what: seen.add(what))
    for stage in range(4):
        found = sorted((tick, kind, chunk, index) for s, tick, kind, chunk, index in seen if s == stage)
        assert [(k, c, i) for _, k, c, i in found if k in "FBW"] == [tuple(op) for op in order_of(schedule)[stage]]
        assert sum(kind == "gather" for _, kind, _, _ in found) == (2 * 2 - 2) * 8 // 4 + 1
        assert {(c, i) for _, k, c, i in found if k == "reduce"} == {(c, unit) for c in range(2) for unit in range(2)}
    check(result, 9, 8)


def check(result, num_layers, num_microbatches):
    layers, ends, scale, inputs = parts(num_layers, num_microbatches)

    def loss(layers, ends):
        x = MODEL.embed(ends, inputs)
        aux = []
        for n in range(num_layers):
            h = jnp.tanh(x @ layers["up"][n])
            aux.append(jnp.square(h).mean())
            x = x + h @ layers["down"][n] * scale[n]
        head = MODEL.head(ends, x, inputs)
        return head + 0.1 * jnp.stack(aux).sum(), (head, jnp.stack(aux))

    (_, (head, aux)), (layers, ends) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(layers, ends)
    assert (result.stats[0]["calls"] == num_microbatches).all()
    got = result.loss, result.stats[0]["loss"], result.layers[0], result.ends
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves((head, aux, layers, ends)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_forwards_alone_give_the_same_loss_and_stats():
    schedule = make_schedule("zb_v", Shape(2, 3))
    model = dataclasses.replace(MODEL, order=(0,) * 4)
    whole, forward = staged(model, schedule), staged(model, schedule, backward=False)
    assert (forward.layers, forward.ends) == (None, None)
    np.testing.assert_allclose(forward.loss, whole.loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(forward.stats), jax.tree.leaves(whole.stats), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_mesh_without_these_stages_is_refused():
    schedule = make_schedule("gpipe", Shape(4, 2))
    params = PipelineParams(((),), {}, (None,))
    with jax.set_mesh(moejax.make_mesh(stage=2)), pytest.raises(ValueError, match="needs an axis 'stage' of 4 devices"):
        run_pipeline(schedule, MODEL, params, {})
    with (
        jax.set_mesh(moejax.make_mesh(stage=4)),
        pytest.raises(ValueError, match="inputs of 3 micro-batches: the schedule has 2"),
    ):
        run_pipeline(schedule, MODEL, params, {"tokens": jnp.zeros((3, 4, 3), jnp.int32)})


def test_a_weights_gradient_that_reads_its_weight_needs_it_gathered():
    """Where the table lets go of parameters before W; the message says what would be legal."""
    squared = lambda params, given, x, inputs: (x + x @ jnp.square(params["up"]) @ params["down"], None, None)
    model = dataclasses.replace(MODEL, kinds=(LayerKind(squared, KIND.specs),), order=(0, 0))
    with pytest.raises(ValueError, match="needs a table without gathers"):
        staged(model, make_schedule("gpipe", Shape(2, 2)))
