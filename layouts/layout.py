"""Layout: how a step is spread over devices and over time. Impossible ones are refused in the constructor."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from layouts.errors import InputError
from layouts.hardware import unknown
from layouts.schedules import MAKERS
from moejax import AxisRules, make_mesh
from moejax.axes import MESH_AXES
from moejax.codec import CODECS
from moejax.config import EXCHANGES
from moejax.transformer import REMAT_POLICIES

SCHEMA = 1
SCHEDULES = ("none", *(name for name in MAKERS if name != "auto"))
GROUPS = ("attention", "dense", "router", "experts", "shared", "embedding", "head")
POLICIES = ("gather", "keep", "offload")
MOMENTS = ("with_parameters", "over_data")
# Besides the executor's policies: "selective" keeps all but attention scores (arXiv 2205.05198); "norm+activation" and the
# like recompute these kinds of tensors and keep the rest.
RECOMPUTED = ("norm", "activation", "scores", "latent")
REMATS = (*REMAT_POLICIES, "selective")
BATCH_AXES = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way of running a step.

    Attributes:
      data: replicas; each works on its own part of the batch.
      fsdp: parts that parameters are divided into along the model width, gathered before use; divides the batch too.
      stage: pipeline stages.
      expert: a part of the batch and, by default, of the experts.
      tensor: parts of heads, hidden widths and vocabulary.
      context: parts of each sequence.
      expert_axes: the axes that experts are divided over: several fold them over devices that attention uses otherwise.
      num_microbatches: parts of the batch, worked through one after the other, or by the pipeline.
      microbatch_overlap: micro-batches that walk through the layers together.
      schedule: of the pipeline, "none" without one.
      stage_chunks: V, chunks of the model on a stage.
      unit: U of `zeropp`.
      cuts: layers of each part of the model, V * stage of them in the model's order; None: as even as can be.
      exchange: how rows cross the expert axes, as in MoEConfig.
      codec: how they travel: a name, or a pair (forward, backward).
      num_chunks: parts in which they cross.
      remat: what a layer keeps for its backward: a name from `REMATS`, or kinds that it does not, joined by "+".
      sequence: what tensor parallelism leaves whole (norms, residuals) is divided over the tensor axis along the sequence.
      moments: the optimizer's moments (and master weights) lie "with_parameters", or are divided "over_data": those of
        dense parameters over data, expert and context, those of experts over the devices that hold the same experts.
      policy: (group, policy) pairs for parameters that fsdp divides: "gather" for each use (the default), "keep" once
        gathered until the step ends, "offload" to the host.
      excluded: devices that are not to be used.
    """

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1
    expert_axes: tuple[str, ...] = ("expert",)
    num_microbatches: int = 1
    microbatch_overlap: int = 1
    schedule: str = "none"
    stage_chunks: int = 1
    unit: int | None = None
    cuts: tuple[int, ...] | None = None
    exchange: str = "all_to_all"
    codec: str | tuple[str, str] = "plain"
    num_chunks: int = 1
    remat: str = "none"
    sequence: bool = False
    moments: str = "with_parameters"
    policy: tuple[tuple[str, str], ...] = ()
    excluded: tuple[int, ...] = ()

    def __post_init__(self):
        for name in (*MESH_AXES, "num_microbatches", "microbatch_overlap", "stage_chunks", "num_chunks"):
            _positive(name, getattr(self, name))
        self._check_names()
        self._check_axes()
        self._check_pipeline()
        if type(self.sequence) is not bool:
            raise InputError(f"layout sequence={self.sequence!r}: needs true or false")
        for index in self.excluded:
            if type(index) is not int or index < 0:
                raise InputError(f"layout excluded={self.excluded!r}: needs device indices of at least 0")
        if len(set(self.excluded)) < len(self.excluded):
            raise InputError(f"layout excluded={self.excluded!r}: names a device twice")

    def _check_names(self) -> None:
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("exchange", self.exchange, EXCHANGES)
        _one_of("moments", self.moments, MOMENTS)
        if len(self.codecs) != 2:
            raise InputError(f"layout codec={self.codec!r}: needs a name or a pair (forward, backward)")
        for name in self.codecs:
            _one_of("codec", name, tuple(CODECS))
        kinds = self.remat.split("+") if isinstance(self.remat, str) else [self.remat]
        if not set(kinds) <= set(RECOMPUTED):
            _one_of("remat", self.remat, (*REMATS, *RECOMPUTED))
        for group, policy in self.policy:
            _one_of("policy of", group, GROUPS)
            _one_of(f"policy of {group}", policy, POLICIES)

    def _check_axes(self) -> None:
        legal = ("data", "expert", "tensor", "context")
        if not isinstance(self.expert_axes, tuple) or not self.expert_axes or len({*self.expert_axes}) < len(self.expert_axes):
            raise InputError(f"layout expert_axes={self.expert_axes!r}: needs one or more of {', '.join(legal)}, each once")
        for name in self.expert_axes:
            _one_of("expert_axes", name, legal)

    def _check_pipeline(self) -> None:
        parts = self.stage * self.stage_chunks
        if (self.schedule == "none") != (self.stage == 1):
            raise InputError(
                f"layout schedule={self.schedule!r} with stage={self.stage}: one stage needs 'none', several one of "
                f"{', '.join(SCHEDULES[1:])}"
            )
        if self.schedule == "none" and (self.stage_chunks > 1 or self.unit is not None):
            raise InputError(
                f"layout stage_chunks={self.stage_chunks}, unit={self.unit}: without a pipeline 1 and null are legal"
            )
        if self.schedule != "none":
            test, words = MAKERS[self.schedule].legal_chunks
            if not test(self.stage_chunks):
                raise InputError(f"layout stage_chunks={self.stage_chunks}: legal for {self.schedule} are {words}")
        if self.unit is not None:
            _positive("unit", self.unit)
            if not MAKERS[self.schedule].takes_unit:
                raise InputError(f"layout unit={self.unit}: schedule {self.schedule!r} has none; only zeropp has")
        if self.cuts is not None and (len(self.cuts) != parts or any(type(n) is not int or n < 0 for n in self.cuts)):
            raise InputError(f"layout cuts={self.cuts!r}: needs {parts} numbers of layers, one a part of the model")
        if self.num_microbatches % self.microbatch_overlap:
            raise InputError(
                f"layout microbatch_overlap={self.microbatch_overlap}: does not divide num_microbatches={self.num_microbatches}"
            )

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codec names, (forward, backward)."""
        return (self.codec, self.codec) if isinstance(self.codec, str) else tuple(self.codec)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis, in the order of the mesh."""
        return {name: getattr(self, name) for name in MESH_AXES}

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        """Parts that the sequences of a micro-batch are divided into."""
        return math.prod(getattr(self, name) for name in BATCH_AXES)

    @property
    def expert_shards(self) -> int:
        """Parts that the experts are divided into."""
        return math.prod(getattr(self, name) for name in self.expert_axes)

    @property
    def expert_tensor(self) -> int:
        """Parts that each expert's hidden width is divided into."""
        return 1 if "tensor" in self.expert_axes else self.tensor

    @property
    def dense_replicas(self) -> int:
        """Devices that hold the same dense parameters."""
        return self.data * self.expert * self.context

    @property
    def expert_replicas(self) -> int:
        """Devices that hold the same experts."""
        return math.prod(getattr(self, name) for name in ("data", "expert", "context") if name not in self.expert_axes)

    def policy_of(self, group: str) -> str:
        """What is done with the parameters of a group, one of `GROUPS`."""
        return dict(self.policy).get(group, "gather")

    def part_layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each part of the model.

        Raises:
          InputError: where the cuts do not add up to the model's layers, or there are more parts than layers.
        """
        parts = self.stage * self.stage_chunks
        if self.cuts is None and parts > num_layers:
            raise InputError(f"layout of {self.stage} stages x {self.stage_chunks} chunks: the model has {num_layers} layers")
        sizes = self.cuts or tuple(num_layers // parts + (i < num_layers % parts) for i in range(parts))
        if sum(sizes) != num_layers:
            raise InputError(f"layout cuts={self.cuts!r}: add up to {sum(sizes)}, the model has {num_layers} layers")
        ends = [sum(sizes[: i + 1]) for i in range(parts)]
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def to_mesh(
        self,
        devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs
    ) -> Mesh:
        """The mesh, over the devices that are not excluded.

        Args:
          devices: default all of `jax.devices()`.

        Raises:
          InputError: where there are too few.
        """
        devices = list(jax.devices() if devices is None else devices)
        left = [device for index, device in enumerate(devices) if index not in self.excluded]
        if len(left) < self.num_devices:
            without = f", {len(self.excluded)} of them excluded" if self.excluded else ""
            raise InputError(f"layout of {self.num_devices} devices: there are {len(devices)}{without}")
        sizes: dict[str, Any] = {name: size for name, size in self.sizes.items() if size > 1}
        return make_mesh(devices=left, **sizes)

    def rules(self) -> AxisRules:
        """The rules under which moejax runs this layout on its mesh."""
        axes = self.expert_axes[0] if len(self.expert_axes) == 1 else self.expert_axes
        return AxisRules(expert=axes)

    def not_runnable(self) -> tuple[str, ...]:
        """What of the layout moejax's executor does not do; empty where it can run it."""
        lacking = {
            "micro-batches that walk together in a pipeline": self.stage > 1 and self.microbatch_overlap > 1,
            "remat 'offload' in a pipeline": self.stage > 1 and self.remat == "offload",
            "a context axis": self.context > 1,
            "experts folded over tensor or context": bool({"tensor", "context"} & {*self.expert_axes}),
            "a hierarchical exchange over one expert axis": self.exchange == "hierarchical" and len(self.expert_axes) < 2,
            "sequence parallelism": self.sequence,
            "moments over data": self.moments == "over_data" and self.dense_replicas > 1,
            f"remat {self.remat!r}": self.remat not in REMAT_POLICIES,
            "policies other than gather": any(policy != "gather" for _, policy in self.policy),
        }
        return tuple(reason for reason, lacks in lacking.items() if lacks)

    def to_json(self) -> dict[str, Any]:
        """A JSON value: {"schema": 1, "mesh": {axis: devices}, ...}; what is as by default is left out."""
        entry: dict[str, Any] = {"schema": SCHEMA, "mesh": {name: size for name, size in self.sizes.items() if size > 1}}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in MESH_AXES and value != field.default:
                entry[field.name] = dict(value) if field.name == "policy" else value
        return json.loads(json.dumps(entry))

    @classmethod
    def from_json(cls, entry: Any) -> "Layout":
        """The layout that `to_json` wrote.

        Raises:
          InputError: for another schema, unknown keys, or a layout that cannot be.
        """
        if not isinstance(entry, Mapping):
            raise InputError(f"layout {entry!r}: needs a table with the keys schema and mesh")
        if type(entry.get("schema")) is not int or entry["schema"] != SCHEMA:
            raise InputError(
                f"layout of schema {entry.get('schema')!r}: this version reads schema {SCHEMA}; search again to make one"
            )
        fields = {key: value for key, value in entry.items() if key not in ("schema", "mesh")}
        mesh = entry.get("mesh")
        if not isinstance(mesh, Mapping):
            raise InputError(f"layout mesh={mesh!r}: needs a table of axes, as in {{'data': 2, 'expert': 4}}")
        known = [field.name for field in dataclasses.fields(cls) if field.name not in MESH_AXES]
        for what, names, legal in (("mesh axis", mesh, MESH_AXES), ("key", fields, known)):
            for name in names:
                if name not in legal:
                    raise InputError(unknown(f"layout {what}", str(name), legal))
        return cls(**mesh, **{key: _read(key, value) for key, value in fields.items()})


def load_layout(text: str) -> tuple[Layout, dict[str, Any]]:
    """A layout from "FILE.json" or "FILE.json#RANK": a layout, or what `search` wrote, whose best layout is rank 1.

    Returns:
      The layout and the whole file's table.

    Raises:
      InputError: where the file is none, has no such rank, or holds a layout that cannot be.
    """
    name, _, rank = text.partition("#")
    try:
        entry = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"layout file {name!r}: {error}") from error
    if not isinstance(entry, dict) or "layouts" not in entry:
        if rank:
            raise InputError(f"layout file {text!r}: holds one layout, so it has no ranks")
        return Layout.from_json(entry), entry
    found = entry["layouts"]
    if not isinstance(found, list) or not (rank or "1").isdigit() or not 1 <= int(rank or 1) <= len(found):
        count = len(found) if isinstance(found, list) else 0
        raise InputError(f"layout file {text!r}: has {count} layouts; legal ranks are 1 to {count}")
    chosen = found[int(rank or 1) - 1]
    return Layout.from_json(chosen.get("layout") if isinstance(chosen, dict) else chosen), entry


def _read(key: str, value: Any) -> Any:
    """A JSON value as the field holds it."""
    if key == "policy":
        if not isinstance(value, Mapping):
            raise InputError(f"layout policy={value!r}: needs a table, as in {{'experts': 'keep'}}")
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InputError(f"layout {name}={value!r}: needs a whole number of at least 1")


def _one_of(name: str, value: object, legal: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in legal:
        raise InputError(unknown(f"layout {name}", str(value), legal))
