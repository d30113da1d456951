"""docs/budgets.md says what the compiled text says."""

import pytest

from layouts import aot
from moejax.remat import REMAT_POLICIES
from tests.layouts.test_aot import needs_compilers
from tests.moejax import budgets

QUICK = [("all_to_all", "received"), ("all_to_all", "exchange"), ('capacity="pool"', "experts")]
ALL = [(exchange, policy) for exchange in budgets.EXCHANGES for policy in (None, *REMAT_POLICIES)]


@pytest.mark.parametrize(("exchange", "policy"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL)])
def test_the_page_says_what_the_compiler_made(exchange, policy):
    (line,) = (line for line in budgets.PAGE.read_text().splitlines() if line.startswith(f"| `{exchange}` |"))
    written = dict(zip((None, *REMAT_POLICIES), line.split(" | ")[1:], strict=True))
    assert written[policy].removesuffix(" |") == budgets.budget(exchange, policy)


def test_the_page_is_of_these_policies_and_exchanges():
    text = budgets.PAGE.read_text()
    assert text.startswith(budgets.INTRODUCTION)
    assert all(f"| {policy} |" in text for policy in REMAT_POLICIES)
    assert text.count("| `") == len(budgets.EXCHANGES)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "on_host"), [("exchange", False), ("offload", True)])
def test_what_is_offloaded_lies_in_the_hosts_memory(remat, on_host, tmp_path):
    """XLA calls it memory space 5."""
    needs_compilers("h100:1x8")
    arguments = {"remat": remat, "d_model": 256, "d_ff": 512, "seq": 64}
    text = aot.compile_for("h100:1x8", "tests.layouts.programs:train_step", arguments, out=tmp_path).text
    assert ("S(5)" in text) == on_host
