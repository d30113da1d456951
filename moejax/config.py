"""MoEConfig: the frozen facts of one mixture-of-experts layer. Impossible ones are refused here, before any device work."""

import dataclasses
import math
import sys
from typing import TypeGuard

from moejax.checks import float_dtype, one_of, positive, true_or_false
from moejax.codec import CODECS
from moejax.flat_plan import Bounds
from moejax.pool import PoolRule, level_caps, level_loads
from moejax.rebalance import RebalanceConfig
from moejax.receive import ReceiveRule
from moejax.router import ROUTERS
from moejax.routing import Draws, ExpertsChoose, Limited, Router, TwoMatrices

ACTIVATIONS = ("swiglu", "geglu", "gelu", "relu2")
LOSS_SCOPES = ("sequence", "shard", "microbatch", "batch")
EXTRA_LOSSES = ("importance", "load", "entropy", "divergence", "group")
EXCHANGES = ("all_to_all", "ragged", "hierarchical", "all_gather", "weight_stream", "auto")
CHUNKED = ("all_to_all", "hierarchical")
WEIGH_AT = ("auto", "token", "expert")
EXCHANGE_BY = ("auto", "device", "expert")
CAPACITIES = ("cell", "pool")
DROP_RULES = ("position", "weight")
OVERFLOWS = ("drop", "fallback")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer: sizes, router, capacity rule, exchange and losses.

    Which tokens are dropped is part of the model: (capacity, capacity_factor, drop_by, number of senders) decides it,
    never the exchange. A *sender* is one block of consecutive tokens with its own capacity; by default the mesh's token
    shards are the senders. Set `num_senders` to make the answer the same on every mesh whose token shards divide it.

    Args:
      d_model: width of a token.
      d_ff: hidden width of one expert.
      num_experts: experts in the layer, over all devices.
      top_k: experts a token goes to, at most num_experts.
      router: a name from `moejax.router.ROUTERS` or a router object such as `Softmax(renormalise=False)`.
      capacity_factor: each (sender, expert) takes ceil(capacity_factor * tokens * top_k / num_experts) tokens and drops
        the rest; None drops nothing (cells as long as the sender's tokens).
      capacity: "cell", a capacity per (sender, expert), or "pool", one per (sender, destination device), where each token
        travels once per destination (see `moejax.pool`) and the destination's work has a bound of its own:
        ceil(capacity_factor * tokens * top_k) rows.
      drop_by: "position" keeps the sender's earliest tokens, "weight" those with the largest routing weight.
      num_senders: how many senders share the batch, a multiple of the mesh's token shards; None: one per token shard.
      num_destinations: for pools and `receive_factor`, devices that the experts are divided over; None: the mesh's expert
        shards. A reference without expert axes sets it to drop the tokens that a mesh with that many would drop.
      level_loads: for pools, the expected share of a sender's tokens by level on one destination (see
        `moejax.pool.measured_level_loads`); None: that of uniform routing.
      receive_factor: for cells, a device's experts take ceil(receive_factor * tokens * top_k) rows at most (tokens of one
        sender), at least 1.0, what even load needs; the largest cells are cut first (`moejax.receive`). None: all rows that
        come, for which "ragged" keeps room.
      overflow: what exceeds that is lost, "drop", or, "fallback", nothing is: with "ragged" the rows above it then stay, and
        the weights come to them (as in "weight_stream"); other exchanges have room for all rows anyway.
      exchange: how rows cross the expert axis: "all_to_all"; for cells also "ragged" (true rows only, no padding),
        "hierarchical" (over two expert axes, slow and fast; or over one, each shard of the mlp axes, which hold the same
        tokens, sending its share of them), "all_gather" or "weight_stream" (tokens stay, weights go round);
        "auto" takes the one that moves the fewest bytes (`moejax.exchange.choose_exchange`). All give one answer.
      codec: how they travel, "plain", "bf16", "int8" or "fp8" (see `moejax.codec` for their errors), or a pair
        (forward, backward).
      num_chunks: cells ("all_to_all", "hierarchical") and pools cross in this many parts of their rows, so that the
        experts of one part can work while the next one crosses; divides the tokens of a shard.
      overlap: over embed (FSDP) axes each shard's part of the expert weights goes round a ring while others are
        multiplied, and their gradients come home so, in place of an all-gather before and a reduce-scatter after
        (`moejax.overlapped`). Over mlp (tensor) axes the outputs of "all_to_all" and "hierarchical" cells, and of the shared
        experts, are made and sent in parts by columns, and the partial sums go round meanwhile, in place of an
        all-reduce; other exchanges, "hierarchical" over one expert axis, and the backward keep that. Without such axes the
        products are the plain ones. It never changes the answer. Not for "weight_stream" and overflow "fallback", which
        send weights round already.
      activation: "swiglu" and "geglu" (gated), "gelu", "relu2" (squared ReLU, ungated).
      expert_sizes: hidden widths of unlike experts (MoHGE, arXiv 2604.23108), in place of d_ff: the experts in order, in as
        many equal groups. Every expert shard holds as many of each width as the others, so parameters and, at even load,
        FLOPs are equal. Goes with router `TwoLevel` and the extra loss "group". None: all have width d_ff.
      num_slots: slots for experts and their replicas, at least num_experts, which a placement fills: see `moejax.placement`.
        Capacities are then per (sender, slot), with num_slots in place of num_experts. None: each expert has one, in order.
      num_shared_experts: experts of width d_ff that every token goes through, besides the routed ones.
      aux_loss: weight of the load-balance loss in `RoutingStats.loss`.
      z_loss: weight of the router z-loss there.
      extra_losses: pairs of a name and a weight in that sum: "importance", "load" (of router "noisy"), "entropy",
        "divergence" (of domains; needs `RoutingContext.domain_ids`) or "group" (of `expert_sizes`); see `moejax.losses`.
      jitter: in training the router's inputs are multiplied by uniform numbers within this of 1, below 1 (Switch Transformer:
        1e-2); needs `RoutingContext.key`.
      loss_scope: what the load-balance loss counts over: "sequence", "shard" (one mesh shard's tokens), "microbatch" (all
        shards' tokens of one call), or "batch": all micro-batches of an optimizer step, which `moejax.step` counts in a pass of
        its own before the gradients' (see `RoutingContext.batch`); the z-loss is then a mean over their tokens too.
      dtype: dtype of the expert products.
      param_dtype: dtype that parameters are kept in. The router computes in float32 whatever it is.
      rebalance: experts lent within a step, to even out what devices work on (`RebalanceConfig`); for pools, whose drops it
        lowers too, and for "ragged" with nothing dropped. None: they stay where they live.

    Raises:
      ValueError: for an impossible value, naming it and the legal ones.
    """

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    router: str | Router = "softmax"
    capacity_factor: float | None = 1.25
    capacity: str = "cell"
    drop_by: str = "position"
    num_senders: int | None = None
    num_destinations: int | None = None
    level_loads: tuple[float, ...] | None = None
    receive_factor: float | None = None
    overflow: str = "drop"
    exchange: str = "all_to_all"
    codec: str | tuple[str, str] = "plain"
    num_chunks: int = 1
    overlap: bool = False
    weigh_at: str = "auto"
    exchange_by: str = "auto"
    activation: str = "swiglu"
    expert_sizes: tuple[int, ...] | None = None
    num_slots: int | None = None
    num_shared_experts: int = 0
    aux_loss: float = 1e-2
    z_loss: float = 1e-3
    extra_losses: tuple[tuple[str, float], ...] = ()
    jitter: float = 0.0
    loss_scope: str = "microbatch"
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    rebalance: RebalanceConfig | None = None

    def __post_init__(self):
        for field in ("d_model", "d_ff", "num_experts", "top_k"):
            positive(field, getattr(self, field))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}: needs 1 to {self.num_experts}")
        _check_capacity_factor(self.capacity_factor)
        for field in ("num_senders", "num_destinations"):
            if getattr(self, field) is not None:
                positive(field, getattr(self, field))
        if type(self.num_shared_experts) is not int or self.num_shared_experts < 0:
            raise ValueError(f"num_shared_experts={self.num_shared_experts!r}: needs a whole number of at least 0")
        if isinstance(self.router, str):
            one_of("router", self.router, ROUTERS)
        elif isinstance(self.router, type) or not isinstance(self.router, Router):
            raise ValueError(f"router={self.router!r}: needs one of {', '.join(ROUTERS)}, or a Router object")
        if isinstance(rule := self.router_rule, Limited):
            rule.check(self.num_experts, self.top_k)
        one_of("capacity", self.capacity, CAPACITIES)
        one_of("drop_by", self.drop_by, DROP_RULES)
        one_of("exchange", self.exchange, EXCHANGES)
        self._check_pool()
        self._check_receive()
        for name in self.codecs:
            one_of("codec", name, CODECS)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("loss_scope", self.loss_scope, LOSS_SCOPES)
        float_dtype("dtype", self.dtype)
        float_dtype("param_dtype", self.param_dtype)
        for field in ("aux_loss", "z_loss"):
            if not _is_number(weight := getattr(self, field)) or not 0 <= weight < math.inf:
                raise ValueError(f"{field}={weight!r}: needs a finite weight of at least 0")
        self._check_extra_losses()
        if not _is_number(self.jitter) or not 0 <= self.jitter < 1:
            raise ValueError(f"jitter={self.jitter!r}: needs a number of at least 0 and below 1")
        if self.exchange == "weight_stream" and self.codecs != ("plain", "plain"):
            raise ValueError(f"codec={self.codec!r}: exchange='weight_stream' sends no rows; legal is 'plain'")
        self._check_overlap()
        self._check_sizes()
        self._check_slots()
        positive("num_chunks", self.num_chunks)
        if self.num_chunks > 1 and self.exchange not in CHUNKED and self.capacity != "pool":
            raise ValueError(
                f"num_chunks={self.num_chunks}: exchange={self.exchange!r} crosses whole; "
                f"legal is 1, or one of {', '.join(map(repr, CHUNKED))}, or capacity='pool'"
            )
        self._check_form()
        self._check_rebalance()

    def _check_extra_losses(self):
        pairs = self.extra_losses
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"extra_losses={pairs!r}: needs a tuple of pairs (name, weight)")
        for name, weight in pairs:
            one_of("extra_losses", name, EXTRA_LOSSES)
            if not _is_number(weight) or not 0 <= weight < math.inf:
                raise ValueError(f"extra_losses: weight {weight!r} of {name!r}: needs a finite weight of at least 0")
            if name == "group" and self.expert_sizes is None:
                raise ValueError("extra_losses: 'group' with expert_sizes=None: it is a loss of unlike experts")
            if name == "load" and not isinstance(self.router_rule, TwoMatrices):
                raise ValueError(f"extra_losses: 'load' with router={self.router!r}: it is a loss of router 'noisy'")
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"extra_losses={pairs!r}: each name at most once")

    def _check_form(self):
        one_of("weigh_at", self.weigh_at, WEIGH_AT)
        one_of("exchange_by", self.exchange_by, EXCHANGE_BY)
        if self.exchange_by == "expert" and self.num_chunks > 1:
            raise ValueError(f"num_chunks={self.num_chunks}: exchange_by='expert' crosses in parts already; legal is 1")
        if self.capacity == "pool":
            one_of("weigh_at of pools", self.weigh_at, ("auto", "expert"))
        elif self.exchange not in CHUNKED:
            one_of(f"weigh_at of exchange={self.exchange!r}", self.weigh_at, ("auto", "token"))
        if self.capacity == "pool" or self.exchange not in CHUNKED:
            one_of(
                f"exchange_by of capacity={self.capacity!r}, exchange={self.exchange!r}", self.exchange_by, ("auto", "device")
            )

    def _check_pool(self):
        if self.capacity == "pool":
            one_of("exchange of pools", self.exchange, ("all_to_all", "auto"))
        if self.capacity == "cell" and self.level_loads is not None:
            raise ValueError(f"level_loads={self.level_loads!r}: needs capacity='pool', not {self.capacity!r}")
        if self.capacity == "cell" and self.receive_factor is None and self.num_destinations is not None:
            raise ValueError(
                f"num_destinations={self.num_destinations!r}: needs capacity='pool', not 'cell', or receive_factor"
            )
        loads = self.level_loads
        if loads is None:
            return
        numbers = isinstance(loads, tuple) and loads and all(_is_number(load) and 0 < load <= 1 for load in loads)
        if not numbers or list(loads) != sorted(loads, reverse=True):
            raise ValueError(f"level_loads={loads!r}: needs a tuple of shares above 0 and at most 1 that do not increase")

    def _check_receive(self):
        one_of("overflow", self.overflow, OVERFLOWS)
        factor = self.receive_factor
        if factor is None and self.overflow != "drop":
            raise ValueError(f"overflow={self.overflow!r}: without receive_factor nothing overflows; legal is 'drop'")
        if factor is None:
            return
        if self.capacity != "cell":
            raise ValueError(f"receive_factor={factor!r}: needs capacity='cell', not {self.capacity!r}, which has a bound")
        if not _is_number(factor) or not 1 <= factor <= sys.float_info.max:
            raise ValueError(f"receive_factor={factor!r}: needs a finite number of at least 1.0, what even load needs, or None")

    def _check_sizes(self):
        sizes = self.expert_sizes
        if sizes is None:
            return
        if not isinstance(sizes, tuple) or not sizes:
            raise ValueError(f"expert_sizes={sizes!r}: needs a tuple of hidden widths, one for each group of experts, or None")
        for size in sizes:
            positive("expert_sizes", size)
        if self.num_experts % len(sizes):
            legal = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"expert_sizes of {len(sizes)} groups do not divide num_experts={self.num_experts}: "
                f"legal are {', '.join(map(str, legal))}"
            )
        groups = getattr(self.router_rule, "num_groups", len(sizes))
        if groups != len(sizes):
            raise ValueError(f"expert_sizes={sizes!r}: the router has num_groups={groups}; needs as many as sizes")
        if self.receive_factor is not None:
            raise ValueError(f"receive_factor={self.receive_factor!r}: with expert_sizes only None is legal")

    def _check_slots(self):
        if self.num_slots is None:
            return
        positive("num_slots", self.num_slots)
        if self.num_slots < self.num_experts:
            raise ValueError(f"num_slots={self.num_slots}: needs num_experts={self.num_experts} at least, or None")
        if self.expert_sizes is not None:
            raise ValueError(f"num_slots={self.num_slots}: slots are alike; with expert_sizes only None is legal")

    def _check_rebalance(self):
        if self.rebalance is None:
            return
        if not isinstance(self.rebalance, RebalanceConfig):
            raise ValueError(f"rebalance={self.rebalance!r}: needs a RebalanceConfig, or None")
        if self.capacity != "pool" and (self.exchange != "ragged" or self.capacity_factor or self.receive_factor):
            raise ValueError(
                f"rebalance with capacity='cell', capacity_factor={self.capacity_factor!r}, receive_factor="
                f"{self.receive_factor!r}, exchange={self.exchange!r}: moving an expert lowers neither the drops nor the work "
                f"of (sender, expert) cells; legal are capacity='pool', or exchange='ragged' with both factors None"
            )
        if self.expert_sizes is not None:
            raise ValueError(f"expert_sizes={self.expert_sizes!r}: with rebalance experts are alike; legal is None")
        if isinstance(self.router_rule, ExpertsChoose):
            raise ValueError(f"router={self.router!r}: even loads leave nothing to lend; legal is rebalance=None")
        if self.num_chunks > 1:
            raise ValueError(
                f"num_chunks={self.num_chunks}: with rebalance the lent weights cross beside whole rows; legal is 1"
            )
        if self.overlap:
            raise ValueError("overlap=True: with rebalance weights are lent whole, not in parts of a ring; legal is False")

    def _check_overlap(self):
        true_or_false("overlap", self.overlap)
        if self.overlap and (self.exchange == "weight_stream" or self.overflow == "fallback"):
            raise ValueError(
                f"overlap=True: exchange={self.exchange!r} with overflow={self.overflow!r} sends the weights themselves "
                f"round; legal is False, or another exchange and overflow='drop'"
            )

    @property
    def codecs(self) -> tuple[str, str]:
        """The codec names, (forward, backward)."""
        if isinstance(self.codec, str):
            return self.codec, self.codec
        if not isinstance(self.codec, tuple) or len(self.codec) != 2:
            raise ValueError(f"codec={self.codec!r}: needs a name or a pair (forward, backward)")
        return self.codec

    @property
    def router_rule(self) -> Router:
        """The router object that `router` names."""
        return ROUTERS[self.router]() if isinstance(self.router, str) else self.router

    @property
    def expert_groups(self) -> tuple[tuple[int, int, int], ...]:
        """(number, d_model, hidden width) of the experts, or slots, of each width."""
        sizes = self.expert_sizes or (self.d_ff,)
        return tuple((self.num_places // len(sizes), self.d_model, size) for size in sizes)

    @property
    def num_places(self) -> int:
        """Experts that the weights have room for, replicas included."""
        return self.num_slots or self.num_experts

    @property
    def choices(self) -> int:
        """k of the layer's Routing: experts that one token may have; top_k, or more where experts choose."""
        rule = self.router_rule
        return rule.most_choices(self.num_experts, self.top_k) if isinstance(rule, ExpertsChoose) else self.top_k

    @property
    def draws(self) -> bool:
        """Whether the layer needs random numbers in training."""
        return self.jitter > 0 or isinstance(self.router_rule, Draws)

    def cell_rows(self, num_tokens: int) -> int:
        """Rows of one (sender, expert) cell for a sender of `num_tokens` tokens."""
        if self.capacity_factor is None:
            return num_tokens
        pairs = self.capacity_factor * num_tokens * self.top_k
        return num_tokens if pairs >= num_tokens * self.num_places else max(1, math.ceil(pairs / self.num_places))

    def receive_rule(self, num_tokens: int, num_senders: int, num_destinations: int) -> ReceiveRule | None:
        """What a destination takes, where a shard has `num_senders` senders of `num_tokens` tokens; None: all that can come."""
        if self.receive_factor is None:
            return None
        rows = self.receive_factor * num_senders * num_tokens * self.top_k
        full = rows >= num_destinations * num_senders * self.pair_rows(num_tokens, num_destinations)
        return None if full else ReceiveRule(math.ceil(rows), num_destinations)

    def pair_rows(self, num_tokens: int, num_destinations: int) -> int:
        """Rows that a sender of `num_tokens` tokens has for one of the destinations at most."""
        e = self.num_places // num_destinations
        return min(num_tokens * min(self.choices, e), e * self.cell_rows(num_tokens))

    def flat_bounds(self, num_tokens: int, num_senders: int, num_destinations: int, rule: ReceiveRule | None) -> Bounds:
        """Rows without padding at most, of a shard with `num_senders` senders of `num_tokens` tokens each, under the rule."""
        pair = num_senders * self.pair_rows(num_tokens, num_destinations)
        received = num_destinations * pair if rule is None else rule.room
        return Bounds(min(num_senders * num_tokens * self.top_k, num_destinations * pair), pair, received)

    def seated(self, num_seats: int, level_loads: tuple[float, ...]) -> "MoEConfig":
        """The layer whose plan knows seats in place of experts (`moejax.lending`).

        Args:
          num_seats: of all devices together.
          level_loads: for pools, where the config states none.
        """
        loads = (self.level_loads or level_loads) if self.capacity == "pool" else None
        return dataclasses.replace(
            self,
            num_experts=num_seats,
            num_slots=None,
            level_loads=loads,
            rebalance=None,
            router="softmax",
            extra_losses=(),
        )

    def pool_rule(self, num_tokens: int, num_destinations: int | None) -> PoolRule:
        """The capacities of pools for a sender of `num_tokens` tokens.

        Args:
          num_tokens: t, of one sender.
          num_destinations: the mesh's expert shards; None without expert axes.
        """
        n = num_destinations or self.num_destinations or 1
        loads = self.level_loads or level_loads(self.num_places, n, self.top_k)
        depth = min(self.choices, self.num_places // n)
        if self.level_loads is None:  # where experts choose: levels past top_k are no fuller than the last one
            loads += (loads[-1],) * (depth - len(loads))
        if len(loads) != depth:
            raise ValueError(f"level_loads={loads!r}: needs {depth} shares, one per level on one of {n} destinations")
        factor = self.capacity_factor
        most = n * num_tokens * depth  # every sender's every token with all its levels here
        rows = math.inf if factor is None else factor * num_tokens * self.top_k
        max_rows = None if rows >= most else math.ceil(rows)
        return PoolRule(level_caps(num_tokens, loads, factor), max_rows, n, self.drop_by)


def _check_capacity_factor(factor: object) -> None:
    if factor is None:
        return
    if not _is_number(factor) or not 0 < factor <= sys.float_info.max:
        raise ValueError(f"capacity_factor={factor!r}: needs a finite number above 0, or None to drop nothing")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
