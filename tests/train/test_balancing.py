"""Routers that balance by themselves keep the demo model's load even from a skewed start; without, it stays skewed."""

import pytest

from tests.train import balancing


@pytest.mark.slow
def test_bias_and_queues_even_out_a_skewed_start():
    """Without balancing the fullest expert of the worse layer keeps over twice the mean; within 200 steps these halve that."""
    skewed = balancing.fullest(balancing.run(balancing.WAYS["no balancing"])[0])
    assert skewed.min() > 2
    for name in ('SigmoidBias(rate=5e-2, rule="error")', "Queue(price=3e-2)"):
        tokens = balancing.run(balancing.WAYS[name])[0]
        end = tokens[-balancing.LAST :]
        assert balancing.fullest(tokens[0]) > 2
        assert balancing.fullest(end).mean() < 1.3, name
        assert balancing.fullest(end.sum(0)) < 1.2, name


def test_the_page_shows_every_way():
    text = balancing.PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in balancing.WAYS)
    assert balancing.PAGE.with_suffix(".png").exists()
