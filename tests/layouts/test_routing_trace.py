"""Routing traces: what was added comes back, and what is counted is what a loop counts."""

import numpy as np
import pytest

from layouts.errors import InputError
from layouts.routing_trace import RoutingTrace, specialisation

E, LAYERS, TOKENS, K = 5, 2, 30, 2
NAMES = ("letters", "digits", "nothing")


def made(num_records=3):
    rng, trace = np.random.default_rng(0), RoutingTrace.empty(E, NAMES)
    for step in range(num_records):
        expert = np.argsort(rng.random((LAYERS, TOKENS, E)), -1)[..., :K]
        expert[:, rng.random(TOKENS) < 0.2, 1] = -1
        trace = trace.add(10 * step, expert, rng.integers(0, 99, TOKENS), rng.integers(-1, 2, TOKENS))
    return trace


def test_a_trace_comes_back_from_its_file(tmp_path):
    trace = made()
    trace.save(tmp_path / "routing.npz")
    again = RoutingTrace.load(tmp_path / "routing.npz")
    assert (again.num_experts, again.domain_names, len(again)) == (E, NAMES, 3)
    for name in ("step", "expert", "token", "domain"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))
    assert again.until(10).step.tolist() == [0, 10]
    assert sorted(np.load(tmp_path / "routing.npz").files) == [
        "domain", "domain_names", "expert", "num_experts", "schema", "step", "token",
    ]  # fmt: skip


def test_counts_are_those_of_a_loop():
    trace = made()
    loads, pairs = np.zeros((3, LAYERS, E), int), np.zeros((E, E), int)
    domains, following = np.zeros((3, LAYERS, 3, E), int), np.zeros((E, E), int)
    for n, layer, i in np.ndindex(3, LAYERS, TOKENS):
        used = [e for e in trace.expert[n, layer, i] if e >= 0]
        for e in used:
            loads[n, layer, e] += 1
            if trace.domain[n, i] >= 0:
                domains[n, layer, trace.domain[n, i], e] += 1
            for other in used if layer == 1 else ():
                pairs[e, other] += 1
            for other in trace.expert[n, 1, i] if layer == 0 else ():
                following[e, other] += other >= 0
    np.testing.assert_array_equal(trace.loads(), loads)
    np.testing.assert_array_equal(trace.by_domain(), domains)
    np.testing.assert_array_equal(trace.coactivation(1), pairs)
    np.testing.assert_array_equal(trace.transitions(0), following)


def test_specialisation_is_none_alike_and_the_domains_entropy_apart():
    alike, apart = np.array([[3, 6, 1], [6, 12, 2]]), np.array([[5, 0, 0], [0, 0, 5]])
    np.testing.assert_allclose(specialisation(np.stack([alike, apart, 0 * apart])), [0, 1, 0], atol=1e-12)


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "routing.npz"
    for content in (b"", b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"routing.npz: not a routing trace"):
            RoutingTrace.load(path)
    np.savez(path, schema=2, step=np.zeros(1))
    with pytest.raises(InputError, match=r"schema 2, arrays \['step'\]: needs schema 1"):
        RoutingTrace.load(path)
    with pytest.raises(InputError, match=r"not a routing trace"):
        RoutingTrace.load(tmp_path / "none.npz")
    with pytest.raises(InputError, match=r"expert of shape \(2, 7, 2\): the trace's records have \(2, 30, 2\)"):
        made().add(99, np.zeros((LAYERS, 7, K)), np.zeros(7), np.zeros(7))
