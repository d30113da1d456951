"""SplitLayer: a layer's forward and backward cut into F, B (its input's gradient) and W (its weights' gradients).

The layer's value and vjp are traced together, all calls inlined, and each equation goes to the first of F, B and W that
needs its result. So B is what the input's gradient needs beyond the forward, and no more.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jaxtyping import Array

from moejax import axes as ax

F, B, W = range(3)
INLINED = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
# What one of these makes is made again from its operand where it is needed, in place of being kept.
VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "iota", "copy", "name", "pvary"}


class SplitLayer:
    """One layer's three sections, each a function of arrays.

    What depends on parameters and inputs alone (casts, masks, rotary angles) is in no section's results: each one that
    needs it computes it again.
    """

    def __init__(self, layer: Callable, params: Any, given: Any, x: Array, scale: float):
        """Traces the layer. Inside the shard_map that it will run in: types carry what varies over which mesh axes.

        Args:
          layer: (params, given, x) -> (y, loss, stats): y like x, loss a scalar or None, stats a pytree without gradients.
          params: an example of its parameters.
          given: of what else it reads, without gradients.
          x: of its input.
          scale: the cotangent of the loss.

        Raises:
          ValueError: where y is not of the shape, dtype and variation of x.
        """
        flat, tree = jax.tree.flatten((params, given))
        self._num_params = len(jax.tree.leaves(params))
        outs: list[Any] = []

        def joint(*args):
            (params, given), x, dy = tree.unflatten(args[:-2]), args[-2], args[-1]
            (y, loss), pull, stats = jax.vjp(lambda p, x: _differentiable(layer(p, given, x)), params, x, has_aux=True)
            _check_output(x, y)
            cotangent = None if loss is None else ax.vary_over(jax.numpy.asarray(scale, loss.dtype), sorted(ax.varying(loss)))
            dp, dx = pull((dy, cotangent))
            outs[:] = [jax.tree.structure(stats), jax.tree.structure(dp)]
            return [y, dx, *jax.tree.leaves(dp), *jax.tree.leaves(stats)]

        traced = jax.make_jaxpr(joint)(*flat, x, x)
        flattened = jax.make_jaxpr(lambda *args: _inlined(traced.jaxpr, traced.consts, *args))(*flat, x, x)
        self._stats_tree, self._params_tree = outs
        self._consts, jaxpr = flattened.consts, flattened.jaxpr
        self._eqns = jaxpr.eqns
        self._y, self._dx, *rest = jaxpr.outvars
        self._dp, self._stats = rest[: self._num_params], rest[self._num_params :]
        self._x, self._dy = jaxpr.invars[-2:]
        self._free, self._param_vars = [*jaxpr.constvars, *jaxpr.invars[:-2]], jaxpr.invars[: self._num_params]
        self._maker = {v: i for i, eqn in enumerate(self._eqns) for v in eqn.outvars}
        self._free_eqns = self._find_free()
        self._owner = self._find_owners()
        self._cut()

    def _find_free(self) -> set[int]:
        free, found = set(self._free), set()
        for i, eqn in enumerate(self._eqns):
            if all(isinstance(v, Literal) or v in free for v in eqn.invars):
                free |= set(eqn.outvars)
                found.add(i)
        return found

    def _find_owners(self) -> dict[int, int]:
        """Equation -> the first section that runs it."""
        owner: dict[int, int] = {}
        for section, outs in ((F, [self._y, *self._stats]), (B, [self._dx]), (W, self._dp)):
            for i in self._walk(outs, lambda i: True)[0]:
                owner.setdefault(i, section)
        return owner

    def _cut(self) -> None:
        need_w = self._walk(self._dp, lambda i: self._owner[i] == W)[1]
        self._stash = [v for v in need_w if self._made_in(v) == B]
        need_b = self._walk([self._dx, *self._stash], lambda i: self._owner[i] == B)[1]
        self._keep_w = [v for v in need_w if self._made_in(v) == F]
        self._keep_b = [v for v in need_b if self._made_in(v) == F and v not in self._keep_w]

    def _made_in(self, v) -> int | None:
        if v is self._x:
            return F
        if v is self._dy:
            return B
        return None if v in self._free else self._owner[self._maker[v]]

    def _walk(self, outs: Iterable, own: Callable[[int], bool]) -> tuple[set[int], list]:
        """The equations a section runs to get `outs`, and the values that it must be given."""
        todo, seen, eqns, given = [v for v in outs if not isinstance(v, Literal)], set(), set(), []
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            i = self._maker.get(v)
            if i is not None and (own(i) or i in self._free_eqns or _is_view(self._eqns[i])):
                eqns.add(i)
                todo += [u for u in self._eqns[i].invars if not isinstance(u, Literal)]
            else:
                given.append(v)
        return eqns, given

    def _run(self, section: int, outs: Sequence, env: dict, params, given) -> list:
        env = dict(zip(self._free, [*self._consts, *jax.tree.leaves((params, given))], strict=True)) | env
        read = lambda v: v.val if isinstance(v, Literal) else env[v]
        for i in sorted(self._walk(outs, lambda i: self._owner[i] == section)[0]):
            eqn = self._eqns[i]
            env.update(zip(eqn.outvars, _bind(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in outs]

    def kept(self) -> dict[str, list]:
        """The types of what lives from F to B ("keep_b"), from F to W ("keep_w") and from B to W ("stash")."""
        each = {"keep_b": self._keep_b, "keep_w": self._keep_w, "stash": self._stash}
        return {name: [v.aval for v in found] for name, found in each.items()}

    def stats(self) -> Any:
        """The types of the stats."""
        return self._stats_tree.unflatten([v.aval for v in self._stats])

    def weight_reads(self) -> list[bool]:
        """For each parameter, in the order of its tree's leaves, whether `weight` reads it."""
        eqns = self._walk(self._dp, lambda i: self._owner[i] == W)[0]
        read = {v for i in eqns for v in self._eqns[i].invars if not isinstance(v, Literal)}
        return [v in read for v in self._param_vars]

    def forward(self, params, given, x) -> tuple[Array, Any, list, list]:
        """(y, stats, keep_b, keep_w)."""
        outs = [self._y, *self._stats, *self._keep_b, *self._keep_w]
        y, *rest = self._run(F, outs, {self._x: x}, params, given)
        stats, rest = rest[: len(self._stats)], rest[len(self._stats) :]
        return y, self._stats_tree.unflatten(stats), rest[: len(self._keep_b)], rest[len(self._keep_b) :]

    def backward(self, params, given, keep_b, keep_w, dy) -> tuple[Array, list]:
        """(the input's gradient, stash)."""
        env = self._env(keep_b, keep_w) | {self._dy: dy}
        dx, *stash = self._run(B, [self._dx, *self._stash], env, params, given)
        return dx, stash

    def weight(self, params, given, keep_w, stash) -> Any:
        """The parameters' gradients."""
        env = self._env((), keep_w) | dict(zip(self._stash, stash, strict=True))
        return self._params_tree.unflatten(self._run(W, self._dp, env, params, given))

    def _env(self, keep_b, keep_w) -> dict:
        return dict(zip(self._keep_b, keep_b, strict=False)) | dict(zip(self._keep_w, keep_w, strict=True))


def _differentiable(found):
    y, loss, stats = found
    return (y, loss), stats


def _check_output(x, y) -> None:
    if (x.shape, x.dtype, ax.varying(x)) != (y.shape, y.dtype, ax.varying(y)):
        raise ValueError(
            f"layer output {y.dtype}{list(y.shape)} that varies over {sorted(ax.varying(y))}: must be like its input, "
            f"{x.dtype}{list(x.shape)} over {sorted(ax.varying(x))}"
        )


def _is_view(eqn) -> bool:
    """A cast counts as one where it makes its operand no smaller: else the result is what costs less to keep."""
    if eqn.primitive.name == "convert_element_type":
        return eqn.invars[0].aval.dtype.itemsize <= eqn.outvars[0].aval.dtype.itemsize
    return eqn.primitive.name in VIEWS


def _inlined(jaxpr, consts, *args) -> list:
    """Evaluates a jaxpr with every call inlined, so that single equations can be told apart.

    Barriers are left out: one around values of both B and W would put all of W into B. What they are for, that XLA computes
    something again in place of keeping it, the sections do by themselves.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name == "optimization_barrier":
            outs = values
        elif eqn.primitive.name in INLINED and inner is not None:
            closed = hasattr(inner, "consts")
            outs = _inlined(inner.jaxpr if closed else inner, inner.consts if closed else (), *values)
        else:
            outs = _bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _bind(eqn, values: list) -> list:
    found = eqn.primitive.get_bind_params(eqn.params)  # jax 0.10: the parameters; 0.12: (functions, parameters)
    functions, params = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]
