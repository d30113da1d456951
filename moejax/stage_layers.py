"""StageLayers: which stage holds which of the model's layers, and in which of its slots.

P stages; k: a kind of layer (layers of one kind have parameters of the same shapes and run the same function).
"""

import dataclasses
import itertools
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from moejax.pipeline import Placement


@dataclasses.dataclass(frozen=True)
class StageLayers:
    """The model's layers on the stages of a pipeline.

    A stage has as many slots of a kind as the stage with most layers of that kind needs; the slots that another one does
    not need hold zeros. Parameters are kept in *stage order*: leaves [P * slots of the kind, ...], stage after stage.

    Attributes:
      placement: which part of the model each chunk holds.
      order: the kind of each layer, in the model's order.
      cuts: layers of each part; they may be uneven, and 0.

    Raises:
      ValueError: where the cuts do not fit the placement's parts or the model's layers, or a second pipe is no mirror image.
    """

    placement: Placement
    order: tuple[int, ...]
    cuts: tuple[int, ...]

    def __post_init__(self):
        parts, layers = self.placement.num_parts, len(self.order)
        if len(self.cuts) != parts or any(type(size) is not int or size < 0 for size in self.cuts):
            raise ValueError(f"cuts={self.cuts!r}: needs {parts} whole numbers of layers, one a part of the model")
        if sum(self.cuts) != layers:
            raise ValueError(f"cuts={self.cuts!r}: add up to {sum(self.cuts)}, the model has {layers} layers")
        _ = self.mirrors

    @classmethod
    def even(cls, placement: Placement, order: tuple[int, ...]) -> "StageLayers":
        """Parts as even as can be, larger ones first.

        Raises:
          ValueError: where there are more parts than layers.
        """
        parts, layers = placement.num_parts, len(order)
        if parts > layers:
            raise ValueError(f"{parts} parts of {layers} layers: needs a layer a part; legal are up to {layers} parts")
        return cls(placement, order, tuple(layers // parts + (i < layers % parts) for i in range(parts)))

    @property
    def num_kinds(self) -> int:
        """Kinds of layers."""
        return 1 + max(self.order)

    @property
    def num_stages(self) -> int:
        """P."""
        return self.placement.num_stages

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        """The copies of the model; the first one's are the parameters that are kept."""
        return tuple(sorted(set(self.placement.pipes)))

    @cached_property
    def mirrors(self) -> dict[int, tuple[int, ...]]:
        """For each further pipe, `mirrors[pipe][stage]`: the stage whose layers of the first pipe it holds too."""
        own = [c for c, pipe in enumerate(self.placement.pipes) if pipe == self.pipes[0]]
        found = {}
        for pipe in self.pipes[1:]:
            chunks = [c for c, p in enumerate(self.placement.pipes) if p == pipe]
            held = {tuple(row[c] for c in own): r for r, row in enumerate(self.placement.parts)}
            sources = tuple(held.get(tuple(row[c] for c in chunks), -1) for row in self.placement.parts)
            if sorted(sources) != list(range(self.num_stages)):
                raise ValueError(
                    f"placement {self.placement.parts}: each stage's chunks of pipe {pipe} must be those of one stage of "
                    f"pipe {self.pipes[0]}, in the same order"
                )
            found[pipe] = sources
        return found

    @cached_property
    def _layers(self) -> tuple[range, ...]:
        ends = itertools.accumulate(self.cuts)
        return tuple(range(end - size, end) for end, size in zip(ends, self.cuts, strict=True))

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`held[stage][kind]`: the layers in its slots, in the order of its chunks, as numbers in the model."""
        own = [c for c, pipe in enumerate(self.placement.pipes) if pipe == self.pipes[0]]
        rows = [[layer for c in own for layer in self._layers[row[c]]] for row in self.placement.parts]
        return tuple(tuple(tuple(n for n in row if self.order[n] == k) for k in range(self.num_kinds)) for row in rows)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Slots of each kind on a stage, without the copies of further pipes."""
        return tuple(max(len(row[k]) for row in self.held) for k in range(self.num_kinds))

    @cached_property
    def chunks(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """`chunks[stage][chunk]`: its layers in the order in which it runs them, each as (kind, slot).

        Slots of the n-th further pipe come after those of the ones before it.
        """
        rows = range(self.num_stages)
        return tuple(tuple(self._chunk(r, c) for c in range(self.placement.num_chunks)) for r in rows)

    @property
    def one_layer_chunks(self) -> bool:
        """Whether every chunk has exactly one layer."""
        return set(self.cuts) == {1}

    def _chunk(self, stage: int, chunk: int) -> tuple[tuple[int, int], ...]:
        pipe = self.placement.pipes[chunk]
        source = stage if pipe == self.pipes[0] else self.mirrors[pipe][stage]
        first = self.pipes.index(pipe)
        layers = self._layers[self.placement.parts[stage][chunk]]
        slot = lambda n, k: first * self.slots[k] + self.held[source][k].index(n)
        return tuple((self.order[n], slot(n, self.order[n])) for n in layers)

    def to_stages(self, kind: int, leaf):
        """[layers of the kind, ...] in the model's order -> [P * slots, ...] in stage order, zeros in empty slots."""
        return jnp.take(leaf, self._sources(kind), axis=0, mode="fill", fill_value=0)

    def to_model(self, kind: int, leaf):
        """The way back from `to_stages`."""
        return jnp.take(leaf, np.argsort(self._sources(kind), kind="stable")[: self.count(kind)], axis=0)

    def count(self, kind: int) -> int:
        """Layers of the kind in the model."""
        return self.order.count(kind)

    def _sources(self, kind: int) -> np.ndarray:
        """For each slot the layer's number among its kind; the number of layers for an empty slot."""
        number = {n: i for i, n in enumerate(n for n, k in enumerate(self.order) if k == kind)}
        slots = [[number[n] for n in row[kind]] for row in self.held]
        return np.array([i for row in slots for i in row + [len(number)] * (self.slots[kind] - len(row))], np.int32)

    def __hash__(self):
        return hash((self.placement, self.order, self.cuts))


jax.tree_util.register_static(StageLayers)
