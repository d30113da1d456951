"""The byte models that a run is measured against, beside plain loops."""

import collections
import math

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import train.ngram
from train.ngram import bits_per_byte, byte_symbols, fit_ngrams

TEXTS = st.lists(st.binary(min_size=1, max_size=30).map(lambda text: bytes(b % 4 + 97 for b in text)), min_size=1)


def loop_bits(train_documents, document, order):
    """Witten-Bell, one symbol at a time, from dictionaries."""
    counts = [collections.defaultdict(collections.Counter) for _ in range(3)]
    for text in train_documents:
        padded = [256, 256, *text, 256]
        for i in range(2, len(padded)):
            for n in range(3):
                counts[n][tuple(padded[i - n : i])][padded[i]] += 1
    bits, padded = 0.0, [256, 256, *document, 256]
    for i in range(2, len(padded)):
        p = 1 / 257
        for n in range(order):
            seen = counts[n][tuple(padded[i - n : i])]
            total, kinds = sum(seen.values()), max(len(seen), 1)
            p = (seen[padded[i]] + kinds * p) / (total + kinds)
        bits -= math.log2(p)
    return bits


@hypothesis.given(documents=TEXTS, held_out=TEXTS)
@hypothesis.settings(max_examples=5)
def test_bits_equal_a_plain_loops(documents, held_out):
    model = fit_ngrams(byte_symbols(documents))
    for order in (1, 2, 3):
        expected = sum(loop_bits(documents, text, order) for text in held_out)
        assert model.bits(byte_symbols(held_out), order) == pytest.approx(expected, rel=1e-12)


def test_probabilities_of_every_context_add_up_to_one():
    model = fit_ngrams(byte_symbols([b"abracadabra", b"banana"]))
    for context in (b"", b"a", b"ab", b"zz", b"br"):
        bits = [model.bits(np.array([*context, last]), 3) for last in range(257)]
        before = model.bits(np.array([*context]), 3) if context else 0
        assert sum(2.0 ** -(b - before) for b in bits) == pytest.approx(1, rel=1e-9)


def test_counting_in_blocks_changes_nothing(monkeypatch):
    symbols = byte_symbols([b"abcabcab" * 5, b"xyz", b"q"])
    whole = fit_ngrams(symbols)
    for block in (1, 2, 7):
        monkeypatch.setattr(train.ngram, "_BLOCK", block)
        for one, other in zip(whole.counts, fit_ngrams(symbols).counts, strict=True):
            np.testing.assert_array_equal(one, other)


def test_longer_contexts_help_on_text_that_has_them():
    text = [b"the cat sat on the mat and the rat sat on the hat. " * 20]
    model, held_out = fit_ngrams(byte_symbols(text)), byte_symbols([b"the hat sat on the cat."])
    one, two, three = (model.bits_per_byte(held_out, order) for order in (1, 2, 3))
    assert three < two < one


def test_nats_become_bits_for_each_byte():
    assert bits_per_byte(80 * math.log(2), 40) == pytest.approx(2)
