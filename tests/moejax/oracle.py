"""The layer said again, independently: loops over tokens in NumPy, and for gradients a dense product in float64.

T: tokens of the whole batch, k: experts per token, E: experts, d: model width, G: groups of the load-balance loss.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax import MoEConfig, Softmax

NUMPY_ACT = {
    "swiglu": lambda h: h / (1 + np.exp(-h)),
    "gelu": lambda h: 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
    "geglu": lambda h: 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))),
    "relu2": lambda h: np.maximum(h, 0) ** 2,
}
JAX_ACT = {
    "swiglu": lambda h: h * jax.nn.sigmoid(h),
    "gelu": lambda h: jax.nn.gelu(h, approximate=True),
    "geglu": lambda h: jax.nn.gelu(h, approximate=True),
    "relu2": lambda h: jnp.maximum(h, 0) ** 2,
}


@dataclasses.dataclass(frozen=True)
class Routes:
    """Where tokens go: expert [T, k], weight [T, k] float64, probs [T, E], kept [T, k] bool."""

    expert: np.ndarray
    weight: np.ndarray
    probs: np.ndarray
    kept: np.ndarray


def sigmoid(logits):
    """1 / (1 + exp(-logits)), without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1, small) / (1 + small)


def ratios(log_scores):
    """exp(log_scores) over their sum, also where every one of them underflows."""
    scores = np.exp(log_scores - log_scores.max())
    return scores / scores.sum()


def route_token(logits, top_k, router, bias):
    """One token: (chosen experts, weights, normalised scores), ties to the lower expert."""
    softmax = isinstance(router, Softmax)
    log_scores = logits - logits.max() if softmax else -np.logaddexp(0, -logits)
    select = logits if softmax else sigmoid(logits.astype(np.float32)) + np.asarray(bias, np.float32)
    chosen = sorted(range(len(logits)), key=lambda e: (-select[e], e))[:top_k]
    probs = ratios(log_scores)
    weight = probs[chosen] if softmax else np.exp(log_scores[chosen])
    if router.renormalise:
        weight = ratios(log_scores[chosen])
    return np.array(chosen), weight * getattr(router, "scale", 1.0), probs


def cell_rows(cfg: MoEConfig, t: int) -> int:
    """ceil(cf * t * k / E), at least 1 and never more than the sender's t tokens."""
    if cfg.capacity_factor is None:
        return t
    return max(1, min(t, math.ceil(cfg.capacity_factor * t * cfg.top_k / cfg.num_experts)))


def keep(expert, weight, valid, *, num_senders, rows, drop_by):
    """[T, k] bool: each (sender, expert) takes its first `rows` valid pairs, by position or by weight."""
    t = -(-len(expert) // num_senders)
    cells = {}
    for i, j in np.ndindex(expert.shape):
        if valid[i]:
            cells.setdefault((i // t, expert[i, j]), []).append((i, j))
    kept = np.zeros(expert.shape, bool)
    for pairs in cells.values():
        if drop_by == "weight":
            pairs.sort(key=lambda pair: (-np.float32(weight[pair]), pair))
        for pair in pairs[:rows]:
            kept[pair] = True
    return kept


def routes(cfg: MoEConfig, router_weights, x, valid, bias, num_senders) -> Routes:
    """Routes and drops every token of x [T, d]."""
    logits = x @ router_weights
    found = [route_token(row, cfg.top_k, cfg.router_rule, bias) for row in logits]
    expert, weight, probs = (np.stack(part) for part in zip(*found, strict=True))
    rows = cell_rows(cfg, -(-len(x) // num_senders))
    kept = keep(expert, weight, valid, num_senders=num_senders, rows=rows, drop_by=cfg.drop_by)
    return Routes(expert, weight, probs, kept)


def feed_forward(row, params, prefix, expert, cfg):
    """One token through one expert."""
    act = NUMPY_ACT[cfg.activation]
    up = row @ params[f"{prefix}_up"][expert]
    gate = params.get(f"{prefix}_gate")
    hidden = act(up) if gate is None else act(row @ gate[expert]) * up
    return hidden @ params[f"{prefix}_down"][expert]


def outputs(cfg: MoEConfig, params, x, valid, found: Routes):
    """y [T, d], by a loop over tokens and their choices."""
    y = np.zeros_like(x)
    for i in np.flatnonzero(valid):
        for j in range(cfg.top_k):
            if found.kept[i, j]:
                y[i] += found.weight[i, j] * feed_forward(x[i], params, "expert", found.expert[i, j], cfg)
        if cfg.num_shared_experts:
            y[i] += feed_forward(x[i], params, "shared", 0, cfg)
    return y


def losses(cfg: MoEConfig, logits, valid, found: Routes, group):
    """(load-balance, z) in closed form; group [T] is what the load-balance loss counts over."""
    balance = []
    for g in sorted(set(group[valid])):
        inside = np.flatnonzero(valid & (group == g))
        share = np.bincount(found.expert[inside].ravel(), minlength=cfg.num_experts) / (len(inside) * cfg.top_k)
        balance.append(cfg.num_experts * share @ found.probs[inside].mean(0))
    most = logits.max(-1)
    z = (most + np.log(np.exp(logits - most[:, None]).sum(-1))) ** 2
    return (np.mean(balance), z[valid].mean()) if valid.any() else (0.0, 0.0)


def dense(cfg: MoEConfig, params, x, dy, valid, bias, expert, kept, member):
    """(y, gradients of params, of x) in float64 from a mixture with no plan: every expert on every token, masked.

    member: [G, T] float, 1 where a valid token belongs to a group.
    """

    def loss(params, x):
        logits = x @ params["router"]
        y = _dense_outputs(cfg, params, x, logits, expert, kept)
        probs = jax.nn.softmax(_log_scores(cfg, logits))
        tokens = jnp.maximum(member.sum(1), 1)[:, None]
        share = member @ jax.nn.one_hot(expert, cfg.num_experts, dtype=x.dtype).sum(1) / tokens / cfg.top_k
        balance = cfg.num_experts * (share * (member @ probs) / tokens).sum() / jnp.maximum(member.any(1).sum(), 1)
        z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * valid).sum() / jnp.maximum(valid.sum(), 1)
        return (y * dy).sum() + cfg.aux_loss * balance + cfg.z_loss * z, y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, *grads


def _log_scores(cfg, logits):
    return jax.nn.log_softmax(logits) if isinstance(cfg.router_rule, Softmax) else jax.nn.log_sigmoid(logits)


def _dense_outputs(cfg, params, x, logits, expert, kept):
    log_scores = jnp.take_along_axis(_log_scores(cfg, logits), expert, 1)
    weight = jax.nn.softmax(log_scores) if cfg.router_rule.renormalise else jnp.exp(log_scores)
    weight = weight * getattr(cfg.router_rule, "scale", 1.0)
    gates = (jax.nn.one_hot(expert, cfg.num_experts, dtype=x.dtype) * (weight * kept)[..., None]).sum(1)
    y = jnp.einsum("te,ted->td", gates, _every_expert(cfg, params, "expert", x))
    return y + _every_expert(cfg, params, "shared", x)[:, 0] if cfg.num_shared_experts else y


def _every_expert(cfg, params, prefix, x):
    act = JAX_ACT[cfg.activation]
    up = jnp.einsum("td,edf->tef", x, params[f"{prefix}_up"])
    gate = params.get(f"{prefix}_gate")
    hidden = act(up) if gate is None else act(jnp.einsum("td,edf->tef", x, gate)) * up
    return jnp.einsum("tef,efd->ted", hidden, params[f"{prefix}_down"])
