"""The Transformer in a pipeline: its layers by kind, its ends, and the order that its parameters are kept in.

Parameters of a layer stack are kept in stage order (`StageLayers`), so that each stage holds its own layers and nothing moves
between steps; embedding, head and the last norm are on every stage, and so are the routers' states, which are small.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax import axes as ax
from moejax.axes import AxisRules
from moejax.config import MoEConfig
from moejax.context import RoutingContext
from moejax.ends import cross_entropy, look_up
from moejax.executor import PipelineParams, PipelineResult, run_pipeline
from moejax.layer import RouterState
from moejax.pipeline import Op, Placement, Schedule
from moejax.remat import REMAT_POLICIES
from moejax.routing import ByTokenId
from moejax.stage_layers import StageLayers
from moejax.stage_program import STAGE, LayerKind, Observer, PipelineModel
from moejax.stats import RoutingStats
from moejax.transformer import Block, TransformerConfig, norm

Inputs = dict[str, Array]
# Where in the tree of parameters a kind of layer is: in the optimizer's trees too.
_STACKED = re.compile(r"stacks\.(\d+)\.blocks\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a Transformer's steps run over pipeline stages.

    Attributes:
      schedule: the table; its micro-batches are the step's.
      cuts: layers of each part of the model, in order; None: as even as can be.
    """

    schedule: Schedule
    cuts: tuple[int, ...] | None = None

    def layers(self, cfg: TransformerConfig) -> StageLayers:
        """Which layers each stage holds.

        Raises:
          ValueError: where the cuts do not fit, or there are more parts than layers.
        """
        order = layer_order(cfg)
        if self.cuts is None:
            return StageLayers.even(self.schedule.placement, order)
        return StageLayers(self.schedule.placement, order, self.cuts)

    def check(self, cfg: TransformerConfig, num_stages: int) -> None:
        """Raises ValueError where the model or a mesh of that many stages is not what the pipeline can run."""
        if num_stages != self.schedule.num_stages:
            raise ValueError(f"mesh axis stage of {num_stages} devices: the schedule has {self.schedule.num_stages} stages")
        check_staged(cfg)
        self.layers(cfg)


def check_staged(cfg: TransformerConfig) -> None:
    """Raises ValueError for a model that no pipeline can run."""
    if cfg.overlap:
        raise ValueError("overlap=True: a pipeline's dense feed-forwards are plain products; legal is False")
    if cfg.remat == "offload":
        legal = ", ".join(repr(name) for name in REMAT_POLICIES if name != "offload")
        raise ValueError(f"remat='offload': a pipeline keeps its activations on the device; legal are {legal}")
    if cfg.moe is not None:
        _check_experts(cfg.moe)


def _check_experts(moe: MoEConfig) -> None:
    if moe.loss_scope == "batch":
        raise ValueError(
            "loss_scope='batch': counts over all micro-batches, but a pipeline's first backward begins before its last "
            "forward; legal are 'sequence', 'shard', 'microbatch'"
        )
    if moe.draws:
        raise ValueError(f"router={moe.router!r}, jitter={moe.jitter}: a pipeline has no random numbers to draw")
    if moe.num_slots is not None:
        raise ValueError(f"num_slots={moe.num_slots}: a pipeline's experts have no replicas; legal is None")


def single(placement: Placement) -> Schedule:
    """The schedule of one micro-batch: its forwards are what an evaluation runs."""
    pipe = placement.pipes[0]
    rows: list[list[tuple[Op, ...]]] = [[] for _ in range(placement.num_stages)]
    for part in range(placement.num_parts):
        stage, chunk = placement.where[pipe, part]
        rows[stage].append((Op("F", chunk),))
    for part in reversed(range(placement.num_parts)):
        stage, chunk = placement.where[pipe, part]
        rows[stage].append((Op("B", chunk), Op("W", chunk)))
    return Schedule("single", 1, 1, placement, tuple(map(tuple, rows)))


# ---------------------------------------------------------------------------------------------------- kinds and order


def layer_kinds(cfg: TransformerConfig) -> tuple[tuple[int, int, bool], ...]:
    """The kinds of layers: (stack, block of its group, whether it is MoE), as parameters are nested."""
    return tuple((s, b, is_moe) for s, (_, kinds) in enumerate(cfg.stacks) for b, is_moe in enumerate(kinds))


def layer_order(cfg: TransformerConfig) -> tuple[int, ...]:
    """The kind of each layer, in the model's order."""
    number = {kind[:2]: n for n, kind in enumerate(layer_kinds(cfg))}
    stacks = enumerate(cfg.stacks)
    return tuple(number[s, b] for s, (repeats, kinds) in stacks for _ in range(repeats) for b in range(len(kinds)))


def reorder(cfg: TransformerConfig, tree: Any, change: Callable[[int, Any], Any]) -> Any:
    """change(kind, leaf) for the leaves of layer stacks in a tree of parameters, or in a state that holds such trees.

    The routers' states, in the branch "router", are no parameters and stay as they are.
    """
    number = {kind[:2]: n for n, kind in enumerate(layer_kinds(cfg))}

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found = None if name.startswith("router.") else _STACKED.search(name)
        return change(number[int(found[1]), int(found[2])], leaf) if found else leaf

    return jax.tree.map_with_path(one, tree, is_leaf=lambda leaf: isinstance(leaf, P))


def staged_specs(cfg: TransformerConfig, specs: Any) -> Any:
    """The PartitionSpecs of parameters in stage order, from those in the model's."""
    return reorder(cfg, specs, lambda _, spec: P(STAGE, *spec[1:]))


def to_stages(cfg: TransformerConfig, layers: StageLayers, tree: Any) -> Any:
    """Parameters, or a state that holds trees of their structure, from the model's order into stage order."""
    return reorder(cfg, tree, layers.to_stages)


def to_model(cfg: TransformerConfig, layers: StageLayers, tree: Any) -> Any:
    """The way back."""
    return reorder(cfg, tree, layers.to_model)


# ------------------------------------------------------------------------------------------------------------ the model


def pipeline_model(cfg: TransformerConfig, rules: AxisRules, specs: Any, train: bool = True) -> PipelineModel:
    """The Transformer's per-shard functions on the current mesh.

    Args:
      cfg: the model.
      rules: logical axes to mesh axes.
      specs: the PartitionSpecs of its parameters in the model's order.
      train: False for an evaluation, see `RoutingContext`.
    """
    mesh = ax.current_mesh()
    axes = rules.resolve(mesh)
    vocab = rules.axes("vocab", mesh)
    context = RoutingContext(train=train)
    kinds = [_kind(cfg, rules, context if is_moe else None, _block(specs, s, b)) for s, b, is_moe in layer_kinds(cfg)]
    final = jax.eval_shape(lambda: nnx.split(norm(cfg, cfg.d_model, nnx.Rngs(0))))[0]

    def embed(ends, inputs: Inputs):
        return look_up(ends["embedding"].astype(cfg.dtype), inputs["tokens"], vocab)

    def head(ends, x, inputs: Inputs):
        table = ends["embedding" if cfg.tie_embeddings else "head"].astype(cfg.dtype)
        x = nnx.merge(final, nnx.State(ends["norm"]))(x)
        logits = jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)
        return (cross_entropy(logits, inputs["targets"], vocab) * inputs["weight"]).sum()

    return PipelineModel(tuple(kinds), layer_order(cfg), embed, head, _ends(specs), axes.tokens, axes.embed)


def _kind(cfg: TransformerConfig, rules: AxisRules, context: RoutingContext | None, specs: Any) -> LayerKind:
    """A kind of layers: MoE with a context, dense without."""
    # Parameters come gathered, so within the layer nothing is divided over embed axes.
    inner = dataclasses.replace(rules, embed=None)
    make = lambda: nnx.split(Block(cfg, context is not None, rules=inner, rngs=nnx.Rngs(0)), nnx.Param, RouterState)
    graphdef = jax.eval_shape(make)[0]

    def apply(params, given, x, inputs: Inputs):
        block = nnx.merge(graphdef, nnx.State(params), nnx.State(given))
        said = context
        if cfg.moe is not None and context is not None and isinstance(cfg.moe.router_rule, ByTokenId):
            said = dataclasses.replace(context, token_ids=inputs["tokens"])
        x, stats = block(x, inputs["segment_ids"], inputs["positions"], said)
        return x, None if stats is None else stats.loss(cfg.moe) / cfg.num_moe_layers, stats

    if cfg.remat != "none":
        apply = jax.checkpoint(apply, policy=REMAT_POLICIES[cfg.remat], prevent_cse=False)
    return LayerKind(apply, jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=lambda leaf: isinstance(leaf, P)))


def _block(tree: Any, stack: int, block: int) -> Any:
    """The subtree of one kind of layer; empty where there is none, as in the states of routers without any."""
    return tree.get("stacks", {}).get(stack, {}).get("blocks", {}).get(block, {})


def _ends(tree: Any) -> Any:
    return {name: part for name, part in tree.items() if name != "stacks"}


def run_transformer(
    cfg: TransformerConfig,
    pipeline: Pipeline,
    model: PipelineModel,
    arrays: tuple[Any, Any],
    inputs: Inputs,
    *,
    backward: bool = True,
    observer: Observer | None = None,
) -> PipelineResult:
    """Runs the pipeline.

    Args:
      cfg: the model.
      pipeline: its schedule and cuts.
      model: of `pipeline_model`.
      arrays: parameters in stage order, and the routers' states in the model's.
      inputs: [M, rows, seq] arrays: tokens, targets, segment_ids, positions, weight (what each target's loss counts).
      backward: False runs forwards alone.
      observer: see `run_pipeline`.
    """
    layers, kinds = pipeline.layers(cfg), layer_kinds(cfg)
    params, router = arrays
    blocks = tuple(_block(params, s, b) for s, b, _ in kinds)
    states = [_block(router, s, b) for s, b, _ in kinds]
    given = tuple(jax.tree.map(lambda leaf, k=k: layers.to_stages(k, leaf), tree) for k, tree in enumerate(states))
    parts = PipelineParams(blocks, _ends(params), given)
    return run_pipeline(pipeline.schedule, model, parts, inputs, layers=layers, backward=backward, observer=observer)


def gradients(cfg: TransformerConfig, result: PipelineResult) -> Any:
    """A step's gradients, nested like the parameters, in stage order."""
    stacks: dict[int, Any] = {}
    for (s, b, _), tree in zip(layer_kinds(cfg), result.layers or (), strict=True):
        stacks.setdefault(s, {"blocks": {}})["blocks"][b] = tree
    return {**result.ends, "stacks": stacks}


def layer_stats(cfg: TransformerConfig, layers: StageLayers, result: PipelineResult) -> RoutingStats | None:
    """The routing stats of the MoE layers, in the model's order; None for a dense model."""
    for k, (_, _, is_moe) in enumerate(layer_kinds(cfg)):
        if is_moe:
            return jax.tree.map(lambda leaf, k=k: layers.to_model(k, leaf), result.stats[k])
    return None
