"""What the README and docs/placement.md show works: their Python runs as a stranger would run it; commands and files exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXTS = [README, (ROOT / "docs" / "placement.md").read_text()]
PYTHON_BLOCKS = [block for text in TEXTS for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


def test_there_are_blocks():
    assert len(PYTHON_BLOCKS) >= 2


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_block_runs(number):
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PYTHON_BLOCKS[number]], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\(.*# prints (.*)", PYTHON_BLOCKS[number]):
        assert said in done.stdout.splitlines()


def test_make_targets_exist():
    targets = set(re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split())
    named = set(re.findall(r"`make ([a-z-]+)", README)) | set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_modules_exist():
    named = set(re.findall(r"python -m ([a-z]+)", README))
    assert named
    assert {name for name in named if not importlib.util.find_spec(name)} == set()


def test_files_exist():
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link}
    assert links
    assert {link for link in links if not (ROOT / link).exists()} == set()
