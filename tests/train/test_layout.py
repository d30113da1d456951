"""`layout=FILE.json`, `layout=search` and exchange "auto": what becomes of the config."""

import dataclasses
import json

import pytest

from layouts.layout import Layout
from train.__main__ import main
from train.config import PipelineConfig
from train.configs import get_config
from train.errors import InputError
from train.layout import laid_out, problem_of, resolved
from train.stages import make_pipeline

DEMO = get_config("demo")


def written(folder, **layout) -> str:
    """A layout file's path."""
    path = folder / "layout.json"
    path.write_text(json.dumps({"schema": 1, **layout}))
    return str(path)


def test_a_layouts_file(tmp_path):
    path = written(
        tmp_path, mesh={"data": 2, "expert": 2, "tensor": 2}, remat="full", num_microbatches=2, exchange="all_gather"
    )
    cfg = laid_out(DEMO, path, print)
    assert cfg.mesh == dataclasses.replace(DEMO.mesh, data=2, expert=2, tensor=2)
    assert (cfg.model.remat, cfg.model.moe.exchange, cfg.num_microbatches) == ("full", "all_gather", 2)
    assert dataclasses.replace(cfg, mesh=DEMO.mesh, num_microbatches=1, model=DEMO.model) == DEMO


def test_a_layout_of_stages(tmp_path):
    pipe = {"schedule": "zeropp", "stage_chunks": 2, "unit": 4, "num_microbatches": 8}
    deeper = dataclasses.replace(DEMO, model=dataclasses.replace(DEMO.model, num_layers=4))
    cfg = laid_out(deeper, written(tmp_path, mesh={"stage": 2, "expert": 2}, **pipe), print)
    assert (cfg.mesh.stage, cfg.mesh.expert, cfg.num_microbatches) == (2, 2, 8)
    assert cfg.pipeline == PipelineConfig("zeropp", 2, 4, cuts=(1, 1, 1, 1))
    schedule = make_pipeline(cfg).schedule
    assert (schedule.num_stages, schedule.num_microbatches) == (2, 8)


@pytest.mark.parametrize(("changes", "can"), [({}, True), ({"loss_scope": "batch"}, False), ({"jitter": 0.1}, False)])
def test_a_search_proposes_stages_where_the_model_can_have_them(changes, can):
    model = dataclasses.replace(DEMO.model, moe=dataclasses.replace(DEMO.model.moe, **changes))
    space = problem_of(dataclasses.replace(DEMO, model=model)).space
    assert ("stage" in space.axes, bool(space.pipelines)) == (can, can)


def test_the_search_for_the_devices_at_hand():
    said = []
    cfg = laid_out(DEMO, "search", said.append)
    assert cfg.mesh.num_devices == 8
    assert said[0].startswith("layout #1: ")
    assert problem_of(DEMO).model.params_total == 1_707_776


def test_auto_asks_the_cost_model():
    said = []
    auto = dataclasses.replace(DEMO.model, moe=dataclasses.replace(DEMO.model.moe, exchange="auto"))
    found = resolved(dataclasses.replace(DEMO, model=auto), said.append)
    assert found.model.moe.exchange in ("all_to_all", "all_gather", "weight_stream")
    assert said[0].startswith(f"exchange auto: {found.model.moe.exchange} (predicted all_to_all ")
    assert resolved(DEMO, said.append) is DEMO


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"mesh": {"stage": 8}, "schedule": "1f1b", "num_microbatches": 8}, "the model has 2 layers"),
        ({"mesh": {"stage": 2}, "schedule": "gpipe", "remat": "offload"}, "remat 'offload' in a pipeline"),
        ({"mesh": {"context": 2}}, "the trainer does not run a context axis"),
        ({"mesh": {"data": 3}}, "global_batch / num_microbatches=16 is not divisible by mesh axis data"),
        ({"mesh": {"data": 2}, "excluded": [1]}, "the trainer does not run excluded devices"),
        ({"mesh": {"expert": 8}, "exchange": "weight_stream", "codec": "fp8"}, "sends no rows; legal is 'plain'"),
        ({"mesh": {"expert": 8}, "exchange": "hierarchical"}, "a hierarchical exchange over one expert axis"),
    ],
)
def test_layouts_that_the_trainer_cannot_run(layout, message, tmp_path):
    with pytest.raises(InputError, match=message):
        laid_out(DEMO, written(tmp_path, **layout), print)


def test_wrong_words(tmp_path, capsys):
    assert main(["demo", "layout=/nowhere.json"]) == 2
    assert "layout=/nowhere.json: layout file '/nowhere.json'" in capsys.readouterr().err
    assert main(["demo", "layout=search", "layout=/nowhere.json"]) == 2
    assert "given twice" in capsys.readouterr().err


def test_what_the_search_command_writes_is_read(tmp_path):
    entry = {
        "schema": 1,
        "layouts": [{"rank": 1, "layout": Layout(expert=8).to_json()}, {"rank": 2, "layout": Layout(data=8).to_json()}],
    }
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(entry))
    assert laid_out(DEMO, f"{path}#2", print).mesh.data == 8
