"""`python -m layouts search` and `explain`: what they print and write, and wrong input."""

import json
import math
import subprocess
import sys

import pytest

from layouts.__main__ import main
from layouts.layout import load_layout
from layouts.presets import load_model

DEMO = ["--model", "demo", "--seq", "256", "--global-batch", "4096", "--cluster", "cpu:4"]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The file that one search wrote."""
    path = tmp_path_factory.mktemp("search") / "answer.json"
    assert main(["search", *DEMO, "--top", "3", "--json", str(path), "--codecs", "plain,fp8+bf16"]) == 0
    return path


def test_json(answer, capsys):
    entry = json.loads(answer.read_text())
    model = load_model("demo")
    assert entry["schema"] == 1
    assert entry["workload"]["flops_per_token"] == model.flops_per_token(256)
    assert (entry["workload"]["params_total"], entry["workload"]["params_active"]) == (model.params_total, model.params_active)
    assert [one["rank"] for one in entry["layouts"]] == [1, 2, 3]
    assert entry["considered"]["layouts"] > 1000
    for one in entry["layouts"]:
        assert sum(one["time"].values()) == one["step_seconds"]
        assert sum(one["memory"].values()) == one["peak_bytes"]
        assert one["runnable"] == (not one["not_runnable"])
    seconds = [one["step_seconds"] for one in entry["layouts"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_explain_adds_up_exactly(answer, rank, tmp_path, capsys):
    """To what the search said, term by term, from the file alone."""
    path = tmp_path / "explained.json"
    assert main(["explain", f"{answer}#{rank}", "--json", str(path)]) == 0
    explained, said = json.loads(path.read_text()), json.loads(answer.read_text())["layouts"][rank - 1]
    for key in ("time", "memory", "step_seconds", "peak_bytes"):
        assert explained[key] == said[key]
    assert sum(explained["time"].values()) == explained["step_seconds"]
    assert sum(explained["memory"].values()) == explained["peak_bytes"]
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines[lines.index("seconds of a step") + 1 :]]
    total = next(i for i, words in enumerate(shown) if words[0] == "total")
    assert math.isclose(sum(float(words[1]) for words in shown[:total]), float(shown[total][1]), abs_tol=1e-8)


def test_explain_a_bare_layout(answer, tmp_path, capsys):
    """Model and cluster come from the options; the layout alone does not say them."""
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(load_layout(str(answer))[0].to_json()))
    assert main(["explain", str(path), *DEMO]) == 0
    assert "bytes of a device of stage 0" in capsys.readouterr().out
    assert main(["explain", str(path)]) == 2
    assert "needs --model: the file does not say" in capsys.readouterr().err


def test_nothing_fits(tmp_path, capsys):
    path = tmp_path / "none.json"
    assert main(["search", *DEMO, "--memory", "0.001", "--json", str(path)]) == 3
    entry, said = json.loads(path.read_text()), capsys.readouterr().err
    assert entry["layouts"] == []
    assert entry["workload"]["params_total"] == load_model("demo").params_total
    assert "memory binds" in said
    assert "the smallest change is 0.0" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "--model", "mixtral", "--cluster", "cpu:4"], "model 'mixtral' is not known; did you mean mixtral-8x7b"),
        (["search", "--model", "demo", "--cluster", "v5q:2x2x2"], "did you mean"),
        (["search", "--model", "demo"], "the following arguments are required: --cluster"),
        (["search", *DEMO, "--global-batch", "1000"], "--global-batch 1000: needs a multiple of the sequence's 256 tokens"),
        (["search", *DEMO, "--memory", "-1"], "--memory -1: needs GB above 0"),
        (["search", *DEMO, "--top", "0"], "--top 0: needs a whole number of at least 1"),
        (["search", *DEMO, "--verify", "-1"], "--verify -1: needs a whole number of at least 0"),
        (["search", *DEMO, "--codecs", "plain,fp9"], "codec 'fp9' is not known; did you mean fp8"),
        (["search", *DEMO, "--codecs", "fp8+bf16+fp8"], "needs a name, or a pair forward+backward"),
        (["search", *DEMO, "--imbalance", "0.5"], "imbalance=0.5: needs a number of at least 1"),
        (["search", *DEMO, "--loads", "/nowhere/loads.json"], "file '/nowhere/loads.json'"),
        (["search", *DEMO, "--efficiency", "/nowhere/e.json"], "file '/nowhere/e.json'"),
        (["search", *DEMO, "--json", "/nowhere/a.json"], "the folder /nowhere is not there"),
        (["search", *DEMO, "--objective", "speed"], "invalid choice: 'speed'"),
        (["explain", "/nowhere/layout.json"], "layout file '/nowhere/layout.json'"),
    ],
)
def test_wrong_input(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 0}, "layout of schema 0: this version reads schema 1; search again"),
        ({"mesh": {"daat": 2}}, "layout mesh axis 'daat' is not known; did you mean data"),
        ({"remat": "al"}, "layout remat 'al' is not known"),
        ({"mesh": {"data": 3}}, "needs a multiple of 3"),
        ({"problem": []}, "problem=[]: needs a table"),
        ({"problem": {"model": "demo", "colour": 1}}, "unknown keys ['colour']"),
    ],
)
def test_edited_layouts(change, message, tmp_path, capsys):
    path = tmp_path / "layout.json"
    path.write_text(json.dumps({"schema": 1, "mesh": {"data": 2}} | {k: v for k, v in change.items() if k != "problem"}))
    if "problem" in change:
        path.write_text(json.dumps({"schema": 1, "layouts": [{"layout": {"schema": 1, "mesh": {}}}]} | change))
    assert main(["explain", str(path), *([] if "problem" in change else DEMO)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"), [("[1, 2]", "loads of 2 experts"), ("3", "needs a list"), ("[[1], [1, 2]]", "one length")]
)
def test_wrong_loads(content, message, tmp_path, capsys):
    path = tmp_path / "loads.json"
    path.write_text(content)
    assert main(["search", *DEMO, "--loads", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_that_has_had_enough():
    """`layouts models | head -1` ends without a traceback."""
    command = f"{sys.executable} -u -m layouts models | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("model")
    assert done.stderr == ""
