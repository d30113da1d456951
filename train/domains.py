"""Domains of tokens: classes of what they stand for, by which the experts' specialisation is looked at."""

import numpy as np

from train.tokens import Tokenizer

NAMES = ("letters", "digits", "spaces", "line ends", "brackets and quotes", "other signs", "other text", "start of a document")
_BRACKETS = frozenset("()[]{}\"'`")


def domain_of_ids(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """[vocab_size] the index in `NAMES` of each id's domain."""
    text = [tokenizer.decode([i]) for i in range(min(tokenizer.num_text_ids, vocab_size))]
    found = [NAMES.index(_domain(part)) for part in text]
    return np.array(found + [len(NAMES) - 1] * (vocab_size - len(found)), np.int16)


def _domain(text: str) -> str:
    """By its letters where it has any; else by its first sign."""
    if any(sign.isalpha() for sign in text):
        return "letters" if text.isascii() else "other text"
    first = text.strip(" ")[:1] or text[:1]
    if first.isdigit():
        return "digits"
    if first in _BRACKETS and first:
        return "brackets and quotes"
    if first in ("\n", "\r"):
        return "line ends"
    if first.isspace():
        return "spaces"
    return "other signs" if first.isascii() and first.isprintable() and first else "other text"
