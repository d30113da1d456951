"""How routers balance the demo model from a skewed start: each one's load over its first steps.

`python -m tests.train.balancing` (8 virtual devices, some ten minutes on 2 cores) writes docs/balancing.md and its picture.
"""

import dataclasses
import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from moejax import Transformer
from moejax.routers import Queue, SigmoidBias, Softmax
from moejax.step import init_state, make_train_step
from train.config import RULES, TrainConfig
from train.configs.demo import demo
from train.data import place_batch, train_batches
from train.distributed import start_mesh
from train.optimizer import make_optimizer
from train.run import load_text

STEPS, LAST = 200, 20
# Logits that the experts' first tokens get on top, on average, from the first expert to the last.
SKEW = 3.0
PAGE = Path(__file__).parents[2] / "docs" / "balancing.md"
WAYS: dict[str, dict] = {
    "no balancing": {"router": Softmax(), "aux_loss": 0.0},
    "aux_loss=1e-2": {"router": Softmax(), "aux_loss": 1e-2},
    "SigmoidBias(rate=1e-2)": {"router": SigmoidBias(rate=1e-2), "aux_loss": 0.0},
    'SigmoidBias(rate=5e-2, rule="error")': {"router": SigmoidBias(rate=5e-2, rule="error"), "aux_loss": 0.0},
    "Queue(price=3e-2)": {"router": Queue(price=3e-2), "aux_loss": 0.0},
}


@functools.cache
def text():
    """The demo's."""
    return load_text(demo())


@functools.cache
def mesh():
    """The demo's, over virtual devices."""
    return start_mesh(demo().mesh)


def run(changes: dict) -> tuple[np.ndarray, np.ndarray]:
    """The demo, started skewed: ([steps, layers, experts] tokens; [steps] the loss)."""
    base = demo()
    moe = dataclasses.replace(base.model.moe, **changes)
    cfg = dataclasses.replace(base, model=dataclasses.replace(base.model, moe=moe))
    with jax.set_mesh(mesh()):
        return _run(cfg)


def fullest(tokens: np.ndarray) -> np.ndarray:
    """[..., layers, experts] tokens -> [...]: the fullest expert over its layer's mean, in the worse layer."""
    return (tokens / tokens.mean(-1, keepdims=True)).max((-2, -1))


def _run(cfg: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    optimizer, batches = make_optimizer(cfg), train_batches(text().train, cfg)
    state = init_state(cfg.model, optimizer, jax.random.key(cfg.seed), RULES)
    step = jax.jit(make_train_step(cfg.model, optimizer, 1, RULES), donate_argnums=0)
    batch = place_batch(next(batches), jax.sharding.get_mesh())
    state = dataclasses.replace(state, params=_skewed(cfg, state, batch))
    loads, losses = [], []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        loads.append(np.asarray(metrics["tokens_per_expert"], float))
        losses.append(float(metrics["loss"]))
        batch = place_batch(next(batches), jax.sharding.get_mesh())
    return np.array(loads), np.array(losses)


def _skewed(cfg: TrainConfig, state, batch):
    """The parameters with router columns along the tokens' mean, so that mean logits fall by `SKEW` over the experts."""
    model = nnx.merge(*_split(cfg, state))
    x, where = model.embedding[...].astype(jnp.float32)[batch["tokens"]], (batch["segment_ids"], batch["positions"])
    graphdef, stacked = nnx.split(model.stacks[0])
    router = state.params["stacks"][0]["blocks"][0]["feed_forward"]["router"]
    offset = SKEW * jnp.linspace(0.5, -0.5, router.shape[-1])
    for layer in range(cfg.model.num_layers):
        block = nnx.merge(graphdef, jax.tree.map(lambda leaf, layer=layer: leaf[layer], stacked)).blocks[0]
        mean = _normed(block, x, where).reshape(-1, x.shape[-1]).mean(0)
        router = router.at[layer].add(jnp.outer(mean / (mean @ mean), offset))
        x, _ = block(x, *where)
    state.params["stacks"][0]["blocks"][0]["feed_forward"]["router"] = router
    return state.params


def _split(cfg, state):
    graphdef = nnx.split(jax.eval_shape(lambda: Transformer(cfg.model, rules=RULES, rngs=nnx.Rngs(0))))[0]
    return graphdef, nnx.State({**state.params}), nnx.State({**state.router})


def _normed(block, x, where):
    """What the block's router sees."""
    return block.feed_forward_norm(x + block.attention(block.attention_norm(x), *where))


def page(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """The page, of each way's tokens and losses."""
    rows = []
    for name, (tokens, losses) in found.items():
        loads = fullest(tokens)
        end = loads[-LAST:]
        figures = [*loads[[0, 49, 99]], end.mean(), end.max(), fullest(tokens[-LAST:].sum(0))]
        rows.append(f"| `{name}` | {' | '.join(f'{figure:.2f}' for figure in figures)} | {losses[-LAST:].mean():.3f} |")
    return "\n".join([*_HEAD, *rows, "", "![load over steps](balancing.png)", ""])


_HEAD = f"""\
# Balancing from a skewed start

The demo model (2 layers of 8 experts, 2 a token), with its routers turned so that mean logits fall by {SKEW:g} from the first
expert to the last. The load is the fullest expert's tokens over its layer's mean, in the worse layer; "{STEPS}" is the mean of
the last {LAST} steps, "worst" the largest of them, "together" the load of those steps' tokens taken as one batch; the loss
is in nats a byte over the same steps. Written by `python -m tests.train.balancing`.

Without balancing the load stays above 3. Bias by error and queues have it under 1.6 by step 50, where bias by sign is still at
2. At the end single steps swing between 1.1 and 1.4, with one at 1.65: a bias knows the steps before, and while the learning
rate is high the router and the batches move on. So the mean of single steps stays just above the aim of 1.2 (1.21 and 1.23;
`rate=3e-2` gave 1.23, `1e-1` 1.21), while over 20 steps together no expert has more than 1.1 times its share.

| way | step 1 | 50 | 100 | {STEPS} | worst | together | loss |
|---|---|---|---|---|---|---|---|""".splitlines()


def draw(found: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Draws the loads over the steps."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name, (tokens, _) in found.items():
        axes.plot(np.arange(1, STEPS + 1), fullest(tokens), label=name)
    axes.axhline(1.2, color="black", linestyle=":", label="1.2")
    axes.set(xlabel="optimizer step", ylabel="fullest expert's tokens over the mean", ylim=(1, None), xlim=(1, STEPS))
    axes.set_title("the demo model from a skewed start: load of the fullest expert, in the worse layer")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Runs all ways and writes the page."""
    found = {name: run(changes) for name, changes in WAYS.items()}
    PAGE.write_text(page(found))
    draw(found, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
