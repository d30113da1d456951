"""Rows of tokens, and the pipeline that deals them out.

Documents are laid end to end, each with BOS in front, and the line is cut into rows of `seq` tokens: nothing is padded
but the end of the last row. Segment ids tell a row's documents apart, so that attention stays within them. The target
of a document's last token is EOS: every byte and every end of a document is predicted exactly once.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from train.config import RULES, TrainConfig
from train.tokens import Tokenizer

Row = dict[str, np.ndarray]
# An endless data set, as far as grain is concerned: batches that no run reaches.
_ENDLESS = 2**40


@dataclasses.dataclass(frozen=True)
class Rows:
    """Documents as rows.

    Attributes:
      line: [n] the documents' tokens, end to end, each with BOS in front.
      starts: [documents + 1] int64, where each document begins in `line`, and n.
      seq: tokens in a row.
      eos: the id that ends a document.
    """

    line: np.ndarray
    starts: np.ndarray
    seq: int
    eos: int

    def __len__(self) -> int:
        return -(-len(self.line) // self.seq)

    def __getitem__(self, index: int) -> Row:
        """One row: tokens, targets, segment_ids (1 ..; 0: padding), positions: [seq] int32; loss_mask: [seq] bool."""
        low = index * self.seq
        high = min(low + self.seq, len(self.line))
        size = high - low
        document = np.searchsorted(self.starts, np.arange(low, high), side="right") - 1
        targets = np.full(size, self.eos, np.int32)
        inside = np.arange(low + 1, high + 1) < self.starts[document + 1]
        targets[inside] = self.line[low + 1 : high + 1][inside[: len(self.line) - low - 1]]
        row = {
            "tokens": self.line[low:high],
            "targets": targets,
            "segment_ids": document - document[0] + 1,
            "positions": np.arange(low, high) - np.maximum(self.starts[document], low),
        }
        row = {name: np.pad(values.astype(np.int32), (0, self.seq - size)) for name, values in row.items()}
        return {**row, "loss_mask": row["segment_ids"] > 0}


def make_rows(documents: Sequence[bytes], tokenizer: Tokenizer, seq: int) -> Rows:
    """Tokenises documents and lays them out."""
    bos = np.array([tokenizer.num_text_ids], np.int32)
    parts = [np.concatenate([bos, ids]) for ids in tokenizer.encode(documents)]
    dtype = np.uint16 if tokenizer.num_text_ids + 2 <= 2**16 else np.int32
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return Rows(np.concatenate(parts).astype(dtype), starts, seq, tokenizer.num_text_ids + 1)


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of each global batch one process loads: a block of neighbours, so that the batch is the same array
    whatever the number of processes.

    Attributes:
      rows: the endless data set that is shared out.
      global_batch: rows of a batch over all processes.
      process: this process's number.
      num_processes: how many there are; divides global_batch.
    """

    rows: Any
    global_batch: int
    process: int
    num_processes: int

    @property
    def batch(self) -> int:
        """Rows of a batch on this process."""
        return self.global_batch // self.num_processes

    def __len__(self) -> int:
        return _ENDLESS * self.batch

    def __getitem__(self, index: int) -> Row:
        """This process's row `index`, counted over all batches."""
        batch, row = divmod(index, self.batch)
        return self.rows[batch * self.global_batch + self.process * self.batch + row]


def train_batches(rows: Rows, cfg: TrainConfig, process: int = 0, num_processes: int = 1) -> grain.DatasetIterator:
    """This process's batches, without end: rows in a new order each epoch, by the seed.

    The iterator's `get_state()` is a JSON position that counts global batches, so that a run may go on with another
    number of processes; `set_state` of it yields the same batches from there on, to the bit.

    Args:
      rows: the training text.
      cfg: its global_batch and seed are read.
      process: this process's number.
      num_processes: how many there are.
    """
    shuffled = grain.MapDataset.source(rows).seed(cfg.seed).shuffle().repeat()
    share = Share(shuffled, cfg.global_batch, process, num_processes)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(share).batch(share.batch, drop_remainder=True).to_iter_dataset(options))


def eval_batches(rows: Rows, batch: int, process: int = 0, num_processes: int = 1) -> Iterator[Row]:
    """This process's part of all rows once, in order; the last batch is filled up with padding rows.

    Args:
      rows: the held-out text.
      batch: rows of a batch over all processes.
      process: this process's number.
      num_processes: how many there are; divides `batch`.
    """
    part = batch // num_processes
    padding = {name: np.zeros_like(values) for name, values in rows[0].items()}
    for low in range(process * part, -(-len(rows) // batch) * batch, batch):
        found = [rows[index] if index < len(rows) else padding for index in range(low, low + part)]
        yield {name: np.stack([row[name] for row in found]) for name in padding}


def place_batch(batch: Row, mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows as part of the global batch, sharded over the mesh's batch axes."""
    sharding = NamedSharding(mesh, RULES.spec(("batch", None), mesh))
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}


def abstract_batch(cfg: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and shardings of a batch."""
    sharding = NamedSharding(mesh, RULES.spec(("batch", None), mesh))
    shape = (cfg.global_batch, cfg.seq)
    dtypes = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"loss_mask": np.bool_}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
