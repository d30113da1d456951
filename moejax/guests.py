"""Experts that work here for one step: their weights arrive while this device's own experts are busy, and gradients go home.

The weights are no residual: the backward sends them again, beside the own experts' products, so that what a model holds of
lent weights is one layer's.

e: own experts of a device, n: devices of the domain, p: lanes from one to another, R: rows, d: model width, f: expert width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moejax import axes as ax
from moejax.experts import GroupedExperts
from moejax.feed_forward import d_hidden_of, hidden_of
from moejax.grouped_matmul import grouped_outer, grouped_part
from moejax.pytree import pytree
from moejax.remat import HIDDEN


@pytree
class WithGuests:
    """A device's own experts and those lent to it, callable on flat rows as `GroupedExperts.flat` is.

    Groups: the e own experts, then, for each device of the domain, the p lanes that lead here from it.

    Attributes:
      own: the own experts, whole in their width d.
      lane: [n, p] which own expert goes in each lane to each device; e: none, and whatever travels there is not used.
      axes: the mesh axes of the domain.
    """

    own: GroupedExperts
    lane: Int[Array, "n p"]
    axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def num_experts(self) -> int:
        """e + n * p, the groups that rows may come in."""
        return self.own.num_experts + self.lane.size

    def flat(self, rows, group_sizes, row_weight) -> Float[Array, "R d"]:
        """Each row through its expert, times its weight.

        Args:
          rows: [R, d], grouped, empty rows last.
          group_sizes: [e + n * p] int32.
          row_weight: [R] float32.
        """
        own = self.own
        into = (own.up,) if own.gate is None else (own.gate, own.up)
        args = ax.vary_alike((rows, row_weight, (*into, own.down), self.lane, group_sizes))
        return _flat(own.activation, self.axes, *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flat(activation, axes, rows, weight, own, lane, sizes):
    return _forward(activation, axes, rows, weight, own, lane, sizes)[0]


def _forward(activation, axes, rows, weight, own, lane, sizes):
    wire = send(own, lane, axes)
    here, there = _parts(own, sizes)
    products = tuple(here.product(rows, w) for w in own[:-1])
    out = here.product(hidden_of(activation, products, weight), own[-1])
    # Nothing reads what comes over the wire before the own products are done: so it has all their time to come.
    out, wire = lax.optimization_barrier((out, wire))
    guests = unpack(wire, own)
    more = tuple(there.product(rows, w) for w in guests[:-1])
    out += there.product(hidden_of(activation, more, weight), guests[-1])
    products = tuple(checkpoint_name(a + b, HIDDEN) for a, b in zip(products, more, strict=True))
    return out, (rows, weight, own, lane, sizes, products)


def _backward(activation, axes, kept, dy):
    """The own experts' rows while the weights arrive, then the guests', then the own weights' while gradients go home."""
    rows, weight, own, lane, sizes, (first, *others) = kept
    # Behind barriers, so that XLA sends the weights and computes the activation again instead of keeping them. The weights need
    # not wait for dy: a TPU's compiler makes their exchange a synchronous one if they do (v5p, jax 0.10.2).
    first, lane = lax.optimization_barrier((first, lane))
    first, dy = lax.optimization_barrier((first, dy))
    products = (first, *others)
    wire = send(own, lane, axes)
    here, there = _parts(own, sizes)
    d_hidden = here.product(dy, own[-1], transpose=True)
    d_hidden, wire = lax.optimization_barrier((d_hidden, wire))
    guests = unpack(wire, own)
    d_hidden += there.product(dy, guests[-1], transpose=True)
    hidden = hidden_of(activation, products, weight)
    d_products, d_weight = d_hidden_of(activation, products, weight, d_hidden)
    sides = [(rows, part) for part in d_products] + [(hidden, dy)]
    d_guests = tuple(there.outer(x, g) for x, g in sides)
    d_guests, sides, d_products = lax.optimization_barrier((d_guests, sides, d_products))
    lent = bring_home(d_guests, lane, own[-1].shape[0], axes)
    d_own = tuple(here.outer(x, g) for x, g in sides)
    d_rows = sum(
        where.product(part, w, transpose=True)
        for weights, where in ((own, here), (guests, there))
        for part, w in zip(d_products, weights[:-1], strict=True)
    )
    return d_rows, d_weight, _sum(d_own, lent), None, None


_flat.defvjp(_forward, _backward)


def send(own: tuple[Array, ...], lane: Int[Array, "n p"], axes: tuple[str, ...]) -> Float[Array, "lanes numbers"]:
    """Own weights [e, ...] each -> what the lanes bring here, [n * p, ...] each, packed for one all-to-all."""
    with jax.named_scope("moe/lanes"):
        picked = [w.at[lane.reshape(-1)].get(mode="clip") for w in own]
        return lax.all_to_all(_pack(picked), axes, 0, 0, tiled=True)


def unpack(packed: Float[Array, "lanes numbers"], like: tuple[Array, ...]) -> list[Array]:
    """The arrays that were packed, of the shapes of `like` but for the first dimension."""
    bounds = [sum(w[0].size for w in like[: i + 1]) for i in range(len(like) - 1)]
    with jax.named_scope("moe/lanes"):
        parts = jnp.split(packed, bounds, axis=1)
        return [part.reshape(-1, *w.shape[1:]) for part, w in zip(parts, like, strict=True)]


def bring_home(d_guests: tuple[Array, ...], lane: Int[Array, "n p"], num_own: int, axes: tuple[str, ...]) -> list[Array]:
    """The transpose of `send`: gradients of guests, to their owners, where those of one expert are added up in float32."""
    with jax.named_scope("moe/lanes"):
        wire = lax.all_to_all(_pack(d_guests), axes, 0, 0, tiled=True)
    home = unpack(wire, d_guests)
    with jax.named_scope("moe/lanes"):
        # A product with zeros and ones: a scatter that adds is slow, or not the same from run to run.
        mine = (jnp.arange(num_own)[:, None] == lane.reshape(-1)).astype(wire.dtype)
        add = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return [add("el,lab->eab", mine, part) for part in home]


def _sum(d_own, lent):
    return tuple((a.astype(b.dtype) + b).astype(a.dtype) for a, b in zip(d_own, lent, strict=True))


def _pack(weights):
    return jnp.concatenate([w.reshape(w.shape[0], -1) for w in weights], 1)


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of the own experts, or those of the guests. Attributes: scope; sizes of its groups; first row, None for 0."""

    scope: str
    sizes: Int[Array, "_"]
    first: Int[Array, ""] | None

    def product(self, x, w, *, transpose=False):
        """x @ w by group; zeros for rows of the other part."""
        with jax.named_scope(self.scope):
            return grouped_part(x, w, self.sizes, self.first, transpose=transpose)

    def outer(self, x, g):
        """The gradient of w."""
        with jax.named_scope(self.scope):
            return grouped_outer(x, g, self.sizes, first=self.first)


def _parts(own, sizes) -> tuple[_Part, _Part]:
    """(of the own experts, of the guests)."""
    e = own[-1].shape[0]
    first = sizes[:e].sum(dtype=sizes.dtype)
    return _Part("moe/own", sizes[:e], None), _Part("moe/guests", sizes[e:], first)
