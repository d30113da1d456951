"""Figures of many layouts at once, as arrays: what one layer computes, keeps and sends for one micro-batch.

Most layouts of a search are alike in what a layer does. The scalar functions of `layouts.work`, `layouts.activations` and
`layouts.network` are asked once for each case that differs, and the answers are spread over the layouts.

n: layouts, R: remat policies.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from layouts import network
from layouts.activations import Cut, awaited, kept_bytes, tensors
from layouts.cost import Job, op_seconds, rerun_seconds, work_seconds
from layouts.layout import Layout
from layouts.messages import Message
from layouts.model import Layer, MoE, products
from layouts.space import Mesh
from layouts.work import Share, head_ops, layer_ops
from moejax.axes import MESH_AXES

# Bytes at which the time of a message is taken to be a straight line: of several device classes the slowest counts there.
_LARGE = 1e9


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of a message: `latency` + `per_byte` x bytes, arrays [n]; never more than `network.seconds` says."""

    latency: np.ndarray
    per_byte: np.ndarray

    def __call__(self, size: Any, times: Any = 1) -> Any:
        """Seconds of `times` messages of that many bytes."""
        return times * self.latency + self.per_byte * (times * size)


class Case(NamedTuple):
    """What a layer's work depends on.

    Attributes:
      divisor: parts of the whole batch that a device's micro-batch is one of.
      sequence: whether what the tensor axis leaves whole is divided too.
      tensor: parts of heads and dense widths.
      expert_tensor: parts of an expert's width.
      shards: devices that the experts are divided over.
      streams: whether the experts go round instead of the rows.
    """

    divisor: int
    sequence: bool
    tensor: int
    expert_tensor: int
    shards: int
    streams: bool


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """Of one layer and one micro-batch, forward and backward, on one device.

    Attributes:
      work: seconds of forward and backward.
      rerun: seconds of what runs again, by remat.
      kept: bytes, by remat.
      again: bytes that the backward makes again, by remat.
      rows: of its experts.
      awaited: bytes that its weights' gradients wait for between B and W, by remat.
    """

    work: float
    rerun: tuple[float, ...]
    kept: tuple[float, ...]
    again: tuple[float, ...]
    rows: float
    awaited: tuple[float, ...]


class Figures:
    """Scalars by case, remembered, and lines by mesh."""

    def __init__(self, job: Job, remats: Sequence[str]):
        """Args: job, what is searched for (its layout is not read); remats, the policies R."""
        self.job, self.remats = job, tuple(remats)
        self._layers: dict[tuple[int, Case], LayerFigures] = {}
        self._heads: dict[tuple[int, int], float] = {}

    def layer(self, kind: int, case: Case) -> LayerFigures:
        """Of the model's layers of that kind."""
        key = (kind, case)
        if key not in self._layers:
            self._layers[key] = self._layer(self.job.model.kinds[kind], case)
        return self._layers[key]

    def _share(self, layer: Layer, case: Case) -> Share:
        recipe, tokens = self.job.recipe, self.job.batch.tokens / case.divisor
        rows, moe = 0.0, layer.feed_forward
        if isinstance(moe, MoE):
            sent = tokens / (case.tensor if case.expert_tensor < case.tensor else 1)
            rows = (recipe.even if case.streams else recipe).expert_rows(moe, sent, 1 if case.streams else case.shards)
        shards = 1 if case.streams else case.shards
        seq, score = self.job.batch.seq, recipe.score_bytes
        return Share(tokens, seq, case.tensor, case.sequence, case.expert_tensor, shards, rows, score)

    def _layer(self, layer: Layer, case: Case) -> LayerFigures:
        job, recipe = self.job, self.job.recipe
        share = self._share(layer, case)
        ops = layer_ops(layer, job.model.d_model, share, recipe.compute_bytes)
        forward = [op_seconds(op, job.chip, job.number_format, job.gives) / job.speed for op in ops]
        moe_tokens = 1 / (case.tensor if case.expert_tensor < case.tensor else 1)
        rows = share.rows / share.tokens
        cut = Cut(case.tensor, case.sequence, case.expert_tensor, rows, moe_tokens, job.batch.seq)
        found = tensors(layer, job.model.d_model, recipe, cut)
        kept = [share.tokens * kept_bytes(found, remat) for remat in self.remats]
        whole = share.tokens * kept_bytes(found, "none")
        rerun = tuple(rerun_seconds(ops, forward, self.remats))
        again = tuple(whole - size for size in kept)
        results, operands = (share.tokens * size for size in awaited(layer, job.model.d_model, recipe, cut))
        waits = tuple(results + min(operands, size) for size in again)
        return LayerFigures(sum(work_seconds(ops, forward).values()), rerun, tuple(kept), again, share.rows, waits)

    def head(self, divisor: int, tensor: int) -> float:
        """Seconds of logits and loss of one micro-batch."""
        key = (divisor, tensor)
        if key not in self._heads:
            job = self.job
            share = Share(job.batch.tokens / divisor, job.batch.seq, tensor)
            ops = head_ops(job.model, share, job.recipe.compute_bytes)
            number_format = "fp32" if job.number_format == "fp32" else "bf16"
            took = (op_seconds(op, job.chip, number_format, job.gives) * (1 + op.backward) for op in ops)
            self._heads[key] = sum(took) / job.speed
        return self._heads[key]

    def line(self, meshes: Sequence[Mesh], kind: str, axes: tuple[str, ...], top_k: int = 1) -> Line:
        """The seconds of a kind of message over these axes of each mesh."""
        sizes = np.array([mesh.sizes for mesh in meshes]).reshape(-1, len(MESH_AXES))
        strides = np.cumprod(np.hstack([np.ones((len(meshes), 1), int), sizes[:, :0:-1]]), axis=1)[:, ::-1]
        of = [MESH_AXES.index(name) for name in axes]
        where = np.hstack([sizes[:, of], np.where(sizes[:, of] > 1, strides[:, of], 0)])
        packed = where @ (np.int64(1) << np.arange(where.shape[1]) * (62 // max(1, where.shape[1])))
        _, first, which = np.unique(packed, return_index=True, return_inverse=True)
        found = np.array([self._tangent(meshes[index].layout, kind, axes, top_k) for index in first.tolist()]).reshape(-1, 2)
        return Line(*found[which.reshape(-1)].T)

    def _tangent(self, layout: Layout, kind: str, axes: tuple[str, ...], top_k: int) -> tuple[float, float]:
        group, links = math.prod(getattr(layout, name) for name in axes), self.job.gives.links
        if group == 1:
            return 0.0, 0.0
        message = Message("bound", kind, axes, group, _LARGE, 1, "forward")
        larger = dataclasses.replace(message, bytes=2 * _LARGE)
        low, high = (network.seconds(self.job.cluster, layout, one, links, top_k) for one in (message, larger))
        slope = (high - low) / _LARGE
        return low - slope * _LARGE, slope


@functools.cache
def group_numbers(layer: Layer, d: int, tensor: int, expert_tensor: int, shards: int) -> dict[str, float]:
    """Numbers of a layer's matrices on one device, by group, before fsdp divides them (biases of split rows are whole)."""
    found: dict[str, float] = {}
    for product in products(layer, d):
        expert = product.group == "experts"
        cut = product.parts(expert_tensor if expert else tensor) * (shards if expert else 1)
        found[product.group] = found.get(product.group, 0.0) + (product.weights + product.biases) / cut
    return found
