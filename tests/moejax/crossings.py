"""What may run beside what: an exchange waits for no expert product but its own part's, and the compilers use that.

Of the four crossings of rows, those on the way to a product (dispatch, and combine's cotangents) must wait for no product of
that pass at all, those on the way back for their own part's only.
"""

from layouts import hlo
from layouts.hlo.program import group_size, scope

PRODUCTS = ("dot", "convolution", "custom-call")


class Crossings:
    """The all-to-alls of rows in one computation, by scope, and the expert products there.

    Of `group_size` devices only, where that is given: those over one mesh axis.
    """

    @classmethod
    def of(cls, text: str, group_size: int | None = None) -> list["Crossings"]:
        """Those of each computation that has any of the layer's."""
        module = hlo.parse(text)
        crosses = lambda i: i.base_op == "all-to-all" and "moe/" in scope(i)
        return [cls(module, where, group_size) for where in module.computations.values() if any(map(crosses, where))]

    def __init__(self, module: hlo.Module, where: hlo.Computation, size: int | None):
        self.module, self.where = module, where
        begins = lambda i: i.base_op == "all-to-all" and not i.op.endswith("-done")
        found = [i for i in self.where if begins(i) and size in (None, group_size(i, module.num_devices))]
        largest = max(i.nbytes for i in found)
        self.by_scope: dict[str, list[hlo.Instruction]] = {}
        for exchange in found:
            if exchange.nbytes > largest / 4:  # not the pairs' numbers and weights, which cross once for all parts
                self.by_scope.setdefault(scope(exchange), []).append(exchange)
        self.products = {sign: self._products(f"{sign}moe/experts") for sign in ("", "~")}
        self.products["all"] = self._products("")

    def _products(self, where):
        # A gather may stand there as a custom call too.
        matches = lambda i: i.base_op in PRODUCTS and scope(i).startswith(where) and hlo.works(self.module, i)
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


def check_independence(text: str, num_parts: int, group_size: int | None = None) -> Crossings:
    """Raises AssertionError unless each of the parts waits for no product but its own."""
    (found,) = Crossings.of(text, group_size)
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
