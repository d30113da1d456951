"""layouts.workload, layouts.work and layouts.messages: a step's FLOPs, bytes and messages."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from layouts.layout import Layout
from layouts.messages import Message, messages
from layouts.model import norm_params, products
from layouts.presets import load_model, preset_names
from layouts.work import head_ops, layer_ops, share_of
from layouts.workload import MEGATRON, MOEJAX, Batch, check_fit

BATCH = Batch(4096, 64)


def step_flops(name: str, layout: Layout) -> float:
    """FLOPs of a step over all devices: three times the forward's, no recompute, and once what a tensor group repeats."""
    model = load_model(name)
    forward = 0.0
    for layer in model.layers:
        repeated = {product.name: layout.tensor for product in products(layer, model.d_model) if not product.split}
        ops = layer_ops(layer, model.d_model, share_of(layer, layout, BATCH, MEGATRON), 2)
        forward += sum(op.flops / repeated.get(op.name, 1) for op in ops if op.name != "router")
    share = share_of(model.layers[-1], layout, BATCH, MEGATRON)
    forward += sum(op.flops for op in head_ops(model, share, 2))
    # Every stage runs its own layers, so a device of all stages together runs all of them.
    return 3 * forward * layout.num_microbatches * layout.num_devices / layout.stage


@pytest.mark.parametrize("name", preset_names())
def test_ops_are_the_models_flops(name):
    """All devices' ops add up to FLOPs a token x tokens, however the work is cut."""
    expected = load_model(name).flops_per_token(BATCH.seq) * BATCH.tokens
    for layout in (
        Layout(),
        Layout(data=2, expert=4, num_microbatches=4),
        Layout(expert=2, tensor=2, expert_axes=("expert", "tensor")),
        Layout(data=2, tensor=2, stage=2, schedule="1f1b", num_microbatches=8),
        Layout(fsdp=4, context=2),
    ):
        assert step_flops(name, layout) == pytest.approx(expected, rel=1e-9), layout


@hypothesis.given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_products_are_cut_where_they_say(tensor, expert, fold):
    layout = Layout(tensor=tensor, expert=expert, expert_axes=("expert", "tensor") if fold and tensor > 1 else ("expert",))
    model = load_model("mixtral-8x7b")
    shards = layout.expert_shards
    hypothesis.assume(shards <= 8)
    check_fit(model, layout, BATCH)
    share = share_of(model.layers[0], layout, BATCH, MEGATRON)
    ops = {op.name: op for op in layer_ops(model.layers[0], model.d_model, share, 2)}
    tokens = BATCH.tokens / expert
    assert ops["query"].sizes == (tokens, 4096, 4096 / tensor)
    assert ops["out"].sizes == (tokens, 4096 / tensor, 4096)
    assert ops["expert_up"].copies == 8 / shards
    rows = tokens * 2 / (tensor if layout.expert_tensor == 1 else 1)
    assert ops["expert_up"].sizes == pytest.approx((rows / (8 / shards), 4096, 14336 / layout.expert_tensor))


def of(layout: Layout, name: str = "mixtral-8x7b", recipe=MEGATRON) -> list[Message]:
    """The messages of the first layer, and of no layer."""
    return [message for message in messages(load_model(name), layout, BATCH, recipe) if message.layer in (0, None)]


def kinds(found: list[Message]) -> set[tuple[str, str, str]]:
    """(axis, kind, phase) of what crosses."""
    return {("+".join(message.axes), message.kind, message.phase) for message in found}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), set()),
        (Layout(data=4), {("data", "all_reduce", "step")}),
        (
            Layout(data=4, moments="over_data"),
            {("data", "reduce_scatter", "step"), ("data", "all_gather", "step")},
        ),
        (Layout(tensor=4), {("tensor", "all_reduce", "forward"), ("tensor", "all_reduce", "backward")}),
        (
            Layout(expert=4),
            {("expert", "all_to_all", "forward"), ("expert", "all_to_all", "backward"), ("expert", "all_reduce", "step")},
        ),
        (
            Layout(fsdp=4),
            {
                ("fsdp", "all_gather", "forward"),
                ("fsdp", "all_gather", "backward"),
                ("fsdp", "reduce_scatter", "backward"),
            },
        ),
        (
            Layout(context=4),
            {("context", "permute", "forward"), ("context", "permute", "backward"), ("context", "all_reduce", "step")},
        ),
        (
            Layout(stage=2, schedule="1f1b"),
            {("stage", "permute", "forward"), ("stage", "permute", "backward")},
        ),
    ],
)
def test_kinds(layout, expected):
    assert kinds(of(layout)) == expected


def test_bytes_of_rows():
    """2 experts a token: twice the tokens of the device, 4,096 wide, in bf16; in fp8 half; in chunks as many in all."""
    rows = BATCH.tokens / 4 * 2 * 4096 * 2
    (plain,) = [m for m in of(Layout(expert=4)) if (m.name, m.phase) == ("dispatch", "forward")]
    assert (plain.bytes, plain.count, plain.group, plain.wire_bytes) == (rows, 1, 4, rows * 3 / 4)
    (fp8,) = [m for m in of(Layout(expert=4, codec=("fp8", "plain"))) if (m.name, m.phase) == ("dispatch", "forward")]
    assert fp8.bytes == rows / 2
    (chunk,) = [m for m in of(Layout(expert=4, num_chunks=8)) if (m.name, m.phase) == ("combine", "backward")]
    assert (chunk.bytes * chunk.count, chunk.count) == (rows, 8)


def test_bytes_of_parameters():
    """Of one layer's experts, 8 x 3 matrices of 4,096 x 14,336."""
    experts = 8 * 3 * 4096 * 14336
    found = {(m.name, m.phase): m for m in of(Layout(fsdp=4, num_microbatches=2))}
    gather = found["gather experts", "forward"]
    assert (gather.bytes, gather.count, gather.wire_bytes) == (experts / 4 * 2, 2, 2 * 3 * experts / 4 * 2)
    assert found["divide gradients of experts", "backward"].bytes == experts * 2
    kept = {(m.name, m.phase): m for m in of(Layout(fsdp=4, num_microbatches=2, policy=(("experts", "keep"),)))}
    assert kept["gather experts", "forward"].count == 1
    assert ("gather experts", "backward") not in kept


@pytest.mark.parametrize(("recipe", "times"), [(MEGATRON, 1), (MOEJAX, 4)])
def test_how_often_gradients_are_summed(recipe, times):
    """moejax's step sums them after each micro-batch, its pipelines at their end; Megatron once, whatever the layout."""
    apart = Layout(data=2, expert=4, num_microbatches=4)
    staged = Layout(data=2, stage=4, schedule="1f1b", num_microbatches=4)
    for layout, count in ((apart, times), (staged, 1)):
        assert {m.count for m in of(layout, recipe=recipe) if m.phase == "step"} == {count}
    new = Layout(data=8, num_microbatches=4, moments="over_data")
    found = {(m.kind, m.count) for m in of(new, recipe=recipe) if m.phase == "step"}
    assert found == {("reduce_scatter", times), ("all_gather", 1)}


@pytest.mark.parametrize(("recipe", "nbytes"), [(MEGATRON, 2), (MOEJAX, 4)])
def test_what_fsdp_divides_gradients_in(recipe, nbytes):
    """Parameters come in bf16; gradients go as the recipe says: moejax's are sums in float32."""
    found = {m.name: m.bytes for m in of(Layout(fsdp=8), recipe=recipe)}
    for group in ("attention", "experts", "embedding", "head"):
        numbers = found[f"gather {group}"] * 8 / 2
        assert found[f"divide gradients of {group}"] == numbers * nbytes, group


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "llama-3.1-8b"])
@pytest.mark.parametrize("fields", [{"data": 8}, {"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "fsdp": 2, "expert": 2}])
def test_every_gradient_is_summed_once(name, fields):
    """What is summed over replicas is all of the model's parameters that have some: each shard once a step."""
    model, layout = load_model(name), Layout(**fields)
    summed = 0.0
    for message in messages(model, layout, BATCH, MEGATRON):
        if message.phase == "step":
            shards = layout.fsdp * (layout.expert_shards if message.name == "gradients of experts" else 1)
            summed += message.bytes * shards / MEGATRON.grad_bytes
    experts = whole = 0.0
    for layer in model.layers:
        counts = {product.group: 0.0 for product in products(layer, model.d_model)}
        for product in products(layer, model.d_model):
            counts[product.group] += product.weights + product.biases
        experts += counts.get("experts", 0.0)
        whole += counts.get("router", 0.0) + norm_params(model, layer)
    # Norms and routers are not divided by fsdp: each of its devices sums them whole.
    expected = model.params_total + (layout.fsdp - 1) * (whole + model.final_norm_params)
    assert summed == pytest.approx(expected - (experts if layout.expert_replicas == 1 else 0), rel=1e-12)


def test_recipes_set_the_width():
    plain = dataclasses.replace(MOEJAX, capacity="exact")
    wide = dataclasses.replace(plain, compute_bytes=4)
    narrow, broad = (sum(m.wire_bytes for m in of(Layout(expert=4), recipe=recipe)) for recipe in (plain, wide))
    assert broad > 1.5 * narrow
