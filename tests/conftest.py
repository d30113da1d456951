"""What every test runs under: 8 virtual CPU devices, kept compilations, checked shapes, repeatable hypothesis."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Before jax is imported, and through the environment so that child processes get the same.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Every annotated shape and dtype of the library is checked at each call. Classes with `__no_type_check__` are passed
# over on purpose: jax rebuilds those pytrees with specs and placeholders in the leaves.
jaxtyping.install_import_hook("moejax", "beartype.beartype")

# Derandomised: the same examples on every machine and every run, so a failure is the change's and can be repeated.
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=15, database=None)
hypothesis.settings.register_profile("full", parent=hypothesis.settings.get_profile("quick"), max_examples=150)
hypothesis.settings.load_profile("quick")


# Mappings of memory that a process may hold before compiled programs are forgotten: Linux allows 65,530, a program of XLA:CPU
# takes several, and past the limit LLVM fails and takes the process with it.
MAX_MAPPINGS = 40_000
MAPPINGS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def forgotten_in_time():
    """Drops jax's compiled programs before a long run of tests holds too many."""
    yield
    if MAPPINGS.exists() and len(MAPPINGS.read_text().splitlines()) > MAX_MAPPINGS:
        jax.clear_caches()


def pytest_collection_modifyitems(items):
    """Skips tests marked gpu where there is none."""
    if jax.default_backend() == "gpu":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: jax runs on {jax.default_backend()}"))
