"""The line: what one shard does with its tokens. Per-shard code: it takes axis names, or none on one device.

x[t, d] - route -> Routing - plan -> who is dropped, where the others go - exchange -> through the experts - combine -> y[t, d]

Shape legend. t: tokens on this shard, k: experts per token, d: model width, E: experts in the layer, e: experts on this shard.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from moejax import axes as ax
from moejax.axes import ShardAxes
from moejax.config import CHUNKED, MoEConfig
from moejax.context import RoutingContext
from moejax.exchange import EXCHANGES, Wire
from moejax.exchange.choose import choose_exchange
from moejax.exchange.form import choose_form
from moejax.experts import LOGICAL_AXES, ApplyRows, GroupedExperts
from moejax.flat_plan import FlatPlan, place_flat, with_rest
from moejax.guests import WithGuests
from moejax.kernels.rows import weighed
from moejax.lending import Lending, axes_of, domain_of, lend, lent_config, loan_stats
from moejax.losses import entropy_loss, extra_losses, load_balance_loss, router_z_loss
from moejax.narrow import gather_narrow
from moejax.permute import unstack
from moejax.placement import ExpertTable, by_expert, choose_slots, tied
from moejax.plan import DispatchPlan, place_in_cells, rank_pairs
from moejax.pool import PoolPlan, make_pool_plan
from moejax.pytree import pytree
from moejax.rebalance import why_not
from moejax.receive import take_in
from moejax.ring_sum import sum_round
from moejax.route import route
from moejax.routing import Measured, PerSequence, Routing, Tokens
from moejax.stats import RoutingStats, straggler
from moejax.unlike_experts import UnlikeExperts, slot_of_expert

logger = logging.getLogger(__name__)
ApplyExpert = Callable[[Any, Array], Array]


@pytree
class LiftedExperts:
    """e experts of a user's kind, callable on their rows as `GroupedExperts` is.

    Attributes:
      weights: a pytree, each leaf with a leading axis [e].
      apply: (one expert's weights, rows [r, d]) -> rows [r, d].
    """

    weights: Any
    apply: ApplyExpert = dataclasses.field(metadata={"static": True})

    def __call__(self, rows: Float[Array, "e r d"], weight: Float[Array, "e r"] | None = None) -> Float[Array, "e r d"]:
        """[e, r, d] -> [e, r, d], times the weights; what comes of an empty row is never read.

        They work on padded cells only: there is no product of many experts at once for rows that stand flat.
        """
        return weighed(jax.vmap(self.apply)(self.weights, rows), weight)

    def apart(self) -> list[ApplyRows]:
        """Each expert as a function of its own rows and their weights: ([r, d], [r] or None) -> [r, d]."""
        one = lambda weights: lambda rows, weight=None: weighed(self.apply(weights, rows), weight)
        return [one(weights) for weights in unstack(self.weights)]


Experts: TypeAlias = GroupedExperts | LiftedExperts | UnlikeExperts | WithGuests


@dataclasses.dataclass(frozen=True)
class Line:
    """Route, plan, cross, combine.

    Attributes:
      cfg: the layer.
      axes: the mesh axes that its work is spread over.
      num_senders: on this shard.
      seq: tokens of a sequence.
      manual: mesh axes of a shard_map of the user's around this one.
      apply_expert: of a user's kind of experts, whose weights are params["experts"]; None: GroupedExperts.
    """

    cfg: MoEConfig
    axes: ShardAxes
    num_senders: int
    seq: int
    manual: frozenset[str]
    apply_expert: ApplyExpert | None = None

    def __call__(self, params: dict[str, Any], x, valid, state, context: RoutingContext):
        """Per shard: params by name, x [t, d], valid [t], the router's state, flat context.

        Returns:
          (y [t, d], RoutingStats, what is recorded of the routing [t, k] or None).
        """
        cfg, axes = self.cfg, self.axes
        x = jnp.where(valid[:, None], x, 0)
        with jax.named_scope("moe/route"):
            tokens = self.tokens(valid, context)
            routing = route(x, params["router"], state, cfg, tokens, params.get("router_noise"))
            name = self.exchange(x.shape[0])
            placed = self.placed(routing, tokens)
            lending = self.lending(placed, valid)
            plan = self.plan(placed, valid, name) if lending is None else self.lent_plan(placed, valid, name, lending)
        if context.placement is not None:
            tie = lambda weights: tied(weights, context.placement, axes.expert)
            params = {name: tie(leaf) if name.startswith("expert_") else leaf for name, leaf in params.items()}
        inside = ax.vary_over(x, axes.mlp).astype(cfg.dtype)
        plan = dataclasses.replace(plan, weight=ax.vary_over(plan.weight, axes.mlp))
        sums = self.sums_round(name)
        experts = self.experts(params, sums, lending)
        y, num_rows = EXCHANGES[self.rows_stand(name), name](inside, plan, experts, self.wire(name))
        if cfg.num_shared_experts:
            with jax.named_scope("moe/shared"):
                shared = _grouped(params, "shared", cfg, axes, sums)(inside[None])
                y = jax.tree.map(lambda routed, shared: routed + shared[0], y, shared)
        # Zeros already; the mask keeps a padded row's cotangent, whatever it is, out of all gradients.
        y = jax.tree.map(lambda part: jnp.where(valid[:, None], part, 0), y)
        y = sum_round(y, sums, ax.axis_size(axes.embed)) if sums else ax.sum_over(y, axes.mlp)
        stats = self.stats(routing, plan, tokens, num_rows)
        if lending is not None:
            stats = self.with_loans(stats, placed, valid, lending)
        return y.astype(x.dtype), stats, routing.record if context.record else None

    def sums_round(self, exchange: str) -> tuple[str, ...]:
        """The mlp axes, where outputs come in parts by columns, whose sums over these axes overlap; else they are one sum."""
        in_parts = self.cfg.overlap and exchange in CHUNKED and self.rows_stand(exchange) == "cell"
        return self.axes.mlp if in_parts and not self.shares_rows(exchange) else ()

    def shares_rows(self, exchange: str) -> bool:
        """Whether each of the mlp axes' shards, which have the same tokens, sends its share of their rows only."""
        return exchange == "hierarchical" and len(self.axes.expert) == 1

    def placed(self, routing: Routing, tokens: Tokens) -> Routing:
        """The routing by the places that experts have among the shards' weights: who has no place left goes nowhere."""
        cfg, table = self.cfg, tokens.context.placement
        routing = dataclasses.replace(routing, token=None)  # not by token, which plans go by
        if cfg.expert_sizes is not None:
            place = slot_of_expert(routing.expert, cfg.num_experts, len(cfg.expert_sizes), self.num_destinations)
            return dataclasses.replace(routing, expert=place)
        if table is None:
            return routing
        senders = self.num_senders, ax.axis_index(self.axes.tokens) * self.num_senders
        slot, served = choose_slots(routing.expert, routing.counted(tokens.valid), table, senders)
        used = served if routing.used is None else routing.used & served
        weight = jnp.where(used, routing.weight, 0)
        return dataclasses.replace(routing, expert=slot, used=used, weight=weight, places=cfg.num_places)

    def by_expert(self, counts, table: ExpertTable | None):
        """Counts by place [P] as counts by expert [E]."""
        cfg = self.cfg
        if table is not None:
            return by_expert(counts, table)
        if cfg.expert_sizes is None:
            return counts
        every = np.arange(cfg.num_experts)
        return counts[slot_of_expert(every, cfg.num_experts, len(cfg.expert_sizes), self.num_destinations)]

    @property
    def num_destinations(self) -> int:
        """Devices that the experts are divided over."""
        axes, cfg = self.axes.expert, self.cfg
        return ax.axis_size(axes) if axes or cfg.capacity != "pool" else cfg.num_destinations or 1

    def experts(self, params, sums: tuple[str, ...], lending: Lending | None) -> Experts:
        """This shard's experts, ready for their rows, and those lent to it."""
        if self.cfg.expert_sizes is not None:
            groups = range(len(self.cfg.expert_sizes))
            return UnlikeExperts(tuple(_grouped(params, f"expert_{g}", self.cfg, self.axes, sums) for g in groups))
        if self.apply_expert is not None:
            return LiftedExperts(ax.vary_over(params["experts"], self.axes.tokens), self.apply_expert)
        own, rule = _grouped(params, "expert", self.cfg, self.axes, sums), self.cfg.rebalance
        if lending is None or rule is None:
            return own
        return lending.experts(own, self.axes.expert, axes_of(rule, self.axes.expert))

    def exchange(self, num_tokens: int) -> str:
        """The name of the exchange; `auto` is resolved here and says why in the log."""
        cfg = self.cfg
        if num_tokens % cfg.num_chunks:
            legal = [n for n in range(1, num_tokens + 1) if num_tokens % n == 0]
            raise ValueError(
                f"num_chunks={cfg.num_chunks} does not divide the {num_tokens} tokens of a shard: "
                f"legal are {', '.join(map(str, legal))}"
            )
        if cfg.exchange != "auto":
            return cfg.exchange
        lifted = self.apply_expert is not None
        choice = choose_exchange(cfg, num_tokens, self.num_senders, ax.axis_size(self.axes.expert), lifted=lifted)
        logger.info("%s", choice)
        return choice.name

    def wire(self, exchange: str) -> Wire:
        """How the exchange of that name is to cross."""
        cfg, axes = self.cfg, self.axes.expert
        form = choose_form(cfg, self.rows_stand(exchange), exchange, ax.platform(), cfg.num_places // ax.axis_size(axes))
        parts = cfg.codecs, cfg.num_chunks, self.axes.tokens, form.weigh_at, form.exchange_by
        return Wire(axes, *parts, shared=self.axes.mlp if self.shares_rows(exchange) else ())

    def rows_stand(self, exchange: str) -> str:
        """How rows stand for the exchange: in padded cells, "flat", one after another, or in pools.

        Flat rows are as many as there are pairs, so whatever can drops nothing that way; experts of a user's kind take cells.
        """
        cfg = self.cfg
        if cfg.capacity == "pool" or self.apply_expert is not None:
            return cfg.capacity
        own_work = not self.axes.expert or exchange in ("all_gather", "weight_stream")
        return "flat" if exchange == "ragged" or (own_work and cfg.capacity_factor is None) else "cell"

    def plan(self, routing, valid, exchange: str) -> DispatchPlan | FlatPlan | PoolPlan:
        """Who is dropped and where the others go; a PoolPlan has a leading axis of senders."""
        cfg, tokens = self.cfg, valid.shape[0] // self.num_senders
        if cfg.capacity == "pool":
            rule = cfg.pool_rule(tokens, ax.axis_size(self.axes.expert) if self.axes.expert else None)
            split = lambda leaf: leaf.reshape(self.num_senders, tokens, *leaf.shape[1:])
            return jax.vmap(functools.partial(make_pool_plan, rule=rule))(jax.tree.map(split, routing), split(valid))
        return self.cell_plan(routing, valid, exchange)

    def lending(self, routing, valid) -> Lending | None:
        """The experts lent in this step; None where none are, which the log explains if the config asks for it."""
        cfg, axes = self.cfg, self.axes
        if cfg.rebalance is None:
            return None
        domain = domain_of(cfg, axes.expert)
        rows = valid.shape[0] // (1 if axes.expert else self.num_senders) * cfg.top_k
        reason = why_not(cfg.rebalance, domain.size, domain.group_size, rows, ax.platform())
        if reason is not None:
            logger.info("rebalance left out: %s", reason)
            return None
        return lend(routing, valid, self.num_senders, domain, cfg.rebalance, axes.expert)

    def lent_plan(self, routing, valid, exchange: str, lending: Lending) -> DispatchPlan | FlatPlan | PoolPlan:
        """The plan of rows to seats; `routed` counts by expert all the same."""
        line = dataclasses.replace(self, cfg=lent_config(self.cfg, lending.domain))
        return dataclasses.replace(line.plan(lending.routing(routing), valid, exchange), routed=lending.counts)

    def cell_plan(self, routing, valid, exchange: str) -> DispatchPlan | FlatPlan:
        """The plan where capacity is per (sender, expert)."""
        cfg, tokens, shards = self.cfg, valid.shape[0] // self.num_senders, ax.axis_size(self.axes.expert)
        ranks = rank_pairs(routing, valid, self.num_senders, cfg.drop_by)
        kept = jnp.minimum(ranks.count, cfg.cell_rows(tokens))
        stays = cfg.overflow == "fallback"
        sharing = (self.num_senders, shards) if self.axes.expert else (1, cfg.num_destinations or 1)
        rule = cfg.receive_rule(tokens, *sharing)
        if stays and (exchange != "ragged" or not self.axes.expert):
            rule = None  # they have room for everything
        taken = kept if rule is None else take_in(kept, rule, self.axes.expert)
        if self.rows_stand(exchange) == "cell":
            return place_in_cells(ranks, routing.weight, kept, taken, cfg.cell_rows(tokens))
        plan = place_flat(ranks, routing.weight, kept, taken, cfg.flat_bounds(tokens, self.num_senders, shards, rule))
        return with_rest(plan, ranks, routing.weight, kept, taken) if rule and stays else plan

    def stats(self, routing, plan, tokens: Tokens, num_rows) -> RoutingStats:
        cfg, axes, valid = self.cfg, self.axes, tokens.valid
        batch = tokens.context.batch if cfg.loss_scope == "batch" else None
        by = {"scope": cfg.loss_scope, "axes": axes.tokens, "sequence": self.sequences(valid.shape[0]), "batch": batch}
        total = lambda counts: counts.reshape(-1, cfg.num_places).sum(0)
        served, table = total(plan.routed), tokens.context.placement
        asked = self.by_expert(served, table)
        lost = 0 if table is None else jnp.where(table.count > 0, 0, _asked(routing, valid))
        counts = asked + lost, served.sum(), plan.kept.sum(), num_rows, valid.sum()
        routed, served, kept, worked, num_tokens = ax.sum_over(counts, axes.tokens)
        return RoutingStats(
            aux_loss=load_balance_loss(routing, valid, **by),
            z_loss=router_z_loss(routing, valid, axes.tokens, batch),
            tokens_per_expert=routed,
            num_tokens=num_tokens,
            num_assignments=routed.sum(),
            num_dropped=routed.sum() - worked,
            num_dropped_at_receiver=kept - worked,
            num_missing=routed.sum() - served,
            token_straggler=straggler(num_rows, axes.tokens),
            entropy=entropy_loss(lax.stop_gradient(routing), valid, axes.tokens),
            extra=extra_losses(routing, tokens, [name for name, _ in cfg.extra_losses], cfg.expert_sizes),
            measured=self.measured(routing, tokens),
        )

    def with_loans(self, stats: RoutingStats, placed: Routing, valid, lending: Lending) -> RoutingStats:
        """With what was lent; pairs of experts without a place are dropped either way."""
        lent = loan_stats(placed, valid, self.num_senders, lending, self.cfg, self.axes)
        lent = dataclasses.replace(lent, num_dropped_before=lent.num_dropped_before + stats.num_missing)
        return dataclasses.replace(stats, rebalance=lent)

    def measured(self, routing: Routing, tokens: Tokens) -> dict[str, Array]:
        """The router's own figures, over all shards."""
        rule = self.cfg.router_rule
        sums = rule.measure(lax.stop_gradient(routing), tokens) if isinstance(rule, Measured) else {}
        return {name: total / jnp.maximum(count, 1) for name, (total, count) in ax.sum_over(sums, tokens.axes).items()}

    def tokens(self, valid, context: RoutingContext) -> Tokens:
        """What the router may know of this shard's tokens."""
        t, rule = valid.shape[0], self.cfg.router_rule
        inner = tuple(name for name in self.axes.tokens if name not in self.manual)
        if isinstance(rule, PerSequence) and ax.axis_size(inner) > 1 and t % self.seq:
            raise ValueError(
                f"router={rule!r}: needs whole sequences on a shard, {t} tokens each are not sequences of {self.seq}; "
                f"legal is a batch that {ax.axis_size(inner)} token shards divide"
            )
        position = (self.sequences(t)[0] * self.seq + (ax.axis_index(inner) * t + jnp.arange(t)) % self.seq).astype(jnp.int32)
        return Tokens(valid, position, context, axes=self.axes.tokens, seq=self.seq)

    def sequences(self, t: int) -> tuple[Array, int]:
        """Each token's sequence over all shards [t], and how many there are: padding ends each manual shard's own."""
        outer = tuple(name for name in self.axes.tokens if name in self.manual)
        inner = tuple(name for name in self.axes.tokens if name not in self.manual)
        count = -(-t * ax.axis_size(inner) // self.seq)
        position = ax.axis_index(inner) * t + jnp.arange(t)
        return ax.axis_index(outer) * count + position // self.seq, count * ax.axis_size(outer)


def _grouped(params: dict[str, Any], prefix: str, cfg: MoEConfig, axes: ShardAxes, sums: tuple[str, ...]) -> GroupedExperts:
    """This shard's experts, whole in width d and in the compute dtype; under `overlap` as they are, to go round a ring.

    Marked as varying over the token axes before the cast, so that gradients are summed over them in param_dtype; so they are
    over the embed axes.
    """
    ring = axes.embed if cfg.overlap else ()

    def ready(name):
        weights = ax.vary_over(params[f"{prefix}_{name}"], axes.tokens)
        return weights if ring else gather_narrow(weights, cfg.dtype, axes.embed, LOGICAL_AXES[name].index("embed"))

    named = {name: ready(name) for name in LOGICAL_AXES if f"{prefix}_{name}" in params}
    return GroupedExperts(activation=cfg.activation, ring=ring, sums=sums, **{"gate": None, **named})


def _asked(routing: Routing, valid):
    """[E] pairs that chose each expert."""
    experts = jnp.arange(routing.logits.shape[-1])
    return ((routing.expert[:, :, None] == experts) & routing.counted(valid)[:, :, None]).sum((0, 1), dtype=jnp.int32)
