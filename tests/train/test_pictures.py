"""Pictures of routing: they are drawn from a run's own files, and the page needs nothing else."""

import json
import re

import matplotlib.image
import numpy as np
import pytest

import train.pictures as pictures
from layouts.routing_trace import RoutingTrace
from train.domains import NAMES, domain_of_ids
from train.metrics import read_metrics
from train.tokens import ByteTokenizer

LAYERS, E = 2, 4


@pytest.fixture
def folder(tmp_path):
    """A run folder with 20 logged steps and two records."""
    rng, lines = np.random.default_rng(0), []
    for step in range(1, 21):
        line = {"schema": 1, "kind": "train", "step": step, "worst_load": 1 + 1 / step, "token_straggler": 9.0 / step}
        tokens = rng.integers(1, 50, (LAYERS, E)).tolist()
        lines.append({**line, "tokens_per_expert": tokens, "dropped_fraction": 0.1 / step, "routing_entropy": 1.2})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    trace = RoutingTrace.empty(E, ("letters", "</script>", "unused"))
    for step in (10, 20):
        expert = rng.integers(0, E, (LAYERS, 40, 1))
        trace = trace.add(step, expert, rng.integers(0, 9, 40), (expert[0, :, 0] > 1).astype(int))
    trace.save(tmp_path / pictures.TRACE)
    return tmp_path


def test_a_run_has_its_picture_and_page(folder, capsys):
    assert pictures.main([str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "routing.png"), str(folder / "routing.html")]
    image = matplotlib.image.imread(folder / "routing.png")
    assert min(image.shape[:2]) > 700
    assert image[..., :3].std() > 0.1, "an empty picture"


@pytest.mark.parametrize("shape", [(1, 2), (58, 256)])
def test_the_load_of_one_step_fits_a_screen(shape):
    """Its title is whole, and the picture is no larger than 1600 by 1000 pixels."""
    figure = pictures.load_figure(np.ones(shape, int).tolist(), 12_000)
    figure.canvas.draw()
    title, whole = figure.axes[0].title.get_window_extent(), figure.bbox
    assert whole.x0 <= title.x0 < title.x1 <= whole.x1
    assert whole.width <= 1600
    assert whole.height <= 1000


def test_one_logged_step_is_a_dot():
    """Every curve of a run that logged once shows its point, at a step that is a whole number."""
    line = {"step": 6, "tokens_per_expert": [[3, 1], [2, 2]], "worst_load": 1.5, "routing_entropy": 0.5}
    figure = pictures.routing_figure([line], None, "once")
    figure.canvas.draw()
    curves = [axes for axes in figure.axes if axes.lines]
    assert len(curves) == 2
    for axes in curves:
        assert axes.lines[0].get_marker() == "o"
        assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_page_has_everything_inside(folder):
    pictures.main([str(folder)])
    page = (folder / "routing.html").read_text()
    assert not re.search(r"https?://|src=|href=|import ", page), "it would load something"
    assert page.count("</script>") == 1
    assert '"domains": {' in page
    data = json.loads(re.search(r"const data = (.*);\n", page).group(1))
    lines = read_metrics(folder / "metrics.jsonl")
    assert data["steps"] == [line["step"] for line in lines]
    tokens = np.array(lines[4]["tokens_per_expert"])
    np.testing.assert_allclose(data["loads"][4], tokens / tokens.mean(1, keepdims=True), atol=1e-3)
    assert [curve["unit"] for curve in data["curves"]] == ["times its layer's mean", "rows", "%", "nats"]
    domains = data["domains"]
    assert domains["names"] == ["letters", "</script>"]
    assert np.array(domains["lift"]).shape == (2, LAYERS, 2, E)
    # In layer 0 experts 0 and 1 have the one domain to themselves, 2 and 3 the other.
    assert (np.sign(domains["lift"][1][0]) == [[1, 1, -1, -1], [-1, -1, 1, 1]]).all()
    assert domains["bits"][1][0] > 0.9 > 0.3 > domains["bits"][1][1]


def test_a_run_without_a_trace_or_without_experts(folder, capsys):
    (folder / pictures.TRACE).unlink()
    assert pictures.main([str(folder)]) == 0
    assert '"domains": {' not in (folder / "routing.html").read_text()
    (folder / "metrics.jsonl").write_text('{"schema": 1, "kind": "train", "step": 1, "loss": 2.0}\n')
    assert pictures.draw_routing(folder, "dense") == []
    assert pictures.main([str(folder)]) == 2
    assert "no metrics of MoE layers" in capsys.readouterr().err


def test_a_damaged_trace_is_named(folder, capsys):
    (folder / pictures.TRACE).write_bytes(b"no trace")
    assert pictures.main([str(folder)]) == 2
    assert "routing.npz: not a routing trace" in capsys.readouterr().err


def test_bytes_have_domains():
    domain = [NAMES[d] for d in domain_of_ids(ByteTokenizer(), 264)]
    assert [domain[b] for b in b"aZ7 \n(\"+_"] == [
        "letters", "letters", "digits", "spaces", "line ends", "brackets and quotes", "brackets and quotes", "other signs",
        "other signs",
    ]  # fmt: skip
    assert domain[200] == "other text"
    assert set(domain[256:]) == {"start of a document"}
