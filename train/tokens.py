"""Tokenizers: text -> ids. Two ids follow the tokenizer's own: BOS before each document, EOS after it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from train.errors import InputError


class Tokenizer(Protocol):
    """What a tokenizer is."""

    @property
    def num_text_ids(self) -> int:
        """Ids that stand for text: 0 to num_text_ids - 1. BOS is num_text_ids, EOS one more."""
        ...

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Each text's ids, [n] of an integer dtype, without BOS and EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; ids that stand for no text are left out."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A token for each byte."""

    num_text_ids: int = 256

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Each text's bytes, [n] uint8."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes as UTF-8; what is none becomes the replacement character."""
        return bytes(int(i) for i in ids if i < self.num_text_ids).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizers` JSON file."""

    def __init__(self, path: str):
        """Raises InputError where the file is missing or no tokenizer."""
        import tokenizers

        if not Path(path).is_file():
            raise InputError(f"data.tokenizer={path!r}: no such file; legal are 'bytes' and the path of a tokenizer.json")
        try:
            self._inner = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise InputError(f"data.tokenizer={path!r}: not a tokenizer.json ({error})") from error
        self.num_text_ids = self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Each text's ids, [n] int32; bytes that are no UTF-8 become the replacement character."""
        decoded = [text.decode("utf-8", errors="replace") for text in texts]
        return [np.array(found.ids, np.int32) for found in self._inner.encode_batch(decoded, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text."""
        return self._inner.decode([int(i) for i in ids if i < self.num_text_ids])


def load_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer that `name` says: "bytes" or a file.

    Raises:
      InputError: for a missing or malformed file, or a model whose vocabulary is too small for it.
    """
    tokenizer = ByteTokenizer() if name == "bytes" else FileTokenizer(name)
    needed = tokenizer.num_text_ids + 2
    if vocab_size < needed:
        raise InputError(
            f"model.vocab_size={vocab_size} is too small for data.tokenizer={name!r}: needs at least {needed} "
            f"({tokenizer.num_text_ids} and two for the beginning and end of a document)"
        )
    return tokenizer
