"""How many collectives and expert products a layer has under each exchange and remat policy, read out of compiled text.

`python -m tests.moejax.budgets` (8 virtual devices) writes docs/budgets.md; tests/moejax/test_budgets.py holds it to the truth.
"""

import contextlib
import functools
import importlib
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layouts import hlo
from layouts.hlo.program import scope, walk
from moejax import AxisRules, MoEConfig, feed_forward, make_mesh, moe
from moejax.layer import param_shapes
from moejax.remat import REMAT_POLICIES

# Scanned, as in the decoder: side by side in one computation XLA would find the forward's values again.
LAYERS = 2
# What is counted stands before machine code is made, most of the time of a compilation.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PAGE = Path(__file__).parents[2] / "docs" / "budgets.md"
KINDS = {"all-to-all": "A", "all-gather": "G", "reduce-scatter": "S", "collective-permute": "P"}
EXCHANGES = {
    "all_to_all": {},
    "all_to_all, num_chunks=2": {"num_chunks": 2},
    "hierarchical": {"exchange": "hierarchical"},
    "all_gather": {"exchange": "all_gather"},
    "all_gather, nothing dropped": {"exchange": "all_gather", "capacity_factor": None},
    "weight_stream": {"exchange": "weight_stream"},
    "weight_stream, nothing dropped": {"exchange": "weight_stream", "capacity_factor": None},
    "ragged": {"exchange": "ragged", "capacity_factor": None},
    'capacity="pool"': {"capacity": "pool"},
}


@contextlib.contextmanager
def one_dot_a_product():
    """Grouped and batched products as single dots: as tiles, or expert by expert, they are loops with several dots."""
    grouped = importlib.import_module("moejax.grouped_matmul")  # the package gives the function of that name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "choose", lambda *_: "ragged_dot")
        patch.setattr(feed_forward, "_order", lambda _: "activation_first")
        yield


@functools.cache
def budget(exchange: str, policy: str | None) -> str:
    """ "4 A, 9": collectives by kind and expert products of a forward and a backward; of a forward for policy None."""
    cfg = MoEConfig(16, 32, 16, 2, dtype="float32", **EXCHANGES[exchange])
    two = cfg.exchange == "hierarchical"
    mesh, rules = (
        make_mesh(**({"data": 2, "expert": 4} if two else {"expert": 8})),
        AxisRules(expert=("data", "expert") if two else "expert"),
    )

    def layer(x, params):
        y, stats = moe(params, x, None, None, cfg=cfg, rules=rules)
        return x + y, stats.loss(cfg)

    def loss(params, x):
        body = layer if policy is None else jax.checkpoint(layer, policy=REMAT_POLICIES[policy], prevent_cse=False)
        x, losses = lax.scan(body, x, params)
        return jnp.square(x).mean() + losses.mean()

    put = lambda shape, *axes: jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, rules.spec(axes, mesh)))
    params = {name: put((LAYERS, *shape), None, *logical) for name, (shape, logical) in param_shapes(cfg).items()}
    run = loss if policy is None else jax.value_and_grad(loss, (0, 1))
    with jax.set_mesh(mesh), one_dot_a_product():
        text = jax.jit(run).lower(params, put((8, 32, 16), "batch")).compile(FAST).as_text()
    program = hlo.read(text)
    counts = {letter: program.of_kind(kind).executed // LAYERS for kind, letter in KINDS.items()}
    visits = walk(hlo.parse(text))
    products = sum(v.times for v in visits if v.instruction.op == "dot" and "moe/experts" in scope(v.instruction))
    products //= LAYERS
    return ", ".join([*(f"{count} {letter}" for letter, count in counts.items() if count), str(products)])


INTRODUCTION = """\
# Budgets: collectives and expert products, by exchange and remat policy

What one layer does in a forward, and in a forward and a backward under each policy of `moejax.remat` (`remat` of the
decoder), counted in the text compiled for 8 CPU devices, loops multiplied out. Written by `python -m tests.moejax.budgets`,
held to the truth by `tests/moejax/test_budgets.py`.

"4 A, 9" is 4 all-to-alls and 9 expert products. A: all-to-all, G: all-gather, S: reduce-scatter, P: collective-permute.
All-reduces (counts, losses, gradients of what is replicated) are left out. The experts are gated: three products forward
and six backward for each of the parts that rows or weights come in; a ring of 8 shards has 8 parts, and its backward does
the two products into the activation again. Small exchanges of numbers and weights beside the rows count too: of the plan
for `all_gather`, of experts and weights for pools, and for `ragged`, whose collective XLA:CPU lacks, those of its stand-in.

| policy | keeps |
|---|---|
| none | everything |
| full | nothing: the layer is done again |
| dots | matrix products without a batch dimension: the router's and dense ones, no expert's |
| received | the rows that arrived at their experts |
| exchange | those, and the rows that came back |
| experts | those, the products into the activation and the experts' outputs: no expert product is done again |
| offload | what `exchange` keeps, in the host's memory |

"""


def page() -> str:
    """The whole page. Some minutes of compiling."""
    head = f"| | forward | {' | '.join(REMAT_POLICIES)} |\n|---|---|{'---|' * len(REMAT_POLICIES)}\n"
    return INTRODUCTION + head + "".join(f"{line(exchange)}\n" for exchange in EXCHANGES)


def line(exchange: str) -> str:
    """An exchange's line of the table."""
    return f"| `{exchange}` | {' | '.join(budget(exchange, policy) for policy in (None, *REMAT_POLICIES))} |"


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    PAGE.write_text(page())
