"""Router losses: pure functions of a Routing's arrays, returned in the stats, never kept anywhere.

t: tokens on this shard, E: experts, G: groups that a loss counts over.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from moejax.axes import sum_over
from moejax.context import BatchCounts
from moejax.routing import Routing, Tokens


def load_balance_loss(
    routing: Routing,
    valid: Bool[Array, "t"],
    *,
    scope: str = "microbatch",
    axes: tuple[str, ...] = (),
    sequence: tuple[Int[Array, "t"], int] | None = None,
    batch: BatchCounts | None = None,
) -> Float[Array, ""]:
    """E * sum_e f_e * P_e (Switch Transformer, eq. 4): 1 when balanced, up to E when one expert takes all.

    f_e is the share of the (token, choice) pairs that went to e (no gradient), P_e the mean probability of e, both over
    the valid tokens of a group; the loss is the mean over groups that have any.

    Args:
      routing: of this shard's tokens.
      valid: [t] which of them count.
      scope: the group: "microbatch" (all shards' tokens), "shard" (this shard's), "sequence", or "batch".
      axes: mesh axes that tokens are sharded over.
      sequence: for scope "sequence", each token's sequence over all shards [t], ascending, and the number of sequences.
      batch: for scope "batch", counts of all micro-batches; the mean of their losses is then the loss of all. None: these
        tokens are all.
    """
    if scope == "batch" and batch is not None:
        return _share_of_batch(routing, valid, batch, axes)
    pairs = jax.nn.one_hot(routing.expert, routing.probs.shape[-1])
    pairs = (pairs if routing.used is None else jnp.where(routing.used[:, :, None], pairs, 0)).sum(1)  # [t, E]
    add = functools.partial(_add_up, valid=valid, sequence=sequence if scope == "sequence" else None)
    sums = (add(pairs), add(routing.probs), add(jnp.ones_like(valid, jnp.float32)))  # [G, E], [G, E], [G]
    share, prob, tokens = sums if scope == "shard" else sum_over(sums, axes)
    some = jnp.maximum(tokens, 1)
    share = jax.lax.stop_gradient(share / jnp.maximum(share.sum(-1, keepdims=True), 1))
    loss = routing.probs.shape[-1] * (share * prob / some[:, None]).sum(-1)  # [G]
    total, groups = jnp.where(tokens > 0, loss, 0).sum(), (tokens > 0).sum()
    if scope == "shard":
        total, groups = sum_over((total, groups), axes)
    return total / jnp.maximum(groups, 1)


def _share_of_batch(routing, valid, batch: BatchCounts, axes) -> Float[Array, ""]:
    prob = sum_over(jnp.where(valid[:, None], routing.probs, 0).sum(0), axes)
    share = batch.tokens_per_expert / jnp.maximum(batch.tokens_per_expert.sum(), 1)
    return routing.probs.shape[-1] * (share * prob).sum() / _tokens_each(batch)


def _tokens_each(batch: BatchCounts) -> Float[Array, ""]:
    """Valid tokens of a micro-batch, on average."""
    return jnp.maximum(batch.num_tokens, 1) / batch.num_microbatches


def _add_up(values: Float[Array, "t *n"], valid: Bool[Array, "t"], sequence) -> Float[Array, "G *n"]:
    """Sums over each group's valid tokens. Additions, not a product with a 0/1 matrix: that would have G*t entries, and
    round the probabilities on backends whose default product does."""
    kept = jnp.where(valid.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    if sequence is None:
        return kept.sum(0)[None]
    index, count = sequence
    return jax.ops.segment_sum(kept, index, count, indices_are_sorted=True)


def router_z_loss(
    routing: Routing, valid: Bool[Array, "t"], axes: tuple[str, ...] = (), batch: BatchCounts | None = None
) -> Float[Array, ""]:
    """Mean over valid tokens of logsumexp(logits)**2 (ST-MoE, eq. 5); keeps router logits small.

    Args:
      routing: of this shard's tokens.
      valid: [t] which of them count.
      axes: mesh axes that tokens are sharded over.
      batch: counts of all micro-batches, for a loss whose mean over them is the mean over their tokens; None: these tokens'.
    """
    square = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
    total, tokens = sum_over((jnp.where(valid, square, 0).sum(), valid.sum()), axes)
    return total / (jnp.maximum(tokens, 1) if batch is None else _tokens_each(batch))


def importance_loss(routing: Routing, valid: Bool[Array, "t"], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """The squared coefficient of variation of the experts' summed weights (Shazeer et al. 2017, eq. 7); 0 when all are equal.

    Args: as in `router_z_loss`.
    """
    experts = jnp.arange(routing.probs.shape[-1])
    gates = jnp.where(routing.expert[:, :, None] == experts, routing.weight[:, :, None], 0).sum(1)
    return _variation(sum_over(jnp.where(valid[:, None], gates, 0).sum(0), axes))


def load_loss(routing: Routing, valid: Bool[Array, "t"], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """The squared coefficient of variation of the experts' expected loads (Shazeer et al. 2017, eq. 11).

    Args: as in `router_z_loss`; the routing is a `Noisy` router's.

    Raises:
      ValueError: for a routing without `load`.
    """
    if routing.load is None:
        raise ValueError("routing.load=None: the load loss is one of router 'noisy'")
    return _variation(sum_over(jnp.where(valid[:, None], routing.load, 0).sum(0), axes))


def _variation(values: Float[Array, "E"]) -> Float[Array, ""]:
    """Variance over squared mean; 0 where the mean is."""
    mean = values.mean()
    return jnp.square(values - mean).mean() / jnp.square(jnp.where(mean > 0, mean, 1))


def entropy_loss(routing: Routing, valid: Bool[Array, "t"], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """Mean over valid tokens of the entropy of `probs`, in nats: 0 for sure routers, log(E) for clueless ones.

    The loss that goes with router "top_p" (Huang et al. 2024, arXiv 2403.07652).

    Args: as in `router_z_loss`.
    """
    total, tokens = sum_over((jnp.where(valid, _entropy(routing.probs), 0).sum(), valid.sum()), axes)
    return total / jnp.maximum(tokens, 1)


def _entropy(probs: Float[Array, "*n E"]) -> Float[Array, "*n"]:
    """-sum p log p, whose gradient is 0 where p is, not infinite."""
    return -jnp.where(probs > 0, probs * jnp.log(jnp.where(probs > 0, probs, 1)), 0).sum(-1)


def expert_divergence(
    probs: Float[Array, "t E"],
    domain_ids: Int[Array, "t"],
    valid: Bool[Array, "t"] | None = None,
    *,
    num_domains: int | None = None,
    axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Minus the mean Jensen-Shannon divergence of the domains' routing, over pairs of domains (arXiv 2603.00054).

    In nats: 0 where all domains are routed alike, -log(2) where no two share an expert. A domain's routing is the mean of
    `probs` over its valid tokens; domains without any are in no pair.

    Args:
      probs: of this shard's tokens.
      domain_ids: [t] from 0.
      valid: [t] which tokens count; None: all.
      num_domains: how many domains there are; None: as many as domain_ids say, which is legal outside of jit alone.
      axes: mesh axes that tokens are sharded over.

    Raises:
      ValueError: for num_domains=None where domain_ids are traced.
    """
    valid = jnp.ones(domain_ids.shape, bool) if valid is None else valid
    if num_domains is None:
        if isinstance(domain_ids, Tracer):
            raise ValueError("num_domains=None: inside jit it must be a number")
        num_domains = int(domain_ids.max()) + 1
    member = (domain_ids == jnp.arange(num_domains)[:, None]) & valid  # [domains, t]
    of_domain = lambda values: jnp.stack([jnp.where(here[:, None], values, 0).sum(0) for here in member])
    total, tokens = sum_over((of_domain(probs), member.sum(1)), axes)
    mean = total / jnp.maximum(tokens, 1)[:, None]  # [domains, E]
    first, second = jnp.triu_indices(num_domains, 1)
    apart = _entropy((mean[first] + mean[second]) / 2) - (_entropy(mean[first]) + _entropy(mean[second])) / 2
    both = (tokens[first] > 0) & (tokens[second] > 0)
    return -jnp.where(both, apart, 0).sum() / jnp.maximum(both.sum(), 1)


def group_loss(
    routing: Routing, valid: Bool[Array, "t"], sizes: tuple[int | float, ...], axes: tuple[str, ...] = ()
) -> Float[Array, ""]:
    """Steers tokens to small experts: G * sum_g (size_g / mean size) * f_g * P_g over groups of experts (MoHGE, 2604.23108).

    f_g is the share of the (token, choice) pairs that went to group g (no gradient), P_g the mean probability of its experts
    together. Equal sizes make it the load-balance loss of groups. The weight is the plain size, so what it counts are the
    parameters that a token uses.

    Args:
      routing: of this shard's tokens.
      valid: [t] which of them count.
      sizes: parameters of one expert, by group; the groups are equal consecutive parts of the experts.
      axes: mesh axes that tokens are sharded over.

    Raises:
      ValueError: where the groups do not divide the experts, or a size is not above 0.
    """
    num_experts, num_groups = routing.probs.shape[-1], len(sizes)
    if not sizes or num_experts % num_groups or min(sizes) <= 0:
        raise ValueError(f"sizes={sizes!r}: needs sizes above 0 of groups that divide num_experts={num_experts}")
    group = routing.expert // (num_experts // num_groups)
    pairs = ((group[:, :, None] == jnp.arange(num_groups)) & routing.counted(valid)[:, :, None]).sum((0, 1))
    probs = jnp.where(valid[:, None], routing.probs.reshape(len(valid), num_groups, -1).sum(-1), 0).sum(0)
    pairs, probs, tokens = sum_over((pairs, probs, valid.sum()), axes)
    share = pairs / jnp.maximum(pairs.sum(), 1)
    weight = jnp.asarray(sizes, jnp.float32) * num_groups / sum(sizes)
    return num_groups * (weight * share * probs / jnp.maximum(tokens, 1)).sum()


def extra_losses(
    routing: Routing, tokens: Tokens, names: list[str], sizes: tuple[int, ...] | None = None
) -> dict[str, Float[Array, ""]]:
    """The losses of these names, out of `moejax.config.EXTRA_LOSSES`; sizes: `MoEConfig.expert_sizes`.

    Raises:
      ValueError: for "divergence" without domains.
    """
    context, found = tokens.context, {}
    for name in names:
        if name in _OF_ROUTING:
            found[name] = _OF_ROUTING[name](routing, tokens.valid, tokens.axes)
        elif name == "group" and sizes is not None:
            found[name] = group_loss(routing, tokens.valid, sizes, tokens.axes)
        elif context.domain_ids is None:
            raise ValueError(
                "context.domain_ids=None: extra loss 'divergence' needs RoutingContext(domain_ids=..., num_domains=...)"
            )
        else:
            ids, count = context.domain_ids, context.num_domains
            found[name] = expert_divergence(routing.probs, ids, tokens.valid, num_domains=count, axes=tokens.axes)
    return found


_OF_ROUTING = {"importance": importance_loss, "load": load_loss, "entropy": entropy_loss}
