"""Tables go to files and come back the same; a wrong file is told where it is wrong; traces hold what the simulator says."""

import json

import pytest

from layouts.errors import InputError
from layouts.schedule_files import load_schedule, save_schedule
from layouts.schedules import MAKERS, Shape, make_schedule
from layouts.simulate import Costs, simulate
from layouts.trace import trace_json


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize("name", MAKERS)
def test_there_and_back(tmp_path, name, suffix):
    schedule = make_schedule(name, Shape(2, 6, unit=4 if name == "zeropp" else None))
    path = tmp_path / f"{name}{suffix}"
    save_schedule(schedule, path, simulate(schedule))
    assert load_schedule(path) == schedule


def test_json_has_the_figures_and_times(tmp_path):
    schedule = make_schedule("1f1b", Shape(4, 8))
    save_schedule(schedule, tmp_path / "a.json", simulate(schedule))
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["schema"] == 1
    assert found["makespan"] == 33
    assert found["bubble_makespan"] == pytest.approx(9 / 33)
    assert found["bubble_span"] == pytest.approx(9 / 33)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["peak_waiting"] == [1, 1, 1, 1]
    assert found["gathers"] == [1, 1, 1, 1]
    assert found["ops"][3][1:4] == [
        {"cell": 1, "op": "F", "chunk": 0, "microbatch": 0, "start": 3, "end": 4},
        {"cell": 2, "op": "B", "chunk": 0, "microbatch": 0, "start": 4, "end": 5},
        {"cell": 2, "op": "W", "chunk": 0, "microbatch": 0, "start": 5, "end": 6},
    ]


def test_a_table_by_hand(tmp_path):
    lines = ["stage,op,chunk,microbatch,part", "0,F,0,0,0", "0,B,0,0,0", "0,W,0,0,0", "1,F,0,0,1", "1,B,0,0,1", "1,W,0,0,1"]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(lines))
    assert simulate(load_schedule(path)).makespan == 5
    path.write_text("\n".join([*lines[:2], *lines[3:]]))
    with pytest.raises(InputError, match=r"mine.csv: stage 0: B of chunk 0, micro-batch 0 is missing"):
        load_schedule(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: Expecting property name"),
        ("a.json", "[]", "schema None: legal is 1"),
        ("a.json", '{"schema": 2}', "schema 2: legal is 1"),
        ("a.json", '{"schema": 1}', "a.json: not a table of a schedule, KeyError at 'parts'"),
        ("a.json", '{"schema": 1, "parts": 3}', "not a table of a schedule, TypeError at"),
        (
            "a.json",
            '{"schema": 1, "parts": [[0]], "pipes": [0], "microbatches": 1, "ops": [[{"op": "F", "chunk": 0}]]}',
            "op {'op': 'F', 'chunk': 0}: needs whole numbers as chunk and as micro-batch",
        ),
        ("a.csv", "", r"columns None: needs stage, cell, op, chunk, microbatch"),
        ("a.csv", "stage,op,chunk,microbatch,part\n", "0 lines: none is an F, B or W"),
        ("a.csv", "stage,op,chunk,microbatch,part\nx,F,0,0,0", "stage 'x': needs a whole number"),
        ("a.csv", "stage,op,chunk,microbatch,part\n0,F,1,0,0", "stage 0: no F, B or W of chunk 0"),
        ("a.txt", "", r"a.txt: legal are .json and .csv files"),
    ],
)
def test_files_that_are_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        load_schedule(tmp_path / name)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load_schedule(tmp_path / "a.json")
    schedule = make_schedule("1f1b", Shape(1, 1))
    with pytest.raises(InputError, match="No such file"):
        save_schedule(schedule, tmp_path / "no" / "a.json")
    with pytest.raises(InputError, match=r"legal are .json and .csv"):
        save_schedule(schedule, tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["dualpipe", "zeropp"])
def test_trace(name):
    found = simulate(make_schedule(name, Shape(2, 4)), Costs(send=0.5, gather=0.25, reduce=0.25))
    events = json.loads(trace_json(found))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(found.events)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(found.makespan * 1e6)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in slices} == set(threads)
    assert {"stage 0", "stage 1: gathers", "stage 1: reduces"} <= set(threads.values())
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == len(found.schedule.transfers)
    assert all(arrows["s"][number]["ts"] < arrows["f"][number]["ts"] for number in arrows["s"])
    check_nesting(slices)


def check_nesting(slices: list[dict]) -> None:
    """Slices of a thread lie beside or inside each other, as the viewer needs."""
    for thread in {event["tid"] for event in slices}:
        open_ends: list[float] = []
        for event in sorted((e for e in slices if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= event["ts"] + 1e-3:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-3
            open_ends.append(event["ts"] + event["dur"])
