"""The layers that the tests of sharded paths run: a dozen configurations and shapes, each compiled once.

Inputs are multiples of 1/64, so that every logit is exact in float32 whatever the order of its additions: routing is
then bit-equal on all paths, and where it is not, that is a bug and no rounding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax import AxisRules, BiasState, MoEConfig, SigmoidBias, Softmax, make_mesh, moe
from moejax.layer import param_shapes

TOLERANCE = 1e-5
MESHES = {
    "one": {},
    "data8": {"data": 8},
    "expert8": {"expert": 8},
    "data2_expert4": {"data": 2, "expert": 4},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "data2_fsdp2_tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SKEWS = ("random", "one_expert", "empty_experts", "ties", "extreme")
PADDINGS = ("none", "random", "tail", "one_valid", "all")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A configuration and the [batch, seq] it is compiled for."""

    cfg: MoEConfig
    shape: tuple[int, int]


def _layer(shape, **kwargs):
    base = {"d_model": 8, "d_ff": 8, "num_experts": 8, "num_senders": 8, "dtype": "float32", "aux_loss": 0.5}
    return Layer(MoEConfig(**{**base, "z_loss": 0.1, **kwargs}), shape)


LAYERS = {
    # 3 x 5 tokens: no axis divides them; two a sender, cells of one row.
    "odd": _layer((3, 5), num_experts=16, top_k=2, capacity_factor=1.0),
    "shared": _layer(
        (4, 12), top_k=3, capacity_factor=None, router=SigmoidBias(scale=2.5), num_shared_experts=1,
        activation="gelu", loss_scope="sequence",
    ),
    "many_senders": _layer(
        (4, 16), top_k=1, capacity_factor=0.5, router=Softmax(renormalise=False), num_senders=16,
        drop_by="weight", activation="relu2",
    ),
    "every_expert": _layer(
        (2, 20), top_k=8, capacity_factor=0.5, drop_by="weight", num_shared_experts=2, activation="geglu",
        router=SigmoidBias(renormalise=False),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What one run takes, whole and in NumPy."""

    params: dict[str, np.ndarray]
    x: np.ndarray
    valid: np.ndarray
    dy: np.ndarray
    bias: np.ndarray

    def garbage(self) -> "Inputs":
        """The same with NaN and infinities in every padded row of x and of its output's cotangent."""
        rubbish = np.where(np.arange(self.x.shape[-1]) % 2, np.nan, np.inf).astype(np.float32)
        dirty = [np.where(self.valid[..., None], part, rubbish) for part in (self.x, self.dy)]
        return dataclasses.replace(self, x=dirty[0], dy=dirty[1])


def draw(layer: Layer, seed: int, skew: str, padding: str) -> Inputs:
    """Inputs whose routing is skewed as named: feature 0 of x is constant, and its router row pulls tokens."""
    rng = np.random.default_rng(seed)
    cfg = layer.cfg
    grid = lambda *shape: (rng.integers(-128, 129, shape) / 64).astype(np.float32)
    params = {name: grid(*shape) for name, (shape, _) in param_shapes(cfg).items()}
    x = grid(*layer.shape, cfg.d_model)
    x[..., 0] = 2.0
    router, favourite = params["router"], rng.integers(cfg.num_experts)
    if skew == "one_expert":
        router /= 16  # gently: weights that all round to 1 would be dropped by the noise of their rounding
        router[0, favourite] += 2
    if skew == "empty_experts":
        router[0, rng.permutation(cfg.num_experts)[: cfg.num_experts // 2]] = -16
    if skew == "ties":
        router[:] = 0
    if skew == "extreme":
        router *= 4096
    valid = _validity(rng, layer.shape, padding)
    bias = grid(cfg.num_experts) / 4
    x, dy = (np.where(valid[..., None], part, 0) for part in (x, grid(*layer.shape, cfg.d_model)))
    return Inputs(params, x, valid, dy, bias)


def _validity(rng, shape, padding):
    valid = np.zeros(shape, bool)
    if padding == "none":
        valid[:] = True
    if padding == "random":
        valid = rng.random(shape) < 0.6
    if padding == "tail":
        valid = np.arange(shape[1]) < rng.integers(1, shape[1], (shape[0], 1))
    if padding == "one_valid":
        valid.flat[rng.integers(valid.size)] = True
    return valid


def step(cfg: MoEConfig, rules: AxisRules, params, x, valid, state, dy):
    """Outputs, stats, all gradients and their global norm."""

    def loss(params, x):
        y, stats = moe(params, x, valid, state, cfg=cfg, rules=rules)
        return (y, stats.loss(cfg)), stats

    (y, _), pull, stats = jax.vjp(loss, params, x, has_aux=True)
    d_params, d_x = pull((dy, jnp.ones(())))
    return {"y": y, "stats": stats, "d_params": d_params, "d_x": d_x, "norm": optax.tree.norm(d_params)}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer runs: no mesh at all, or a mesh and the rules that fit it."""

    mesh: jax.sharding.Mesh | None = None
    rules: AxisRules = AxisRules()

    def put(self, cfg: MoEConfig, inputs: Inputs):
        """The arguments of `step`, laid out as a training program would have them."""
        state = BiasState(jnp.asarray(inputs.bias), 1e-3) if isinstance(cfg.router_rule, SigmoidBias) else None
        x, valid, dy = inputs.x, inputs.valid, inputs.dy
        if self.mesh is None:
            return inputs.params, x, valid, state, dy
        at = lambda value, spec: jax.device_put(value, NamedSharding(self.mesh, spec))
        specs = {name: self.rules.spec(logical, self.mesh) for name, (_, logical) in param_shapes(cfg).items()}
        params = {name: at(value, specs[name]) for name, value in inputs.params.items()}
        batch = self.rules.spec(("batch",), self.mesh) if x.shape[0] % self.token_shards == 0 else P()
        return params, at(x, batch), at(valid, batch), state, at(dy, batch)

    @property
    def token_shards(self) -> int:
        """Devices that tokens are sharded over."""
        return int(np.prod([self.mesh.shape[name] for name in self.rules.axes("batch", self.mesh)], dtype=int))


def place(mesh_name: str) -> Place:
    """The place of that name in MESHES."""
    return Place(make_mesh(**MESHES[mesh_name])) if MESHES[mesh_name] else Place()


@functools.cache
def _compiled(cfg: MoEConfig, rules: AxisRules):
    return jax.jit(functools.partial(step, cfg, rules))


def run(layer: Layer, where: Place, inputs: Inputs):
    """`step` of the inputs there; compiled once per layer and place."""
    args = where.put(layer.cfg, inputs)
    if where.mesh is None:
        return _compiled(layer.cfg, where.rules)(*args)
    with jax.set_mesh(where.mesh):
        return _compiled(layer.cfg, where.rules)(*args)


def reference(layer: Layer, inputs: Inputs):
    """The one-device path, no mesh: what every sharded path must equal."""
    plain = {"exchange": "all_to_all", "num_chunks": 1, "weigh_at": "auto", "exchange_by": "auto"}
    return run(dataclasses.replace(layer, cfg=dataclasses.replace(layer.cfg, **plain)), Place(), inputs)


def assert_close(got, want, tolerance: float = TOLERANCE):
    """Every leaf finite, and within `tolerance` of its counterpart, relative to that tensor's largest entry."""
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        name = jax.tree_util.keystr(path)
        assert mine.shape == theirs.shape, name
        assert np.isfinite(mine).all(), f"{name} is not finite"
        if np.issubdtype(theirs.dtype, np.integer):
            np.testing.assert_array_equal(mine, theirs, name)
            continue
        worst, largest = np.abs(mine - theirs).max(initial=0), np.abs(theirs).max(initial=0)
        assert worst <= tolerance * largest, f"{name}: off by {worst}, largest entry {largest}"


def assert_replicas_equal(tree):
    """Devices that hold the same part of an array hold the same bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert first.setdefault(str(shard.index), data) == data, jax.tree_util.keystr(path)
