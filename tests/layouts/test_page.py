"""layouts.page: one file that says what the answer says, and asks for nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser

import pytest

from layouts import svg
from layouts.__main__ import main
from layouts.devices import place
from layouts.layout import Layout

DEMO = ["--model", "demo", "--seq", "256", "--global-batch", "4096", "--cluster", "h100:2x4", "--top", "3"]
VOID = {"meta", "br", "polyline", "circle", "line", "rect"}


class Tags(HTMLParser):
    """Asserts that every tag is closed; collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(page, answer) of one search."""
    folder = tmp_path_factory.mktemp("page")
    assert main(["search", *DEMO, "--html", str(folder / "a.html"), "--json", str(folder / "a.json")]) == 0
    return (folder / "a.html").read_text(), json.loads((folder / "a.json").read_text())


def test_the_page_is_whole_and_alone(files):
    page, _ = files
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)
    assert 'name="viewport"' in page


@pytest.mark.parametrize("title", ["Ranked layouts", "Where the time goes", "Where the memory goes", "Time against memory"])
def test_sections(files, title):
    assert f"<h2>{title}</h2>" in files[0]


def test_the_page_says_what_the_answer_says(files):
    page, answer = files
    for one in answer["layouts"]:
        assert f"{one['tokens_per_second_per_device']:,.0f}" in page
        assert f"{one['peak_bytes'] / 1e9:.4g}" in page
    assert f"{answer['considered']['layouts']:,}" in page
    assert "python -m layouts verify" in page


def test_bars_add_up():
    bars = svg.stacked([("a", {"x": 1.0, "y": 3.0}), ("b", {"x": 2.0, "y": 0.0})], str, limit=4.0)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bars)]
    assert widths == [25.0, 75.0, 50.0]


@pytest.mark.parametrize(("top", "last"), [(1.0, 1.0), (83.0, 80.0), (0.0123, 0.01), (1500.0, 1500.0)])
def test_ticks(top, last):
    ticks = svg.round_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(last)
    assert 3 <= len(ticks) <= 7


def test_places_are_the_mesh():
    layout = Layout(data=2, expert=2, tensor=2)
    mesh = [place(layout, device) for device in range(8)]
    assert mesh[0] == {"data": 0, "expert": 0, "tensor": 0}
    assert mesh[5] == {"data": 1, "expert": 0, "tensor": 1}
    assert len({tuple(at.values()) for at in mesh}) == 8
