"""Cutting pools into parts, so that one part can cross while another one's experts work. Who is dropped is not touched.

Part p of P takes the pool rows p, p + P, p + 2P ... with all their levels. So a token's pairs on a destination stay
together and their sum still returns as one row; the rows that have a level j, a prefix of a pool, are a prefix of each
part, which is thus a pool itself; and since rows of many levels come first, parts are alike in rows and in work.

Letters as in `moejax.pool`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from moejax.pool import PoolPlan, RowPlan, keep_first, make_row_plan, starts


@dataclasses.dataclass(frozen=True)
class PoolCut:
    """Attributes: caps, rows per level of a pool; num_parts, at most caps[0]."""

    caps: tuple[int, ...]
    num_parts: int

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The caps of each part, without the levels that none of its rows has."""
        rows = [[len(range(part, cap, self.num_parts)) for cap in self.caps] for part in range(self.num_parts)]
        return tuple(tuple(filter(None, part)) for part in rows)

    @property
    def pair_order(self) -> np.ndarray:
        """[L] which of a pool's pairs, as `PoolPlan` orders them, stand at each place when ordered part by part."""
        levels = [start + np.arange(cap) for start, cap in zip(starts(self.caps), self.caps, strict=True)]
        return np.concatenate([level[part :: self.num_parts] for part in range(self.num_parts) for level in levels])

    def split_rows(self, sent: Array, num_destinations: int) -> list[Array]:
        """The rows of the send buffer [n*M, d] of `order_plan`, a part each: [n, M_p, d]."""
        bounds = np.cumsum([num_destinations * part[0] for part in self.parts])[:-1]
        return [part.reshape(num_destinations, -1, sent.shape[1]) for part in jnp.split(sent, bounds)]

    def split_pairs(self, pairs: Array) -> list[Array]:
        """The pairs [S, L] that arrived, a part each."""
        return jnp.split(pairs, np.cumsum([sum(part) for part in self.parts])[:-1], axis=1)


def order_plan(plan: PoolPlan, cut: PoolCut) -> PoolPlan:
    """The plan with the send buffer's rows by part, then destination, and each pool's pairs by part."""
    if cut.num_parts == 1:
        return plan
    n, num, depth, order = plan.local_expert.shape[0], cut.num_parts, cut.caps[0], cut.pair_order
    (dest, rank), width = jnp.divmod(plan.slot, depth), order.size
    part = rank % num
    first = n * (part * (depth // num) + jnp.minimum(part, depth % num))
    slot = first + dest * ((depth - 1 - part) // num + 1) + rank // num
    cell = plan.cell // width * width + jnp.asarray(np.argsort(order), jnp.int32)[plan.cell % width]
    token = plan.token.reshape(n, depth)
    return dataclasses.replace(
        plan,
        slot=jnp.where(plan.slot < n * depth, slot, n * depth),
        token=jnp.concatenate([token[:, p::num].reshape(-1) for p in range(num)]),
        cell=jnp.where(plan.cell < n * width, cell, n * width),
        pair=plan.pair.reshape(n, width)[:, order].reshape(-1),
        local_expert=plan.local_expert[:, order],
    )


def make_row_plans(local_expert: Int[Array, "S L"], cut: PoolCut, *, num_experts: int, max_rows: int | None) -> list[RowPlan]:
    """What a destination does with each part. The bound on its rows is one of all parts together.

    Args:
      local_expert: [S, L] the expert of each received pair, by part; num_experts where empty.
      cut: how the pools were cut.
      num_experts: e, of this destination.
      max_rows: how many pairs the destination works on at most; None: as many as come.
    """
    if max_rows is not None and cut.num_parts == 1:
        local_expert = keep_first(local_expert, num_experts, max_rows)
    elif max_rows is not None:
        order = cut.pair_order
        local_expert = keep_first(local_expert[:, np.argsort(order)], num_experts, max_rows)[:, order]
    parts = zip(cut.split_pairs(local_expert), cut.parts, strict=True)
    return [make_row_plan(part, num_experts=num_experts, caps=caps, max_rows=max_rows) for part, caps in parts]
