"""Imports point one way: train -> layouts -> moejax -> jax, flax. Read from the sources, so lazy imports count too."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

import moejax

ROOT = Path(__file__).parent.parent
ROOMS = ("moejax", "layouts", "train")
LIBRARY = {"flax", "jax", "jaxtyping", "numpy", "optax"}
# What each room may import besides the standard library and itself; None: anything but the rooms not named.
# Extras: tokamax, which brings absl; torch and transformers to compare with.
ALLOWED = {
    "moejax": LIBRARY | {"tokamax", "absl"},
    "layouts": None,
    "train": None,
    "benchmarks": LIBRARY | {"moejax", "layouts", "torch", "transformers"},
}
BELOW = {"moejax": set(), "layouts": {"moejax"}, "train": {"moejax", "layouts"}, "benchmarks": {"moejax", "layouts"}}


def sources(room: str) -> list[Path]:
    """The room's Python files."""
    return sorted((ROOT / room).rglob("*.py"))


def imported(source: str) -> list[tuple[str, str | None]]:
    """Each import of a source as (module, name): name is None for `import module`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import in line {node.lineno}: imports name their whole path"
            found += [(node.module, alias.name) for alias in node.names]
    return found


def wrong_imports(room: str, source: str) -> set[str]:
    """The packages that a source of the room imports and must not."""
    packages = {module.split(".")[0] for module, _ in imported(source)} - {room} - sys.stdlib_module_names
    above = {*ROOMS, "tests", "benchmarks"} - BELOW[room]
    return packages & above if ALLOWED[room] is None else packages - ALLOWED[room]


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(room: str) -> dict[str, set[str]]:
    """Each module of the room, with those of the room that it imports."""
    modules = {module_name(path): path.read_text() for path in sources(room)}
    graph = {}
    for module, source in modules.items():
        names = {f"{origin}.{name}" if f"{origin}.{name}" in modules else origin for origin, name in imported(source)}
        graph[module] = (names & set(modules)) - {module}
    return graph


@pytest.mark.parametrize("room", [room for room in ALLOWED if sources(room)])
def test_direction(room):
    found = {str(path.relative_to(ROOT)): wrong_imports(room, path.read_text()) for path in sources(room)}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


def test_rooms_are_found():
    assert all(sources(room) for room in ("moejax", "train", "benchmarks"))


@pytest.mark.parametrize("room", [room for room in ROOMS if sources(room)])
def test_no_cycles(room):
    graph = import_graph(room)
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # CycleError where modules import each other


def test_benchmarks_use_public_names_only():
    for path in sources("benchmarks"):
        tree = ast.parse(path.read_text())
        names = {name for module, name in imported(path.read_text()) if module.split(".")[0] == "moejax" and name}
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moejax"
        }
        assert names <= set(moejax.__all__), path


@pytest.mark.parametrize(
    ("room", "source", "wrong"),
    [
        ("moejax", "import jax\nfrom moejax.plan import make_plan", set()),
        ("moejax", "def f():\n    from layouts import layout", {"layouts"}),
        ("moejax", "import rich.table", {"rich"}),
        ("layouts", "import rich\nimport moejax", set()),
        ("layouts", "from train.config import TrainConfig", {"train"}),
        ("train", "import layouts, tests.support", {"tests"}),
        ("benchmarks", "import train.loop", {"train"}),
    ],
)
def test_the_rule_itself(room, source, wrong):
    assert wrong_imports(room, source) == wrong
