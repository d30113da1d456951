"""layouts.layout: what it refuses, its JSON, its mesh."""

import dataclasses
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import pytest

from layouts.errors import InputError
from layouts.layout import GROUPS, POLICIES, REMATS, Layout, load_layout
from moejax.axes import MESH_AXES

LAYOUTS = st.builds(
    Layout,
    data=st.integers(1, 4),
    fsdp=st.integers(1, 4),
    expert=st.integers(1, 4),
    tensor=st.integers(1, 4),
    expert_axes=st.sampled_from([("expert",), ("data", "expert"), ("expert", "tensor")]),
    num_microbatches=st.integers(1, 8),
    codec=st.sampled_from(["plain", "fp8", ("fp8", "bf16")]),
    remat=st.sampled_from([*REMATS, "norm+activation"]),
    sequence=st.booleans(),
    policy=st.dictionaries(st.sampled_from(GROUPS), st.sampled_from(POLICIES)).map(lambda found: tuple(found.items())),
    excluded=st.sets(st.integers(0, 9)).map(tuple),
)
PIPELINES = st.builds(
    Layout,
    stage=st.just(4),
    schedule=st.just("zeropp"),
    stage_chunks=st.integers(1, 3),
    unit=st.none() | st.integers(1, 8),
)


@hypothesis.given(LAYOUTS | PIPELINES)
def test_json_and_back(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@hypothesis.given(LAYOUTS)
def test_every_device_holds_one_part_of_the_experts(layout):
    """Shards x parts of the width x fsdp x replicas are all devices of a stage."""
    parts = layout.expert_shards * layout.expert_tensor * layout.expert_replicas * layout.fsdp
    assert parts == layout.num_devices // layout.stage
    assert layout.dense_replicas * layout.fsdp * layout.tensor == layout.num_devices // layout.stage


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 0}, "layout data=0: needs a whole number of at least 1"),
        ({"data": True}, "layout data=True"),
        ({"num_microbatches": 1.5}, "layout num_microbatches=1.5"),
        ({"expert_axes": ()}, "layout expert_axes=(): needs one or more of data, expert, tensor, context"),
        ({"expert_axes": ("expert", "expert")}, "each once"),
        ({"expert_axes": ("fsdp",)}, "layout expert_axes 'fsdp' is not known"),
        ({"stage": 2}, "schedule='none' with stage=2"),
        ({"schedule": "1f1b"}, "schedule='1f1b' with stage=1"),
        ({"stage": 2, "schedule": "1f2b"}, "layout schedule '1f2b' is not known; did you mean 1f1b"),
        ({"stage": 2, "schedule": "1f1b", "stage_chunks": 2}, "stage_chunks=2: legal for 1f1b are 1"),
        ({"stage": 2, "schedule": "1f1b", "unit": 2}, "unit=2: schedule '1f1b' has none"),
        ({"stage_chunks": 2}, "without a pipeline 1 and null are legal"),
        ({"stage": 2, "schedule": "1f1b", "cuts": (1,)}, "cuts=(1,): needs 2 numbers"),
        ({"exchange": "all_to_al"}, "did you mean all_to_all"),
        ({"codec": "fp7"}, "layout codec 'fp7' is not known; did you mean fp8"),
        ({"codec": ("fp8",)}, "needs a name or a pair"),
        ({"remat": "nothing"}, "layout remat 'nothing' is not known"),
        ({"remat": "norm+nothing"}, "layout remat 'norm+nothing' is not known"),
        ({"moments": "sharded"}, "layout moments 'sharded' is not known"),
        ({"policy": (("expert", "keep"),)}, "layout policy of 'expert' is not known; did you mean experts"),
        ({"policy": (("experts", "hold"),)}, "layout policy of experts 'hold'"),
        ({"sequence": 1}, "sequence=1: needs true or false"),
        ({"excluded": (-1,)}, "excluded=(-1,)"),
        ({"excluded": (1, 1)}, "names a device twice"),
        ({"num_microbatches": 3, "microbatch_overlap": 2}, "microbatch_overlap=2: does not divide num_microbatches=3"),
    ],
)
def test_impossible_layouts(fields, message):
    with pytest.raises(InputError) as error:
        Layout(**fields)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([], "needs a table"),
        ({"mesh": {}}, "layout of schema None: this version reads schema 1; search again"),
        ({"schema": 0, "mesh": {}}, "layout of schema 0"),
        ({"schema": True, "mesh": {}}, "layout of schema True"),
        ({"schema": 1}, "layout mesh=None: needs a table"),
        ({"schema": 1, "mesh": {"dat": 2}}, "layout mesh axis 'dat' is not known; did you mean data"),
        ({"schema": 1, "mesh": {"data": "2"}}, "layout data='2'"),
        ({"schema": 1, "mesh": {}, "scedule": "1f1b"}, "layout key 'scedule' is not known; did you mean schedule"),
        ({"schema": 1, "mesh": {}, "policy": [["experts", "keep"]]}, "layout policy=[['experts', 'keep']]"),
        ({"schema": 1, "mesh": {}, "remat": 5}, "layout remat '5' is not known"),
    ],
)
def test_files_edited_into_nonsense(tmp_path, entry, message):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(InputError) as error:
        load_layout(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_ranks(tmp_path):
    path = tmp_path / "found.json"
    ranked = [Layout(data=2), Layout(expert=2)]
    path.write_text(json.dumps({"schema": 1, "model": "demo", "layouts": [{"layout": layout.to_json()} for layout in ranked]}))
    assert load_layout(str(path)) == (ranked[0], json.loads(path.read_text()))
    assert load_layout(f"{path}#2")[0] == ranked[1]
    for rank in ("0", "3", "x"):
        with pytest.raises(InputError, match="has 2 layouts; legal ranks are 1 to 2"):
            load_layout(f"{path}#{rank}")
    path.write_text(json.dumps(ranked[0].to_json()))
    with pytest.raises(InputError, match="holds one layout"):
        load_layout(f"{path}#2")
    path.write_text('{"schema": 1, "layouts": []}')
    with pytest.raises(InputError, match="has 0 layouts"):
        load_layout(str(path))
    path.write_text("{")
    with pytest.raises(InputError, match="layout file"):
        load_layout(str(path))


def test_the_mesh_leaves_excluded_devices_out():
    layout = Layout(data=2, expert=2, excluded=(0, 5))
    mesh = layout.to_mesh()
    assert dict(mesh.shape) == {"data": 2, "expert": 2}
    assert [device.id for device in mesh.devices.flat] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="layout of 8 devices: there are 8, 1 of them excluded"):
        Layout(data=8, excluded=(3,)).to_mesh()
    assert dict(Layout().to_mesh(jax.devices()[3:]).shape) == {"data": 1}


def test_the_mesh_has_the_librarys_axes():
    assert tuple(Layout().sizes) == MESH_AXES


def test_rules():
    rules = Layout(data=2, expert=4, expert_axes=("data", "expert")).rules()
    mesh = Layout(data=2, expert=4).to_mesh()
    assert rules.resolve(mesh).expert == ("data", "expert")


@pytest.mark.parametrize(("layers", "parts"), [(61, 16), (4, 4), (10, 4)])
def test_even_parts(layers, parts):
    made = Layout(stage=parts, schedule="1f1b").part_layers(layers)
    assert [index for part in made for index in part] == list(range(layers))
    assert {len(part) for part in made} <= {layers // parts, math.ceil(layers / parts)}


def test_uneven_parts():
    layout = Layout(stage=2, schedule="1f1b", cuts=(1, 3))
    assert layout.part_layers(4) == (range(1), range(1, 4))
    with pytest.raises(InputError, match="add up to 4, the model has 5 layers"):
        layout.part_layers(5)
    with pytest.raises(InputError, match="the model has 1 layers"):
        dataclasses.replace(layout, cuts=None).part_layers(1)


@pytest.mark.parametrize(
    ("layout", "reasons"),
    [
        (Layout(data=2, expert=4, remat="full"), ()),
        (Layout(stage=2, schedule="gpipe", num_microbatches=4), ()),
        (
            Layout(stage=2, schedule="gpipe", num_microbatches=4, microbatch_overlap=2, remat="offload"),
            ("micro-batches that walk together in a pipeline", "remat 'offload' in a pipeline"),
        ),
        (Layout(context=2), ("a context axis",)),
        (Layout(tensor=2, expert_axes=("expert", "tensor")), ("experts folded over tensor or context",)),
        (Layout(remat="selective", sequence=True), ("sequence parallelism", "remat 'selective'")),
        (Layout(data=2, moments="over_data"), ("moments over data",)),
        (Layout(fsdp=2, policy=(("experts", "keep"),)), ("policies other than gather",)),
    ],
)
def test_what_the_executor_lacks(layout, reasons):
    assert layout.not_runnable() == reasons
