"""Corpora: where the text comes from. A corpus is a list of documents in memory, the same on every process."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from train.config import DataConfig
from train.errors import InputError

# Installed third-party packages are another's text: the standard library's folder holds them on some systems.
_INSTALLED = {"site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text.

    Attributes:
      name: as the user gave it.
      documents: the contents of each document, none empty.
      digest: SHA-256 over the documents in order, in hexadecimal.
    """

    name: str
    documents: tuple[bytes, ...]
    digest: str

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return sum(map(len, self.documents))

    def describe(self) -> str:
        """One line: name, documents, bytes, hash."""
        return f"{self.name}: {len(self.documents)} files, {self.num_bytes:,} bytes, sha256 {self.digest[:16]}"


@dataclasses.dataclass(frozen=True)
class Split:
    """A corpus, divided by its documents' hashes: the same documents on every machine and in any order."""

    train: tuple[bytes, ...]
    held_out: tuple[bytes, ...]


def load_corpus(cfg: DataConfig) -> Corpus:
    """Reads the text that `cfg.corpus` names.

    Raises:
      InputError: where it is missing or empty.
    """
    if cfg.corpus == "stdlib":
        found = [path.read_bytes() for path in _stdlib_files()]
    elif cfg.corpus.startswith("hf:"):
        found = _hugging_face(cfg)
    else:
        found = [path.read_bytes() for path in _files(cfg.corpus)]
    documents = tuple(text for text in found if text)
    if not documents:
        raise InputError(f"data.corpus={cfg.corpus!r} is empty: needs at least one file with text")
    return Corpus(cfg.corpus, documents, _digest(documents))


def split_corpus(corpus: Corpus, held_out: float) -> Split:
    """Documents whose hash falls in the first `held_out` of all hashes are held out, in the order of their hashes.

    Copies of one document fall on the same side.

    Raises:
      InputError: where one side would be empty.
    """
    bound = int(held_out * 2**64)
    ranked = [(_rank(text), text) for text in corpus.documents]
    split = Split(
        train=tuple(text for rank, text in ranked if rank >= bound),
        held_out=tuple(text for _, text in sorted({pair for pair in ranked if pair[0] < bound})),
    )
    if not split.train or not split.held_out:
        side = "train on" if not split.train else "hold out"
        raise InputError(
            f"data.held_out={held_out} leaves nothing to {side} of {len(corpus.documents)} documents: "
            f"needs more documents, or another fraction"
        )
    return split


def take_whole(documents: tuple[bytes, ...], max_bytes: int) -> tuple[bytes, ...]:
    """Whole documents in order, as long as they fit in `max_bytes` together; the shortest one where none fits."""
    taken, room = [], max_bytes
    for text in documents:
        if len(text) <= room:
            taken.append(text)
            room -= len(text)
    return tuple(taken) or (min(documents, key=len),)


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not _INSTALLED & set(path.relative_to(root).parts))


def _files(names: str) -> Iterator[Path]:
    for name in names.split(","):
        path = Path(name.strip()).expanduser()
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from sorted(child for child in path.rglob("*") if _is_text(child, path))
        else:
            raise InputError(
                f"data.corpus={names!r}: no file or folder {str(path)!r}; legal are 'stdlib', 'hf:NAME', "
                f"and existing files and folders separated by commas"
            )


def _is_text(path: Path, root: Path) -> bool:
    """Whether it is a file, not hidden, with no zero byte at its start."""
    if any(part.startswith(".") for part in path.relative_to(root).parts) or not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(1024)


def _hugging_face(cfg: DataConfig) -> list[bytes]:
    name = cfg.corpus.removeprefix("hf:")
    try:
        import datasets  # pyright: ignore[reportMissingImports]  # of the extra `hf`, which need not be installed
    except ImportError as error:
        raise InputError(f"data.corpus={cfg.corpus!r}: needs the package `datasets` (pip install datasets)") from error
    try:
        rows = datasets.load_dataset(*_name_and_subset(name), split="train")
    except Exception as error:  # the library raises errors of a dozen packages for "not there" and "not reachable"
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"data.corpus={cfg.corpus!r}: not found or not reachable ({first})") from error
    if cfg.text_column not in rows.column_names:
        raise InputError(f"data.text_column={cfg.text_column!r}: {name} has {', '.join(rows.column_names)}")
    return [text.encode() for text in rows[cfg.text_column]]


def _name_and_subset(name: str) -> list[str]:
    """OWNER/NAME/SUBSET -> [OWNER/NAME, SUBSET]."""
    parts = name.split("/")
    return [name] if len(parts) < 3 else ["/".join(parts[:2]), "/".join(parts[2:])]


def _digest(documents: tuple[bytes, ...]) -> str:
    total = hashlib.sha256()
    for text in documents:
        total.update(len(text).to_bytes(8, "little"))
        total.update(text)
    return total.hexdigest()


def _rank(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
