"""Each router's rule said again from its paper: loops over tokens in NumPy, float64 where it matters.

One token's logits [E] (or a sequence's [s, E]) in, (experts, weights, probs) out; ties go to the lower expert.
"""

import math

import numpy as np

from tests.moejax.oracle import ratios, sigmoid


def best(scores, k):
    """The k highest, ties to the lower index."""
    return np.array(sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k])


def softmax(logits):
    """Probabilities of one token."""
    return ratios(logits.astype(np.float64))


def sigmoid_weights(logits, expert, renormalise, scale=1.0):
    """(weights, probs) of sigmoid scores."""
    log_scores = -np.logaddexp(0, -logits.astype(np.float64))
    weight = ratios(log_scores[expert]) if renormalise else np.exp(log_scores[expert])
    return weight * scale, ratios(log_scores)


def biased(logits, bias):
    """float32 sigmoid scores plus a bias."""
    return sigmoid(logits.astype(np.float32)) + np.asarray(bias, np.float32)


def grouped(logits, k, bias, num_groups, max_groups):
    """DeepSeek-V3: groups by the sum of their k / M highest, then the top k inside the M best groups."""
    scores = biased(logits, bias)
    size = len(logits) // num_groups
    counted = min(math.ceil(k / max_groups), size)
    totals = [np.sort(scores[g * size : (g + 1) * size])[::-1][:counted].sum() for g in range(num_groups)]
    kept = set(best(totals, max_groups))
    return best([score if e // size in kept else -np.inf for e, score in enumerate(scores)], k)


def prototype(logits, k):
    """M6-T: k groups, in each a softmax and its best expert."""
    size = len(logits) // k
    groups = [softmax(logits[j * size : (j + 1) * size]) for j in range(k)]
    expert = [j * size + int(np.argmax(logits[j * size : (j + 1) * size])) for j in range(k)]
    probs = np.concatenate(groups)
    return np.array(expert), probs[expert], probs / k


def hashed(token_id, k, num_experts, seed):
    """The k highest of 24-bit hashes of (id, expert)."""

    def mix(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    scores = [mix((token_id + mix((e * 0x9E3779B1 + seed) % 2**32)) % 2**32) >> 8 for e in range(num_experts)]
    return best(scores, k)


def top_p(logits, k, p):
    """(experts, weights, used): experts by probability until they reach p, k at most."""
    probs = softmax(logits)
    expert, total, used = best(logits, k), 0.0, []
    for e in expert:
        used.append(total < p)
        total += probs[e]
    return expert, np.where(used, probs[expert], 0), np.array(used)


def expert_choice(scores, valid, k, causal=False):
    """[s, E] which tokens of a sequence each expert takes, by its scores: the best v * k / E of them, or of those so far."""
    s, num_experts = scores.shape
    taken = np.zeros(scores.shape, bool)
    for e in range(num_experts):
        quota = lambda tokens, e=e: (tokens * k) // num_experts + (e < (tokens * k) % num_experts)
        places = [i for i in range(s) if valid[i] and np.isfinite(scores[i, e])]
        if not causal:
            best_first = sorted(places, key=lambda i, e=e: (-scores[i, e], i))
            taken[best_first[: quota(valid.sum())], e] = True
            continue
        for i in places:
            allowed = quota(valid[: i + 1].sum())
            rank = sum(scores[j, e] > scores[i, e] for j in places if j < i)
            taken[i, e] = rank < allowed and taken[:i, e].sum() < allowed
    return taken


def two_level(logits, group_logits, k, top_groups, renormalise=True):
    """(experts, weights): the best groups, the best k / top_groups experts of each, softmax probabilities."""
    size = len(logits) // len(group_logits)
    expert = []
    for group in best(group_logits, top_groups):
        expert += [group * size + e for e in best(logits[group * size : (group + 1) * size], k // top_groups)]
    expert = np.array(expert)
    return expert, softmax(logits[expert]) if renormalise else softmax(logits)[expert]


def sticky(logits, valid, k, bonus):
    """[s, k]: along a sequence, `bonus` more for the experts of the last valid token."""
    last, found = [], []
    for row, counts in zip(logits, valid, strict=True):
        expert = best([row[e] + np.float32(bonus) * (e in last) for e in range(len(row))], k)
        last = list(expert) if counts else last
        found.append(expert)
    return np.array(found)


def transport(logits, valid, num_iterations):
    """[s, E] Sinkhorn on exp(logits) of a sequence: rows to mass 1, columns to mass s / E; in float64 logarithms."""
    logits = logits.astype(np.float64)
    log_sum = lambda values, axis: np.logaddexp.reduce(values, axis=axis)
    column = np.zeros(logits.shape[1])
    for _ in range(num_iterations if valid.any() else 0):
        row = -log_sum(logits + column, 1)
        column = np.log(valid.sum() / logits.shape[1]) - log_sum((logits + row[:, None])[valid], 0)
    return logits + column


def in_top_k(clean, noisy, deviation, k):
    """Shazeer et al.: P(x, e), that e's noise, drawn again, leaves it above the k-th highest of the others."""
    found = []
    for e in range(len(clean)):
        others = np.sort(np.delete(noisy, e))[::-1]
        beaten = others[k - 1] if k <= len(others) else -np.inf
        found.append(0.5 * math.erfc(-(clean[e] - beaten) / deviation[e] / math.sqrt(2)))
    return np.array(found)


def next_backlog(backlog, loads, rates):
    """A virtual queue after a step: what came over what its share serves, never below empty."""
    size = len(loads) // len(backlog)
    found = []
    for d, (queue, rate) in enumerate(zip(backlog, rates, strict=True)):
        served = sum(loads) * rate / sum(rates)
        came = sum(loads[d * size : (d + 1) * size])
        found.append(max(0, queue + came / served - 1) if served else queue)
    return np.array(found)
