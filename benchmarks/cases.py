"""What the layer's benchmarks share: shapes, tokens whose routing is known, and the products that no layer can do without.

Shape legend. T: tokens, d: model width, f: expert width, k: experts per token, E: experts. All float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax

# The layer that drops nothing, as a user would ask for it on one device.
DROPLESS: dict[str, Any] = {"capacity_factor": None}
# Random logits [T, E] that make a load.
Load = Callable[[np.random.Generator, "Shape"], np.ndarray]
# Added to the logits of the experts that are to be chosen: far above the deviation, 1, of what it is added to.
MARGIN = 10.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer and its tokens."""

    num_tokens: int
    d_model: int
    d_ff: int
    top_k: int
    num_experts: int

    def config(self, **settings: Any) -> moejax.MoEConfig:
        """The layer of this shape, with other settings given."""
        sizes = {name: getattr(self, name) for name in ("d_model", "d_ff", "top_k", "num_experts")}
        return moejax.MoEConfig(**sizes, dtype="float32", **settings)

    @property
    def num_rows(self) -> int:
        """T * k."""
        return self.num_tokens * self.top_k

    def columns(self) -> dict[str, int]:
        """The shape as columns of a table."""
        return {"T": self.num_tokens, "d": self.d_model, "f": self.d_ff, "k": self.top_k, "E": self.num_experts}


SHAPES = (Shape(2048, 256, 512, 2, 8), Shape(2048, 256, 512, 2, 64), Shape(2048, 512, 1024, 8, 64))


def even(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Logits [T, E] that give every expert the same number of tokens, in random order."""
    expert = (np.arange(shape.num_rows) % shape.num_experts).reshape(-1, shape.top_k)
    return _chosen(rng, shape, rng.permutation(expert))


def worst(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Logits that send every token to the same k experts, spread over all."""
    expert = np.arange(shape.top_k) * (shape.num_experts // shape.top_k) + 1
    return _chosen(rng, shape, np.tile(expert, (shape.num_tokens, 1)))


def uniform(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Logits under which each token draws its k experts without replacement, all equally likely."""
    return rng.gumbel(size=(shape.num_tokens, shape.num_experts))


def zipf(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """The same with an expert's likelihood 1 / its rank: Zipf's law of exponent 1. Expert 0 ranks first, E - 1 last."""
    return uniform(rng, shape) - np.log(1 + np.arange(shape.num_experts))


def _chosen(rng, shape, expert):
    logits = rng.standard_normal((shape.num_tokens, shape.num_experts))
    np.put_along_axis(logits, expert, np.take_along_axis(logits, expert, 1) + MARGIN, 1)
    return logits


def tokens(shape: Shape, load: Load) -> jax.Array:
    """[1, T, d]: random features, the first E of which are the token's logits under the router of `weights`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, shape.num_tokens, shape.d_model))
    x[0, :, : shape.num_experts] = load(rng, shape)
    return jnp.asarray(x, jnp.float32)


def weights(shape: Shape) -> dict[str, jax.Array]:
    """The layer's parameters by name: a router that reads a token's first E features, normal experts."""
    rng = np.random.default_rng(1)
    wide, narrow = (shape.num_experts, shape.d_model, shape.d_ff), (shape.num_experts, shape.d_ff, shape.d_model)
    draw = lambda size: jnp.asarray(rng.standard_normal(size) / size[1] ** 0.5, jnp.float32)
    return {
        "router": jnp.eye(shape.d_model, shape.num_experts),
        "expert_up": draw(wide),
        "expert_gate": draw(wide),
        "expert_down": draw(narrow),
    }


def layer(cfg: moejax.MoEConfig, rules: moejax.AxisRules = moejax.AxisRules()) -> Callable:
    """(weights, x) -> (y, the weighted losses)."""

    def forward(params, x):
        y, stats = moejax.moe(params, x, None, None, cfg=cfg, rules=rules)
        return y, stats.loss(cfg)

    return forward


def products(params, rows):
    """(weights, rows [E', r, d] grouped already) -> (y, 0): SwiGLU by one batched product a weight.

    For the first E' experts.
    """
    up, gate, down = (params[f"expert_{name}"][: rows.shape[0]] for name in ("up", "gate", "down"))
    hidden = jax.nn.silu(jnp.einsum("erd,edf->erf", rows, gate)) * jnp.einsum("erd,edf->erf", rows, up)
    return jnp.einsum("erf,efd->erd", hidden, down), jnp.zeros(())


def grouped(shape: Shape, num_groups: int, num_rows: int) -> jax.Array:
    """[groups, rows, d] random rows for `products`."""
    return jax.random.normal(jax.random.key(2), (num_groups, num_rows, shape.d_model))


def with_gradients(forward: Callable) -> Callable:
    """Outputs and the gradients of every argument, from a cotangent that depends on the output."""

    def loss(params, x):
        y, extra = forward(params, x)
        return jnp.square(y).mean() + extra, y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


DIRECTIONS = {"forward": jax.jit, "forward+backward": with_gradients}


def bound(fn: Callable, *args: Any) -> Callable[[], Any]:
    """fn(*args), to be called later."""
    return lambda: fn(*args)
