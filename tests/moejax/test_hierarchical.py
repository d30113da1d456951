"""`hierarchical` over one expert axis and a tensor axis: each tensor shard sends its share of the rows, and all gather them."""

import dataclasses
import functools

import jax
import pytest

from layouts import hlo
from moejax import AxisRules, make_mesh
from tests.moejax import grid

MESHES = {
    "expert4_tensor2": {"expert": 4, "tensor": 2},
    "expert2_tensor4": {"expert": 2, "tensor": 4},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
}
APART = {"weigh_at": "expert", "exchange_by": "expert"}
CASES = [
    ("shared", "expert4_tensor2", APART),
    ("many_senders", "expert4_tensor2", {"num_senders": 4}),  # cells of one row: no share for the second shard
    ("odd", "expert2_tensor4", {"num_senders": 2, "weigh_at": "expert", "num_chunks": 2}),
]
SLOW = [
    ("odd", "expert4_tensor2", APART),
    ("shared", "expert4_tensor2", {"num_chunks": 2, "overlap": True}),
    ("shared", "expert2_tensor4", APART),
    ("many_senders", "expert2_tensor4", {"weigh_at": "expert", "num_chunks": 4}),
    ("every_expert", "expert4_tensor2", {"num_senders": 4, "weigh_at": "expert", "num_chunks": 2}),
    ("every_expert", "fsdp2_expert2_tensor2", {"overlap": True, "num_chunks": 2}),
]


def _layer(name, **changes):
    layer = grid.LAYERS[name]
    return dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **changes))


def _place(mesh):
    return grid.Place(make_mesh(**MESHES[mesh]))


@pytest.mark.parametrize(("name", "mesh", "changes"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW)])
def test_shares_give_the_reference_answer(name, mesh, changes):
    """Outputs, drops and all gradients; under every skew, with rubbish in the padding."""
    layer = _layer(name, exchange="hierarchical", **changes)
    for seed, skew in enumerate(grid.SKEWS):
        inputs = grid.draw(layer, seed, skew, grid.PADDINGS[seed % len(grid.PADDINGS)])
        got, want = grid.run(layer, _place(mesh), inputs.garbage()), grid.reference(layer, inputs)
        grid.assert_replicas_equal(got)
        stats = dataclasses.replace(got["stats"], token_straggler=want["stats"].token_straggler)
        grid.assert_close({**got, "stats": stats}, want)


@pytest.mark.parametrize(("codec", "tolerance"), [("bf16", 2**-6), pytest.param("int8", 2**-5, marks=pytest.mark.slow)])
def test_codecs_carry_whole_sums(codec, tolerance):
    """What is encoded is a row, or the sum over the tensor shards of its output: never a part to be added after decoding."""
    layer = _layer("shared", exchange="hierarchical", codec=codec)
    inputs = grid.draw(layer, 0, "random", "random")
    got, want = grid.run(layer, _place("expert4_tensor2"), inputs), grid.reference(_layer("shared"), inputs)
    grid.assert_close({"y": got["y"]}, {"y": want["y"]}, tolerance)


@functools.cache
def _collectives(mesh, **changes):
    layer, where = _layer("shared", **changes), _place(mesh)
    args = where.put(layer.cfg, grid.draw(layer, 0, "random", "none"))
    with jax.set_mesh(where.mesh):
        text = jax.jit(functools.partial(grid.step, layer.cfg, where.rules)).lower(*args).compile().as_text()
    return hlo.read(text).collectives


@pytest.mark.parametrize(("mesh", "expert", "tensor"), [("expert4_tensor2", 4, 2), ("expert2_tensor4", 2, 4)])
def test_each_tensor_shard_sends_its_share(mesh, expert, tensor):
    """Of the bytes that a flat all-to-all sends over the expert axis, forward and backward, 1/tensor. The rest, and the sums
    of partial outputs, cross the tensor axis: the sums by an all-to-all, so that no compiler makes an all-reduce of them.
    """
    flat, shared = ({(c.kind, c.group_size): c for c in _collectives(mesh, exchange=e)} for e in ("all_to_all", "hierarchical"))
    over_expert, over_tensor = ("all-to-all", expert), ("all-to-all", tensor)
    assert shared[over_expert].count == flat[over_expert].count == 4
    assert shared[over_expert].wire_bytes * tensor == flat[over_expert].wire_bytes
    assert shared.keys() - flat.keys() == {over_tensor, ("all-gather", tensor)}
    assert shared[over_tensor].count == shared["all-gather", tensor].count == 2


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ({"expert": 8}, AxisRules()),
        ({"expert": 4, "tensor": 2}, AxisRules(mlp=None, replicated="tensor")),
        ({"data": 2, "fsdp": 2, "expert": 2}, AxisRules(expert=("data", "fsdp", "expert"), embed=None)),
    ],
)
def test_axes_that_the_mesh_lacks_are_named(mesh, rules):
    layer = _layer("shared", exchange="hierarchical")
    where = grid.Place(make_mesh(**mesh), rules)
    expert = rules.resolve(where.mesh).expert
    with pytest.raises(ValueError, match=r"^exchange='hierarchical': needs two expert axes") as raised:
        grid.run(layer, where, grid.draw(layer, 0, "random", "none"))
    assert str(raised.value).endswith(f"on this mesh the rules give expert {expert!r}, mlp ()")
