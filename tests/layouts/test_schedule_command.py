"""`python -m layouts schedule`: what it prints, writes and draws, and what it says to wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from layouts.__main__ import main
from layouts.chart import plot, text_rows
from layouts.schedules import MAKERS, make_schedule
from layouts.simulate import Costs, simulate
from layouts.tables import Shape

FOUR_BY_EIGHT = ["--stages", "4", "--microbatches", "8"]


def size(path: Path) -> tuple[int, int]:
    """Width and height of a picture."""
    with Image.open(path) as image:
        return image.size


def run(*words: str) -> int:
    """The command's exit code."""
    return main(["schedule", *words])


def test_as_the_contract_has_it(tmp_path, capsys):
    json_file, picture = tmp_path / "a.json", tmp_path / "a.png"
    words = ["zeropp", "--stages", "4", "--chunks", "2", "--microbatches", "16", "--unit", "8", "--costs", "1,1,1"]
    assert run(*words, "--json", str(json_file), "--plot", str(picture)) == 0
    printed = capsys.readouterr().out
    assert "makespan                          49.5\n" in printed
    assert "bubble, share of the makespan     3.0%\n" in printed
    assert "gathers, a stage                  5 5 5 5\n" in printed
    found = json.loads(json_file.read_text())
    assert (found["makespan"], found["gathers"], found["chunks"], found["unit"]) == (49.5, [5] * 4, 2, 8)
    assert size(picture)[0] > 1000


def test_split(tmp_path):
    spans = []
    for extra in ([], ["--split"]):
        assert run("1f1b", *FOUR_BY_EIGHT, "--chunks", "1", *extra, "--json", str(tmp_path / "a.json")) == 0
        spans.append(json.loads((tmp_path / "a.json").read_text())["makespan"])
    assert spans == [33, 30]


def test_a_file_goes_in_again(tmp_path, capsys):
    table = str(tmp_path / "a.csv")
    assert run("zb_v", *FOUR_BY_EIGHT, "--csv", table, "--trace", str(tmp_path / "trace.json")) == 0
    first = capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert run(table) == 0
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]
    assert run(table, "--max-activations", "3") == 2
    assert "over the cap of 3; this table needs 4" in capsys.readouterr().err


def test_auto_within_a_cap(capsys):
    assert run("auto", *FOUR_BY_EIGHT, "--chunks", "1", "--max-activations", "4,3,2,1", "--send", "0.1") == 0
    said = capsys.readouterr().out
    assert "live micro-batches, a stage       4 3 2 1" in said
    assert "of these between B and W, a stage 1 1 1 1" in said


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["1f1b"], 2, "1f1b: needs --stages"),
        (["1f2b", *FOUR_BY_EIGHT], 2, "(did you mean 1f1b?)"),
        (["1f1b", *FOUR_BY_EIGHT, "--costs", "1,1"], 2, "--costs '1,1': needs three numbers F,B,W"),
        (["1f1b", *FOUR_BY_EIGHT, "--costs", "1,x,1"], 2, "--costs '1,x,1': needs numbers with commas between them"),
        (["1f1b", *FOUR_BY_EIGHT, "--costs", "1,-1,1"], 2, "costs backward=-1.0: needs a number of at least 0"),
        (["1f1b", "gpipe", *FOUR_BY_EIGHT, "--json", "a.json"], 2, "--json with 2 schedules: takes one; --plot takes several"),
        (["1f1b", *FOUR_BY_EIGHT, "--json", "a.txt"], 2, "a.txt: needs the suffix .json"),
        (["1f1b", *FOUR_BY_EIGHT, "--plot", "a.pdf"], 2, "a.pdf: legal are .png and .svg files"),
        (["1f1b", *FOUR_BY_EIGHT, "--plot", "no/such/a.svg"], 2, "no/such/a.svg: No such file"),
        (["mine.csv", "--stages", "4"], 2, "mine.csv with --stages: a table in a file has its own"),
        (["mine.csv"], 2, "mine.csv: No such file"),
        (["auto", *FOUR_BY_EIGHT, "--max-activations", "0.5"], 3, "legal are numbers from 1 on"),
    ],
)
def test_wrong_input(capsys, words, code, message):
    assert run(*words) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_several_schedules_in_one_picture(tmp_path):
    found = [simulate(make_schedule(name, Shape(4, 8)), Costs(gather=0.1)) for name in ("1f1b", "dualpipe", "zeropp")]
    plot(found, tmp_path / "a.svg")
    plot(found[:1], tmp_path / "b.svg")
    both, one = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert len(both) > 2 * len(one) > 10_000
    plot([simulate(found[0].schedule, Costs(send=0.1, gather=0.1, blocking=True))], tmp_path / "c.png")
    assert size(tmp_path / "c.png")[1] > 200


def test_large_ones_are_wide_enough_for_their_numbers(tmp_path):
    plot([simulate(make_schedule("1f1b", Shape(16, 64)))], tmp_path / "a.png")
    width, height = size(tmp_path / "a.png")
    assert width / 237 > 18  # pixels a unit of time, for two digits
    assert height > 16 * 40


def test_without_matplotlib(tmp_path):
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None; from layouts.__main__ import main;"
        f"sys.exit(main(['schedule', '1f1b', '--stages', '2', '--microbatches', '2', '--plot', {str(tmp_path / 'a.png')!r}]))"
    )
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("a.png: pictures need matplotlib: pip install 'moejax[plot]'\n")


def test_text():
    assert text_rows(simulate(make_schedule("1f1b", Shape(2, 3)))) == [
        "stage 0  F0 F1 .  .  B0 W0 F2 B1 W1 .  B2 W2",
        "stage 1  .  F0 B0 W0 F1 B1 W1 F2 B2 W2 .  .",
    ]
    pair = text_rows(simulate(make_schedule("dualpipe", Shape(2, 4))))[0]
    assert pair == "stage 0  Fa0 Fb2 Fa1 Bb2 Wb2 Fb3&Ba0     Bb3 Wb3 Ba1 Wa1"
    uneven = text_rows(simulate(make_schedule("1f1b", Shape(1, 1)), Costs(1, 1.5, 0.7)))
    assert uneven == ["stage 0  F0 B0 W0"]


DOCS = (Path(__file__).resolve().parent.parent.parent / "docs" / "schedules.md").read_text()


def test_the_figures_of_the_docs():
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\| ([\d.]+) \| ([\d.]+)% / ([\d.]+)% \| ([\d.]+) \|$", DOCS, re.MULTILINE)
    assert [row[0] for row in rows] == [name for name in MAKERS if name != "auto"]
    for name, makespan, bubble, span_bubble, holds in rows:
        found = simulate(make_schedule(name, Shape(4, 8)))
        assert (found.makespan, max(found.peak_activations)) == (float(makespan), float(holds))
        figures = [round(100 * share, 1) for share in (found.bubble_makespan, found.bubble_span)]
        assert figures == [float(bubble), float(span_bubble)]
    caps = [simulate(make_schedule("auto", Shape(4, 8, max_activations=cap))).makespan for cap in (3, 2)]
    assert caps == [26.5, 35.5]
    assert "within 3 micro-batches 26.5, within 2\n  35.5." in DOCS


def test_the_rows_of_the_docs():
    heads = re.findall(
        r"^(\w+): (\d+) stages x \d+ chunks, (\d+) micro-batches, unit \d+\n((?:stage.*\n)+)", DOCS, re.MULTILINE
    )
    assert {head[0] for head in heads} == set(MAKERS) - {"auto"}
    for name, stages, microbatches, drawn in heads:
        found = simulate(make_schedule(name, Shape(int(stages), int(microbatches))))
        assert text_rows(found) == drawn.splitlines()
