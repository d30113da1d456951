"""RoutingContext: what one call of a layer says of its tokens and of how they are to be routed."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, Key

from moejax.placement import ExpertTable
from moejax.pytree import pytree

_PER_TOKEN = ("token_ids", "domain_ids", "expert_mask", "replay")


@pytree
class BatchCounts:
    """What a counting pass found of all micro-batches of one optimizer step.

    Attributes:
      tokens_per_expert: [E], as `RoutingStats.tokens_per_expert`, added up.
      num_tokens: valid tokens, added up.
      num_microbatches: int32, how many there are.
    """

    tokens_per_expert: Int[Array, "*layers E"]
    num_tokens: Int[Array, "*layers"]
    num_microbatches: Int[Array, "*layers"]


@pytree
class RoutingContext:
    """What one call says of its tokens. Everything may be left out.

    Attributes:
      key: a random key (`jax.random.key`), for routers that draw noise and for `MoEConfig.jitter`, in training. Numbers
        depend on it and on a token's place in the batch, not on the mesh. Give every layer and step another one.
      token_ids: [batch, seq] int32, which the router "hash" goes by.
      domain_ids: [batch, seq] int32, each token's domain, from 0, for the divergence loss.
      expert_mask: bool, [batch, seq, E] or what broadcasts to it: True where a token may go (VL-MoE, arXiv 2303.07226). For
        groups of tokens, index a mask [groups, E] by each token's group. A token that may go nowhere gets zeros.
      replay: [batch, seq, k] int32, what a call with `record` gave as `RoutingStats.expert`, to take in place of the router's
        choice, so that a recomputation routes alike; weights and losses are today's. -1: a choice that is not used.
      batch: for loss_scope "batch", the counts of all micro-batches of an optimizer step; None: this call has them all.
      placement: where experts are, of a layer with `MoEConfig.num_slots`: `ExpertPlacement.table()`. Layers have one of their
        own (a RouterState `placement`; in linen in the collection "router_state"), which this one comes before.
      train: False at evaluation: no noise, no jitter.
      num_domains: how many domains there are; with domain_ids.
      expert_budget: at evaluation, the whole batch uses at most this many experts: those of the largest summed scores over
        all tokens (XShare, arXiv 2602.07265). None: any number.
      record: the call's stats have `expert`.
      force_balance: route token i to experts i*k, i*k + 1 ... modulo E whatever the logits say: for benchmarks.
    """

    key: Key[Array, ""] | None = None
    token_ids: Int[Array, "b s"] | None = None
    domain_ids: Int[Array, "b s"] | None = None
    expert_mask: Bool[Array, "#b #s E"] | None = None
    replay: Int[Array, "b s k"] | None = None
    batch: BatchCounts | None = None
    placement: ExpertTable | None = None
    train: bool = dataclasses.field(default=True, metadata={"static": True})
    num_domains: int | None = dataclasses.field(default=None, metadata={"static": True})
    expert_budget: int | None = dataclasses.field(default=None, metadata={"static": True})
    record: bool = dataclasses.field(default=False, metadata={"static": True})
    force_balance: bool = dataclasses.field(default=False, metadata={"static": True})

    def check(self, batch_seq: tuple[int, ...], num_experts: int, top_k: int, choices: int) -> None:
        """Raises ValueError where it does not fit a layer of these sizes and an x of [batch, seq]."""
        shapes = {"token_ids": batch_seq, "domain_ids": batch_seq, "replay": (*batch_seq, choices)}
        for name, shape in shapes.items():
            given = getattr(self, name)
            if given is not None and (given.shape != shape or not jnp.issubdtype(given.dtype, jnp.integer)):
                raise ValueError(f"context.{name} of dtype {given.dtype} and shape {given.shape}: needs integers {shape}")
        mask, whole = self.expert_mask, (*batch_seq, num_experts)
        if mask is not None and (mask.dtype != bool or not _broadcasts(mask.shape, whole)):
            raise ValueError(
                f"context.expert_mask of dtype {mask.dtype} and shape {mask.shape}: needs bool, broadcast to {whole}"
            )
        if (self.domain_ids is None) != (self.num_domains is None):
            raise ValueError(f"context.num_domains={self.num_domains!r}: needs a number with domain_ids, and only then")
        budget = self.expert_budget
        if budget is not None and (type(budget) is not int or not top_k <= budget <= num_experts):
            raise ValueError(f"context.expert_budget={budget!r}: needs a whole number from top_k={top_k} to {num_experts}")

    def flat(self, split, batch_seq: tuple[int, ...], num_experts: int) -> "RoutingContext":
        """The same with each array of tokens passed through `split`: [batch, seq, ...] -> [T, ...]."""
        given = {name: getattr(self, name) for name in _PER_TOKEN if getattr(self, name) is not None}
        if "expert_mask" in given:
            given["expert_mask"] = jnp.broadcast_to(given["expert_mask"], (*batch_seq, num_experts))
        return dataclasses.replace(self, **{name: split(leaf) for name, leaf in given.items()})

    def specs(self, spec: P) -> "RoutingContext":
        """Where the leaves of a flat context live: those of tokens by `spec`, the key everywhere."""
        given = {name: spec for name in _PER_TOKEN if getattr(self, name) is not None}
        everywhere = {name: P() for name in ("key", "batch", "placement") if getattr(self, name) is not None}
        return dataclasses.replace(self, **everywhere, **given)

    def by_layer(self, num_layers: int) -> "dict[str, Array | BatchCounts]":
        """The fields that differ from layer to layer of a stack, [num_layers, ...]; a key becomes one for each layer."""
        given = {name: getattr(self, name) for name in ("replay", "batch", "placement") if getattr(self, name) is not None}
        return given if self.key is None else {**given, "key": jax.random.split(self.key, num_layers)}


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    near = whole[len(whole) - len(shape) :]
    return 0 < len(shape) <= len(whole) and all(size in (1, full) for size, full in zip(shape, near, strict=True))
