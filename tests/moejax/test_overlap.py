"""What may run beside what: an exchange waits for no expert product but its own part's, and the compilers use that.

Of the four crossings of rows, those on the way to a product (dispatch, and combine's cotangents) must wait for no product of
that pass at all, those on the way back for their own part's only.
"""

from pathlib import Path

import jax
import pytest

import moejax
from layouts import aot, hlo
from layouts.hlo.program import scope
from tests.layouts.programs import layer, train_step
from tests.layouts.test_aot import needs_compilers

PRODUCTS = ("dot", "convolution", "custom-call")
SMALL = {"num_chunks": 2, "d_model": 16, "d_ff": 32, "activation": "gelu", "dtype": "float32"}
# So large that an exchange is worth hiding.
LARGE = {"num_chunks": 2, "d_model": 1024, "d_ff": 4096, "num_experts": 8, "tokens": 1024}


class Crossings:
    """The all-to-alls of rows in one computation, by scope, and the expert products there."""

    @classmethod
    def of(cls, text: str) -> list["Crossings"]:
        """Those of each computation that has any of the layer's."""
        module = hlo.parse(text)
        crosses = lambda i: i.base_op == "all-to-all" and "moe/" in scope(i)
        return [cls(module, where) for where in module.computations.values() if any(map(crosses, where))]

    def __init__(self, module: hlo.Module, where: hlo.Computation):
        self.module, self.where = module, where
        found = [i for i in self.where if i.base_op == "all-to-all" and not i.op.endswith("-done")]
        largest = max(i.nbytes for i in found)
        self.by_scope: dict[str, list[hlo.Instruction]] = {}
        for exchange in found:
            if exchange.nbytes > largest / 4:  # not the pairs' numbers and weights, which cross once for all parts
                self.by_scope.setdefault(scope(exchange), []).append(exchange)
        self.products = {sign: self._products(f"{sign}moe/experts") for sign in ("", "~")}
        self.products["all"] = self._products("")

    def _products(self, where):
        matches = lambda i: i.base_op in PRODUCTS and scope(i).startswith(where)
        return [i for i in self.where if any(matches(inner) for inner in self._inside(i))]

    def _inside(self, instruction):
        yield instruction
        for name in instruction.called:
            for inner in self.module.computations[name]:
                yield from self._inside(inner)

    def waits_for(self, exchange, sign: str) -> set[str]:
        """The expert products, forward ("") or backward ("~"), or all products, that must end before the exchange begins."""
        return {i.name for i in self.products[sign] if hlo.depends(self.where, exchange, i)}

    def hidden(self, name: str) -> set[str]:
        """The expert products that are scheduled while one of the exchanges of that scope is under way."""
        names = {i.name for sign in ("", "~") for i in self.products[sign]}
        starts = {i.name for i in self.by_scope[name]}
        windows = [w for w in hlo.windows(self.where, "all-to-all") if w.start.name in starts]
        return {i.name for w in windows for i in w.between} & names


def check_independence(text: str, num_parts: int) -> Crossings:
    (found,) = Crossings.of(text)
    assert {name: len(group) for name, group in found.by_scope.items()} == dict.fromkeys(
        ("moe/dispatch", "moe/combine", "~moe/combine", "~moe/dispatch"), num_parts
    )
    for name, sign in (("moe/dispatch", ""), ("~moe/combine", "~")):
        assert all(found.waits_for(exchange, sign) == set() for exchange in found.by_scope[name]), name
    for name, sign in (("moe/combine", ""), ("~moe/dispatch", "~")):
        own = [found.waits_for(exchange, sign) for exchange in found.by_scope[name]]
        assert all(own), name
        assert len(set().union(*own)) == sum(map(len, own)), f"{name}: two parts wait for one product"
    return found


@pytest.mark.parametrize("capacity", ["cell", "pool"])
def test_a_part_waits_for_no_other_parts_experts(capacity):
    check_independence(layer(jax.devices(), **SMALL, capacity=capacity).compile().as_text(), 2)


def test_whole_exchanges_wait_for_all_experts():
    """What the check above must tell from chunks: without them every product stands before the way back."""
    found = check_independence(layer(jax.devices(), **SMALL | {"num_chunks": 1}).compile().as_text(), 1)
    (home,) = found.by_scope["moe/combine"]
    assert found.waits_for(home, "") == {i.name for i in found.products[""]}
    with pytest.raises(AssertionError):
        check_independence(layer(jax.devices(), **SMALL | {"num_chunks": 1}).compile().as_text(), 2)


@pytest.mark.parametrize("remat", ["none", "exchange"])
def test_micro_batches_that_walk_together_wait_for_nothing_of_each_other(remat):
    """In the body of the layers' loop, forward and backward, whatever one sends needs only its own attention and experts."""
    passes = Crossings.of(train_step(jax.devices(), remat).compile().as_text())
    assert sorted(map(sorted, (found.by_scope for found in passes))) == [
        ["moe/combine", "moe/dispatch"],
        ["~moe/combine", "~moe/dispatch"],
    ]
    for found in passes:
        waits = [[found.waits_for(exchange, "all") for exchange in pair] for pair in found.by_scope.values()]
        assert any(map(any, waits))
        for first, second in waits:
            assert not first & second


def compiled(target: str, build: str, arguments: dict, out: Path) -> str:
    """Under every option there is for that platform: an unknown one would be refused."""
    needs_compilers(target)
    options = moejax.compiler_options(aot.Target.parse(target).kind, deterministic=True)
    return aot.compile_for(target, f"tests.layouts.programs:{build}", arguments, compiler_options=options, out=out).text


def check_schedule(target: str, capacity: str, out: Path):
    """Products run while rows cross, forward and backward."""
    found = check_independence(compiled(target, "layer", LARGE | {"capacity": capacity}, out), 2)
    assert found.hidden("moe/dispatch") | found.hidden("moe/combine")
    assert found.hidden("~moe/combine") | found.hidden("~moe/dispatch")


@pytest.mark.parametrize("capacity", ["cell", pytest.param("pool", marks=pytest.mark.slow)])
def test_gpu_runs_products_beside_exchanges(capacity, tmp_path):
    check_schedule("h100:1x8", capacity, tmp_path)


@pytest.mark.slow
def test_gpu_runs_a_micro_batch_beside_another_ones_exchanges(tmp_path):
    sizes = {"d_model": 1024, "d_ff": 4096, "seq": 256}
    for found in Crossings.of(compiled("h100:1x8", "train_step", sizes, tmp_path)):
        assert any(found.hidden(name) for name in found.by_scope)


@pytest.mark.slow
def test_tpu_runs_products_beside_exchanges(tmp_path):
    check_schedule("v5p:2x2x2", "cell", tmp_path)


def test_options_of_no_platform():
    with pytest.raises(ValueError, match=r"^platform='cuda': legal values are 'cpu', 'gpu', 'tpu'"):
        moejax.compiler_options("cuda")
