"""Mesh axis names, make_mesh, and AxisRules: from a logical axis to the mesh axes of whatever mesh the user has."""

import dataclasses
import difflib
import math
from collections.abc import Sequence

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

MESH_AXES = ("data", "fsdp", "stage", "expert", "tensor", "context")
Axis = str | tuple[str, ...] | None


def make_mesh(
    *,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]  # jaxlib has no stubs
    axis_type: AxisType = AxisType.Auto,
    **sizes: int,
) -> Mesh:
    """A mesh over the first devices, its axes in the order of `MESH_AXES`.

    Args:
      devices: the devices to use; default all of `jax.devices()`.
      axis_type: Auto (the compiler propagates shardings) or Explicit.
      **sizes: devices along each axis, e.g. `data=2, expert=4`; axes left out are not part of the mesh. No sizes at all
        makes a mesh of one device with the axis `data`.

    Returns:
      A mesh of prod(sizes) devices; with fewer than there are, the first ones.

    Raises:
      ValueError: for an unknown axis, a size below 1, or more devices than there are.
    """
    sizes = sizes or {"data": 1}
    for name, size in sizes.items():
        if name not in MESH_AXES:
            near = difflib.get_close_matches(name, MESH_AXES, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"mesh axis {name!r}: legal axes are {', '.join(MESH_AXES)}{hint}")
        if type(size) is not int or size < 1:
            raise ValueError(f"mesh axis {name}={size!r}: needs a whole number of at least 1")
    if not isinstance(axis_type, AxisType):
        raise ValueError(f"axis_type={axis_type!r}: legal values are AxisType.Auto, AxisType.Explicit")
    names = tuple(name for name in MESH_AXES if name in sizes)
    shape = tuple(sizes[name] for name in names)
    devices = list(jax.devices() if devices is None else devices)
    if math.prod(shape) > len(devices):
        asked = " x ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
        raise ValueError(f"mesh of {asked} = {math.prod(shape)} devices: there are {len(devices)}")
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices[: math.prod(shape)])


def current_mesh() -> AbstractMesh:
    """The mesh of `jax.set_mesh`, or of the shard_map around this call; an empty one where there is none."""
    return jax.sharding.get_abstract_mesh()


def platform() -> str:
    """What the current mesh's devices are, "cpu", "gpu" or "tpu"; without a mesh, those of jax's default backend.

    Asked of the mesh, so that a program compiled here for other hardware gets what that hardware would get.
    """
    device = current_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


@dataclasses.dataclass(frozen=True)
class ShardAxes:
    """The mesh axes (larger than one device) that one layer's work is spread over; all empty on one device.

    Per-shard code takes this and nothing else of a mesh.

    Attributes:
      tokens: axes that tokens are sharded over.
      expert: axes that experts are sharded over, each one of `tokens`.
      embed: axes that the model width of *parameters* is sharded over (gathered before use: FSDP).
      mlp: axes that the hidden width is sharded over (partial sums: tensor parallelism).
    """

    tokens: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every axis named, once."""
        return tuple(dict.fromkeys(self.tokens + self.expert + self.embed + self.mlp))


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axes each logical axis is sharded over: a name, a tuple of names (folding), or None.

    Axes that the current mesh lacks are passed over, so one set of rules serves many meshes; but a mesh axis that no rule
    names is refused, because the layer would silently repeat all its work on it. Under a user's own axis names:
    `AxisRules(batch=("dp", "ep"), expert="ep", embed=None, mlp="tp")`.

    Attributes:
      batch: tokens (the batch dimension of activations). Must include every expert axis.
      expert: experts.
      embed: the model width of parameters, gathered before use (FSDP). Activations are never sharded over it.
      mlp: hidden width of feed-forwards and experts (tensor parallelism).
      heads: attention heads, query and key-value.
      vocab: the vocabulary of the embedding and the logits.
      replicated: mesh axes over which repeating the work is intended.
    """

    batch: Axis = ("data", "fsdp", "expert")
    expert: Axis = "expert"
    embed: Axis = "fsdp"
    mlp: Axis = "tensor"
    heads: Axis = "tensor"
    vocab: Axis = "tensor"
    replicated: Axis = "stage"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            names = value if isinstance(value, tuple) else (value,)
            if value is not None and not all(isinstance(name, str) for name in names):
                raise ValueError(f"AxisRules {field.name}={value!r}: needs a mesh axis, a tuple of them, or None")
        for logical in ("heads", "vocab", "mlp"):
            both = set(as_tuple(getattr(self, logical))) & set(as_tuple(self.embed))
            if both:
                raise ValueError(f"AxisRules {logical}={getattr(self, logical)!r}: {sorted(both)} shard embed already")

    def axes(self, logical: str | None, mesh: AbstractMesh | Mesh) -> tuple[str, ...]:
        """The axes of `mesh` larger than one device that the logical axis is sharded over."""
        if logical is None:
            return ()
        return tuple(name for name in as_tuple(getattr(self, logical)) if mesh.shape.get(name, 1) > 1)

    def spec(self, logical: Sequence[str | None], mesh: AbstractMesh | Mesh) -> P:
        """The PartitionSpec on `mesh` of an array whose dimensions carry these logical axes."""
        return P(*(_entry(self.axes(name, mesh)) for name in logical))

    def resolve(self, mesh: AbstractMesh | Mesh) -> ShardAxes:
        """The layer's axes on `mesh`.

        Raises:
          ValueError: where a mesh axis is named by no rule, tokens are not sharded over an expert or embed axis, tokens
            are sharded over an mlp axis, or an axis serves both experts and embed.
        """
        kinds = {kind for kind in mesh.axis_types if kind != AxisType.Manual}
        if len(kinds) > 1:
            raise ValueError(f"mesh axis types {mesh.axis_types}: needs all Auto or all Explicit")
        named = {name for field in dataclasses.fields(self) for name in as_tuple(getattr(self, field.name))}
        for name, size in mesh.shape.items():
            if size > 1 and name not in named:
                raise ValueError(
                    f"mesh axis {name!r} of {size} devices: no rule names it, so all work would be repeated on it; "
                    f"name it in AxisRules (batch, expert, embed, mlp ...), or in AxisRules(replicated=...)"
                )
        found = {name: self.axes(name, mesh) for name in ("batch", "expert", "embed", "mlp")}
        for logical in ("expert", "embed", "mlp"):
            for name in found[logical]:
                self._check_against_batch(logical, name, found)
        return ShardAxes(found["batch"], found["expert"], found["embed"], found["mlp"])

    def _check_against_batch(self, logical: str, name: str, found: dict[str, tuple[str, ...]]) -> None:
        """Partial sums over an mlp axis add up one token's parts; over the other axes tokens must differ."""
        batch, have = found["batch"], f"AxisRules.batch is {self.batch!r}, legal would be"
        if logical == "mlp" and name in batch:
            raise ValueError(f"mlp axis {name!r}: tokens must not be sharded over it; {have} {_without(batch, name)!r}")
        if logical != "mlp" and name not in batch:
            raise ValueError(f"{logical} axis {name!r}: tokens must be sharded over it too; {have} {(*batch, name)!r}")
        if logical == "embed" and name in found["expert"]:
            raise ValueError(f"embed axis {name!r}: experts are sharded over it; legal are {_without(batch, name)!r}")


def as_tuple(axis: Axis) -> tuple[str, ...]:
    """An axis as a tuple of names."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


def _entry(names: tuple[str, ...]) -> Axis:
    return names[0] if len(names) == 1 else (names or None)


def mesh_size(mesh: AbstractMesh | Mesh, names: Sequence[str]) -> int:
    """Devices along these axes of `mesh` together."""
    return math.prod(mesh.shape[name] for name in names)


def axis_size(names: Sequence[str]) -> int:
    """Devices along these axes together, inside shard_map; 1 for none."""
    return math.prod(lax.axis_size(name) for name in names)


def axis_index(names: Sequence[str]) -> jax.Array | int:
    """This shard's position along these axes together, first axis slowest; 0 for none."""
    return lax.axis_index(tuple(names)) if names else 0


def sum_over(tree, names: Sequence[str]):
    """`lax.psum` over these axes; the tree itself for none."""
    return lax.psum(tree, tuple(names)) if names else tree


def vary_over(tree, names: Sequence[str]):
    """Marks the leaves as different on every shard along these axes, where they are not yet.

    A no-op in the forward; the backward sums the cotangent over the axes added *here*, so where the mark stands decides
    which tensor, and in which dtype, that sum moves.
    """

    def mark(leaf):
        new = tuple(name for name in names if name not in varying(leaf))
        return lax.pcast(leaf, new, to="varying") if new else leaf

    return jax.tree.map(mark, tree) if names else tree


def vary_alike(tree):
    """All of it marked as varying over the axes that any of its leaves does: what a custom_vjp needs of its arguments.

    Gradients of the leaves marked here are summed over those axes.
    """
    return vary_over(tree, sorted(frozenset().union(*map(varying, jax.tree.leaves(tree)))))


def varying(leaf) -> frozenset[str]:
    """The manual axes that jax knows the value to differ over. The attribute's name depends on the jax version."""
    return varying_type(jax.typeof(leaf))


def varying_type(kind) -> frozenset[str]:
    """The same for a value's type."""
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def check_divides(what: str, size: int, names: Sequence[str], mesh: AbstractMesh | Mesh) -> None:
    """Raises ValueError unless the devices along these axes divide `size`, naming the nearest sizes that they do."""
    shards = mesh_size(mesh, names)
    if size % shards:
        near = sorted({max(shards, size // shards * shards), (size // shards + 1) * shards})
        legal = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(
            f"{what}={size} is not divisible by mesh axis {'+'.join(names)} of {shards} devices: "
            f"nearest {what} {' or '.join(map(str, near))}, or an axis of {', '.join(map(str, legal[:8]))} devices"
        )
