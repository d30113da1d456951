"""The collectives of moejax's training step as a backend writes them: what `verify` compares with the compiled text.

The step's program is known: layers in a scan, attention and tables partitioned by the compiler from their annotations, the
MoE layers' collectives written out. So each array that crosses is predicted by kind, group, bytes and times. Backends combine
independent all-reduces into one instruction; arrays are counted, not instructions.
"""

import collections
import dataclasses
from collections.abc import Iterator

from layouts.hlo.program import COLLECTIVES, group_size, walk
from layouts.hlo.text import parse
from layouts.layout import Layout
from layouts.model import Layer, Model, MoE, products
from layouts.workload import Batch, Recipe

# What each backend writes where the step asks for a sum that each device wants a part of (of gradients that the compiler
# partitions; those of experts are written out, and stay what they are).
DIVIDED_SUM = {"cpu": "all-reduce", "gpu": "reduce-scatter", "tpu": "all-reduce"}
# Exchanges that a backward makes again, by remat policy.
_AGAIN = {"full": 2, "dots": 2, "received": 1}


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Arrays that cross alike.

    Attributes:
      kind: as the compiled text names it.
      group: devices of a group; 0 for a permute, which has pairs.
      nbytes: of one device's operand.
    """

    kind: str
    group: int
    nbytes: int


Crossings = collections.Counter[Crossing]


def compiled_crossings(text: str) -> Crossings:
    """The arrays of a compiled text's collectives, and how often each crosses in one run."""
    module, found = parse(text), collections.Counter()
    for visit in walk(module):
        kind = visit.instruction.base_op
        if kind in COLLECTIVES:
            # A permute says pairs, no groups.
            size = 0 if kind == "collective-permute" else group_size(visit.instruction, module.num_devices)
            operands = visit.computation.operands(visit.instruction)
            sizes = [array.nbytes for operand in operands for array in operand.arrays]
            # The parts of an all-to-all, one a receiver, are one array's.
            for nbytes in [sum(sizes)] if kind == "all-to-all" else sizes:
                found[Crossing(kind, size, nbytes)] += visit.times
    return found


def bookkeeping_bytes(batch: Batch, layout: Layout) -> int:
    """Arrays up to this size are norms' gradients, losses and statistics: at most two numbers a token of a device."""
    return int(8 * batch.device_tokens(layout))


def predicted_crossings(model: Model, layout: Layout, batch: Batch, recipe: Recipe, backend: str = "cpu") -> Crossings:
    """What a step's text has, by size above `bookkeeping_bytes`.

    Args:
      model: the model, all its layers MoE or all dense.
      layout: one that moejax runs, with one micro-batch.
      batch: of the step.
      recipe: whose `compute_bytes` all numbers have.
      backend: "cpu", "gpu" or "tpu".
    """
    found: Crossings = collections.Counter()
    step = _Step(model, layout, batch, recipe, DIVIDED_SUM[backend])
    for kind, group, nbytes, times in step.all():
        if group > 1 and times and nbytes > bookkeeping_bytes(batch, layout):
            found[Crossing(kind, 0 if kind == "collective-permute" else group, round(nbytes))] += times
    return found


Line = tuple[str, int, float, int]


@dataclasses.dataclass(frozen=True)
class _Step:
    model: Model
    layout: Layout
    batch: Batch
    recipe: Recipe
    divided_sum: str

    @property
    def others(self) -> int:
        """Devices of the batch that hold the same part of what fsdp divides."""
        return self.layout.batch_shards // self.layout.fsdp

    def all(self) -> Iterator[Line]:
        """(kind, group, bytes, times) of every array."""
        for layer, times in zip(self.model.kinds, self.model.kind_counts(range(len(self.model.layers))), strict=True):
            for line in self.layer(layer):
                yield (*line[:3], line[3] * times)
        yield from self.tables()

    def layer(self, layer: Layer) -> Iterator[Line]:
        """Of one layer."""
        size, tensor = self.recipe.compute_bytes, self.layout.tensor
        for product in products(layer, self.model.d_model):
            whole = product.weights * size
            if product.group == "router":
                yield "all-reduce", self.layout.batch_shards, whole, 1
            elif product.group == "experts":
                yield from self.experts(whole / self.layout.expert / tensor)
            else:
                yield from self.gathered(whole / product.parts(tensor), 2)
        tokens = self.batch.device_tokens(self.layout)
        # The sum after attention, of the gradients of queries, keys and values, and around the feed-forward.
        yield "all-reduce", tensor, tokens * self.model.d_model * size, 6
        if isinstance(layer.feed_forward, MoE):
            yield from self.exchange(layer.feed_forward, tokens)

    def gathered(self, whole: float, times: int) -> Iterator[Line]:
        """A matrix that the compiler partitions: gathered before uses, its gradient summed where it is divided."""
        fsdp = self.layout.fsdp
        if fsdp == 1:
            yield "all-reduce", self.layout.batch_shards, whole, 1
            return
        yield "all-gather", fsdp, whole / fsdp, times
        yield self.divided_sum, fsdp, whole, 1
        yield "all-reduce", self.others, whole / fsdp, 1

    def experts(self, whole: float) -> Iterator[Line]:
        """A matrix of this device's experts: gathered by the layer itself, again where the layer runs again."""
        fsdp, data = self.layout.fsdp, self.layout.data
        yield "all-gather", fsdp, whole / fsdp, 1 + (self.layout.remat != "none")
        if fsdp > 1:
            yield "reduce-scatter", fsdp, whole, 1
        yield "all-reduce", data, whole / fsdp, 1
        if self.layout.exchange == "weight_stream":
            yield "collective-permute", self.layout.expert, whole / fsdp, 3 * self.layout.expert

    def exchange(self, moe: MoE, tokens: float) -> Iterator[Line]:
        """Rows, or tokens with their weights."""
        layout, row = self.layout, self.model.d_model * self.recipe.compute_bytes
        again = _AGAIN.get(layout.remat, 0)
        if layout.exchange == "all_to_all":
            rows = self.recipe.expert_rows(moe, tokens, layout.expert)
            yield "all-to-all", layout.expert, rows / layout.num_chunks * row, (4 + again) * layout.num_chunks
        if layout.exchange == "all_gather":
            slots = self.recipe.expert_rows(moe, tokens, layout.expert)
            yield "all-gather", layout.expert, tokens * row, 2 + (again > 0)
            yield "all-gather", layout.expert, slots * 4, 1 + (again > 0)
            yield "reduce-scatter", layout.expert, layout.expert * tokens * row, 2 + (again > 1)
            yield "reduce-scatter", layout.expert, layout.expert * tokens * moe.top_k * 4, 1

    def tables(self) -> Iterator[Line]:
        """Embedding and logits: the table is gathered once, and summed once for each of its two uses."""
        layout, size = self.layout, self.recipe.compute_bytes
        whole = self.model.vocab_size * self.model.d_model * size / layout.tensor
        yield "all-gather", layout.fsdp, whole / layout.fsdp, 1 if self.model.tied else 2
        yield "all-reduce", layout.batch_shards, whole, 1
        if layout.fsdp == 1:
            yield "all-reduce", layout.batch_shards, whole, 1
        else:
            yield self.divided_sum, layout.fsdp, whole, 1
            yield "all-reduce", self.others, whole / layout.fsdp, 1
        tokens = self.batch.device_tokens(layout)
        yield "all-reduce", layout.tensor, tokens * self.model.d_model * size, 2
