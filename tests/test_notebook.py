"""The notebooks run from top to bottom, use public names only, and are kept without outputs."""

import ast
import asyncio
from pathlib import Path

import nbclient
import nbformat
import pytest

import moejax

COLAB = Path(__file__).parent.parent / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def test_they_are_all_here():
    assert [path.name for path in NOTEBOOKS] == ["layouts.ipynb", "pipelines.ipynb", "quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    for cell in read(path).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_uses_public_names_only(path):
    tree = ast.parse(code(read(path)))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    sources = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "moejax" in imported
    assert not {name for name in imported | sources if name.startswith(("moejax.", "train"))}
    # `layouts` has its names in its modules, as docs/schedules.md shows them.
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("layouts")]
    assert not [alias.name for node in taken for alias in node.names if alias.name.startswith("_")]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moejax"
    }
    assert used
    assert used <= set(moejax.__all__)


def executed(name, monkeypatch):
    """(what a notebook printed, its outputs)."""
    monkeypatch.delenv("XLA_FLAGS")  # the notebook makes its own virtual devices
    path = COLAB / name
    notebook = read(path)
    where = {"metadata": {"path": str(path.parent)}}
    asyncio.run(nbclient.NotebookClient(notebook, timeout=300, resources=where).async_execute())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    return text, outputs


def test_pipelines_runs(monkeypatch):
    text, outputs = executed("pipelines.ipynb", monkeypatch)
    assert "gpipe    takes  33.0, idle 27.3%, holds 8 micro-batches" in text
    worst = [float(line.split(": ")[1]) for line in text.splitlines() if "worst difference" in line]
    assert len(worst) == 2
    assert max(worst) < 1e-5
    assert text.count("as in the table: True") == 2
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def test_quickstart_runs(monkeypatch):
    text, outputs = executed("quickstart.ipynb", monkeypatch)
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    errors = [float(line.split("error")[1].split()[0]) for line in text.splitlines() if line.startswith("step")]
    assert "8 devices (cpu), mesh: {'expert': 8}" in text
    assert "P('expert', None, None)" in text
    assert errors[-1] < errors[0] / 10
    assert len(pictures) == 1


def test_layouts_runs(monkeypatch):
    """One search, one proof."""
    text, _ = executed("layouts.ipynb", monkeypatch)
    assert "qwen3-30b-a3b on h100:8x8: 64 devices" in text
    assert "seconds of a step" in text
    assert "#1 for cpu:8: " in text
    assert "product FLOPs" in text
