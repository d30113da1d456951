"""Byte bigram and trigram models: what the text's letters alone give away, the line that a language model has to beat.

Symbols are 0 to 255 for bytes and 256 for the boundary of documents: it is predicted at a document's end, and is the
context at its beginning.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

SYMBOLS = 257
_END = 256
# Symbols counted at a time: memory stays near the tables' own 136 MB, whatever the text.
_BLOCK = 4_000_000


@dataclasses.dataclass(frozen=True)
class NgramModel:
    """Counts of a training text, interpolated by Witten and Bell's rule (1991): a context seen n times, followed by r
    different symbols, is trusted n / (n + r), and the rest goes to the shorter context. Nothing is tuned.

    Attributes:
      counts: by order 1, 2, 3: int64 [257], [257, 257], [257, 257, 257], the last axis the symbol predicted.
    """

    counts: tuple[np.ndarray, ...]

    @functools.cached_property
    def _contexts(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """By order, for every context: how often it was seen, and followed by how many different symbols."""
        return tuple((counts.sum(-1), (counts > 0).sum(-1)) for counts in self.counts)

    def bits(self, symbols: np.ndarray, order: int) -> float:
        """Bits to encode a text with contexts of order - 1 symbols.

        Args:
          symbols: [n], each document's bytes and 256 for its end.
          order: 2 for the bigram model, 3 for the trigram model.
        """
        grams = _grams(symbols)
        probability = np.full(len(symbols), 1 / SYMBOLS)
        for counts, (seen, kinds) in zip(self.counts[:order], self._contexts, strict=False):
            parts = grams[3 - counts.ndim :]
            context = tuple(parts[:-1])
            n, r = seen[context], np.maximum(kinds[context], 1)
            probability = (counts[(*context, parts[-1])] + r * probability) / (n + r)
        return float(-np.log2(probability).sum())

    def bits_per_byte(self, symbols: np.ndarray, order: int) -> float:
        """Bits to encode the text, ends of documents included, over its bytes."""
        return self.bits(symbols, order) / max(1, int((symbols != _END).sum()))


def byte_symbols(documents: Sequence[bytes]) -> np.ndarray:
    """[n] int32: each document's bytes, and 256 for its end."""
    end = np.array([_END], np.uint16)
    parts = itertools.chain.from_iterable((np.frombuffer(text, np.uint8), end) for text in documents)
    return np.concatenate(list(parts)).astype(np.int32)


def fit_ngrams(symbols: np.ndarray) -> NgramModel:
    """Counts a training text: [n] symbols, each document's bytes and 256 for its end."""
    counts = [np.zeros((SYMBOLS,) * order, np.int64) for order in (1, 2, 3)]
    for low in range(0, len(symbols), _BLOCK):
        before = min(low, 2)
        grams = _grams(symbols[low - before : low + _BLOCK])[:, before:]
        for found in counts:
            index = np.ravel_multi_index(tuple(grams[3 - found.ndim :]), found.shape)
            found += np.bincount(index, minlength=found.size).reshape(found.shape)
    return NgramModel(tuple(counts))


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Nats over a whole text as bits for each of its bytes."""
    return nats / math.log(2) / max(1, num_bytes)


def _grams(symbols: np.ndarray) -> np.ndarray:
    """[3, n]: the two symbols before each, and itself. No context reaches beyond its document's beginning."""
    first = np.concatenate([[_END], symbols[:-1]])
    second = np.concatenate([[_END], first[:-1]])
    second = np.where(first == _END, _END, second)
    return np.stack([second, first, symbols])
