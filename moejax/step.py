"""The train step: pure, so that `train` runs it and `layouts` compiles it for hardware that is not there."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from moejax.axes import AxisRules
from moejax.checks import positive
from moejax.context import BatchCounts, RoutingContext
from moejax.layer import RouterState
from moejax.migration import copy_to_replicas, count_once
from moejax.pytree import pytree
from moejax.router import update_router
from moejax.routing import LoadState
from moejax.staged import Pipeline, staged_specs, to_model, to_stages
from moejax.stats import RoutingStats, add_microbatches
from moejax.transformer import Transformer, TransformerConfig

Batch = dict[str, Array]
Metrics = dict[str, Array]
EVALUATION = RoutingContext(train=False)


@pytree
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      step: int32, optimizer steps done.
      params: nested dict of the model's parameters.
      router: nested dict of the routers' states; empty for routers that keep none.
      opt_state: the optimizer's.
    """

    step: Int[Array, ""]
    params: Any
    router: Any
    opt_state: Any


def init_state(
    cfg: TransformerConfig,
    optimizer: optax.GradientTransformation,
    key: Array,
    rules: AxisRules = AxisRules(),
    pipeline: Pipeline | None = None,
) -> TrainState:
    """A state at step 0, every array born sharded over the current mesh.

    Args:
      cfg: the model.
      optimizer: its state is laid out like the parameters that it belongs to.
      key: a random key.
      rules: logical axes to mesh axes.
      pipeline: parameters and the optimizer's state are in stage order (`moejax.staged`), each stage's layers on its devices;
        the same numbers as without one.

    Raises:
      ValueError: where the mesh does not divide the model, or the pipeline does not fit it.
    """
    create = _creator(cfg, optimizer, rules, pipeline)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(cfg, optimizer, key, rules, pipeline))
    return jax.jit(create, out_shardings=shardings)(key)


def abstract_state(
    cfg: TransformerConfig,
    optimizer: optax.GradientTransformation,
    key: Array | jax.ShapeDtypeStruct,
    rules: AxisRules = AxisRules(),
    pipeline: Pipeline | None = None,
) -> TrainState:
    """What `init_state` would return, as jax.ShapeDtypeStructs with shardings; runs nothing on a device."""
    shapes = jax.eval_shape(_creator(cfg, optimizer, rules, pipeline), key)
    mesh = jax.sharding.get_mesh()
    specs = param_specs(cfg, rules)
    specs = specs if pipeline is None else staged_specs(cfg, specs)
    opt_specs = _opt_specs(optimizer, shapes.opt_state, specs)
    router_specs = jax.tree.map(lambda _: P(), shapes.router)
    specs = dataclasses.replace(shapes, step=P(), params=specs, router=router_specs, opt_state=opt_specs)

    def place(shape, spec):
        sharding = None if mesh.empty else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, specs)


def _opt_specs(optimizer, opt_state, specs) -> Any:
    """The PartitionSpecs of an optimizer's state. Traced: optax makes a state's counters, on devices that may not be there."""
    found = []

    def trace():
        of_params = lambda _, spec: spec
        found.append(optax.tree.map_params(optimizer, of_params, opt_state, specs, transform_non_params=lambda _: P()))

    jax.eval_shape(trace)
    return found[0]


def param_specs(cfg: TransformerConfig, rules: AxisRules = AxisRules()) -> Any:
    """The PartitionSpec of every parameter on the current mesh, nested like `TrainState.params`."""
    specs = nnx.get_partition_spec(_abstract_model(cfg, rules)[1])
    return jax.tree.map(lambda spec: spec if isinstance(spec, P) else P(), nnx.to_pure_dict(specs), is_leaf=_is_spec)


def make_train_step(
    cfg: TransformerConfig,
    optimizer: optax.GradientTransformation,
    num_microbatches: int = 1,
    rules: AxisRules = AxisRules(),
    microbatch_overlap: int = 1,
    seed: int = 0,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure function from (state, batch) to (next state, metrics); jit it with `donate_argnums=0`.

    The loss is the mean cross-entropy over the batch's counted targets plus `RoutingStats.loss`, averaged over
    micro-batches; cross-entropy and its gradient do not depend on `num_microbatches`. Router states change once a step,
    from the loads of all micro-batches.

    Args:
      cfg: the model.
      optimizer: e.g. clipping by global norm chained with AdamW.
      num_microbatches: the batch is worked through in this many equal parts, their gradients added.
      rules: logical axes to mesh axes.
      microbatch_overlap: micro-batches that walk through the layers together, so that one's exchanges can run beside
        another's products (see `Transformer.together` and `moejax.compiler_options`); divides num_microbatches. Losses
        and gradients are those of 1; activations of that many micro-batches are held at once, so that 2 with twice the
        micro-batches takes the memory of 1.
      seed: of the random numbers of routers that draw some, and of jitter; with the step and the micro-batch they make a key.

    Returns:
      The function. A batch holds [batch, seq] arrays: tokens, targets, segment_ids (0: padding), positions (int32) and
      loss_mask (bool: which targets count). Metrics are scalars (loss in nats a target, total_loss, aux_loss, z_loss,
      grad_norm, num_targets, dropped_fraction, token_straggler, routing_entropy, and what a router measures), and
      tokens_per_expert [layers, E] and dropped [layers].
    """
    check_microbatches(num_microbatches, microbatch_overlap)
    walk = _Walk(cfg, _abstract_model(cfg, rules)[0], num_microbatches, microbatch_overlap, seed)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (total, loss, stats), grads = walk.gradients(state, batch)
        grads = count_once(grads, state.router)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = (copy_to_replicas(tree, state.router, rules) for tree in (params, opt_state))
        stats = None if stats is None else add_microbatches(stats)
        following = TrainState(
            step=state.step + 1,
            params=params,
            router=update_routers(state.router, stats),
            opt_state=opt_state,
        )
        metrics = {"loss": loss.mean(), "total_loss": total.mean(), "grad_norm": optax.tree.norm(grads)}
        return following, {**metrics, "num_targets": batch["loss_mask"].sum(), **routing_metrics(stats)}

    return train_step


@dataclasses.dataclass(frozen=True)
class _Walk:
    """How a step walks through its micro-batches: `overlap` of them together, turn after turn."""

    cfg: TransformerConfig
    graphdef: Any
    num_microbatches: int
    overlap: int
    seed: int

    def gradients(self, state: TrainState, batch: Batch) -> tuple[tuple[Array, Array, RoutingStats | None], Any]:
        """(total losses, losses, stats) of each micro-batch [num_microbatches], and the mean of their gradients."""
        num = self.num_microbatches
        num_targets = jnp.maximum(batch["loss_mask"].sum(), 1)
        turns = split_batch(batch, num, self.overlap), jnp.arange(num // self.overlap)
        counts = self.count(state, turns)

        def one(grads, turn):
            batches = turn[0], self.contexts(state.step, turn[1], counts)
            value_and_grad = jax.value_and_grad(self.loss, has_aux=True)
            (_, found), more = value_and_grad(state.params, state.router, batches, num_targets)
            return jax.tree.map(jnp.add, grads, more), found

        grads, found = lax.scan(one, jax.tree.map(jnp.zeros_like, state.params), turns)
        found = jax.tree.map(lambda leaf: leaf.reshape(num, *leaf.shape[2:]), found)
        return found, jax.tree.map(lambda grad: grad / num, grads)

    def loss(self, params, router, batches, num_targets):
        """The summed total loss of a turn's micro-batches; and (total losses, losses, stats), a row each."""
        found = []
        for loss_sum, _, stats in _forward(self.graphdef, params, router, *batches):
            loss = loss_sum / num_targets * self.num_microbatches
            found.append((loss + (stats.loss(self.cfg.moe) if stats is not None else 0.0), loss, stats))
        return jnp.stack([total for total, _, _ in found]).sum(), jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def contexts(self, step, turn, counts: BatchCounts | None) -> list[RoutingContext]:
        """Of the micro-batches of a turn."""
        moe = self.cfg.moe
        if moe is None or not moe.draws:
            return [RoutingContext(batch=counts)] * self.overlap
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        indices = [turn * self.overlap + i for i in range(self.overlap)]
        return [RoutingContext(key=jax.random.fold_in(key, index), batch=counts) for index in indices]

    def count(self, state: TrainState, turns) -> BatchCounts | None:
        """What loss_scope "batch" counts over, by a forward of all micro-batches; None where nothing needs it."""
        moe, num = self.cfg.moe, self.num_microbatches
        if moe is None or moe.loss_scope != "batch" or num == 1:
            return None

        def one(total, turn):
            batches = turn[0], self.contexts(state.step, turn[1], None)
            stats = [stats for _, _, stats in _forward(self.graphdef, state.params, state.router, *batches)]
            return total, [(found.tokens_per_expert, found.num_tokens) for found in stats if found is not None]

        loads, tokens = zip(*lax.scan(one, None, turns)[1], strict=True)
        total = lambda parts: jnp.stack(parts).sum((0, 1))
        return BatchCounts(total(loads), total(tokens), jnp.full(self.cfg.num_moe_layers, num, jnp.int32))


def make_eval_step(
    cfg: TransformerConfig, rules: AxisRules = AxisRules(), record: bool = False
) -> Callable[[Any, Any, Batch], Metrics]:
    """A pure function from (params, router, batch) to {"loss_sum": nats, "num_targets": count} of the counted targets.

    Args:
      cfg: the model.
      rules: logical axes to mesh axes.
      record: of a model with MoE layers, also {"expert": [layers, b, s, k] int32}, the experts that each token went to; -1
        where a choice is not used, or the token is padding. As `RoutingContext.replay` it makes a call route alike.
    """
    graphdef = _abstract_model(cfg, rules)[0]
    context = dataclasses.replace(EVALUATION, record=record)

    def eval_step(params, router, batch: Batch) -> Metrics:
        ((loss_sum, num_targets, stats),) = _forward(graphdef, params, router, [batch], [context])
        found = {"loss_sum": loss_sum, "num_targets": num_targets}
        if stats is None or stats.expert is None:
            return found
        return {**found, "expert": jnp.where(batch["segment_ids"][:, :, None] > 0, stats.expert, -1)}

    return eval_step


def make_logits(
    cfg: TransformerConfig, rules: AxisRules = AxisRules(), pipeline: Pipeline | None = None
) -> Callable[[Any, Any, Array], Array]:
    """A pure function from (params, router, tokens [b, s]) to logits [b, s, V] float32.

    With a pipeline the parameters come in stage order, and the whole model is gathered on every stage.
    """
    graphdef = _abstract_model(cfg, rules)[0]
    in_order = lambda params: params if pipeline is None else to_model(cfg, pipeline.layers(cfg), params)
    return lambda params, router, tokens: _merge(graphdef, in_order(params), router)(tokens, context=EVALUATION)[0]


def _forward(
    graphdef, params, router, batches: Sequence[Batch], contexts: Sequence[RoutingContext]
) -> list[tuple[Array, Array, RoutingStats | None]]:
    """Of each batch, all side by side: the summed cross-entropy of its targets in nats, their number, its routing stats."""
    model = _merge(graphdef, params, router)
    found = []
    names = ("tokens", "segment_ids", "positions")
    outputs = model.together(
        [(*(batch[name] for name in names), context) for batch, context in zip(batches, contexts, strict=True)]
    )
    for batch, (logits, stats) in zip(batches, outputs, strict=True):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        found.append((jnp.where(batch["loss_mask"], losses, 0).sum(), batch["loss_mask"].sum(), stats))
    return found


def _merge(graphdef, params, router) -> Transformer:
    return nnx.merge(graphdef, nnx.State(params), nnx.State(router))


def _split_model(cfg, rules, key):
    """(graphdef, parameters, router states) of a new model."""
    return nnx.split(Transformer(cfg, rules=rules, rngs=nnx.Rngs(params=key)), nnx.Param, RouterState)


def _abstract_model(cfg, rules):
    # The key is made inside: outside it would be an array on the mesh's devices, which need not be there.
    return jax.eval_shape(lambda: _split_model(cfg, rules, jax.random.key(0)))


def _creator(cfg, optimizer, rules, pipeline: Pipeline | None):
    def create(key) -> TrainState:
        params, router = (nnx.to_pure_dict(part) for part in _split_model(cfg, rules, key)[1:])
        params = params if pipeline is None else to_stages(cfg, pipeline.layers(cfg), params)
        return TrainState(jnp.zeros((), jnp.int32), params, router, optimizer.init(params))

    return create


def check_microbatches(num_microbatches: int, microbatch_overlap: int) -> None:
    """Raises ValueError unless both are whole numbers of at least 1 and the latter divides the former."""
    positive("num_microbatches", num_microbatches)
    positive("microbatch_overlap", microbatch_overlap)
    if num_microbatches % microbatch_overlap:
        raise ValueError(
            f"microbatch_overlap={microbatch_overlap} does not divide num_microbatches={num_microbatches}: "
            f"legal are {_divisors(num_microbatches)}"
        )


def split_batch(batch: Batch, num_microbatches: int, together: int) -> list[Batch]:
    """[batch, ...] -> `together` batches of [num_microbatches / together, rows, ...], neighbouring rows in one."""

    def split(rows):
        if rows.shape[0] % num_microbatches:
            legal = _divisors(rows.shape[0])
            raise ValueError(
                f"num_microbatches={num_microbatches} does not divide the batch of {rows.shape[0]}: legal are {legal}"
            )
        return rows.reshape(-1, together, rows.shape[0] // num_microbatches, *rows.shape[1:])

    batch = jax.tree.map(split, batch)
    return [jax.tree.map(lambda rows, i=i: rows[:, i], batch) for i in range(together)]


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)


def _is_spec(leaf) -> bool:
    return isinstance(leaf, P) or leaf is None


def update_routers(router, stats: RoutingStats | None):
    """The routers' states after a step of these loads."""
    is_state = lambda node: isinstance(node, LoadState)
    return jax.tree.map(lambda state: update_router(state, stats), router, is_leaf=is_state)


def routing_metrics(stats: RoutingStats | None) -> Metrics:
    """What a step's metrics say of its routing; nothing for a dense model."""
    if stats is None:
        return {}
    return {
        "aux_loss": stats.aux_loss.mean(),
        "z_loss": stats.z_loss.mean(),
        "dropped_fraction": stats.num_dropped.sum() / jnp.maximum(stats.num_assignments.sum(), 1),
        "token_straggler": stats.token_straggler.max(),
        "routing_entropy": stats.entropy.mean(),
        **{name: value.mean() for name, value in stats.measured.items()},
        "tokens_per_expert": stats.tokens_per_expert,
        "dropped": stats.num_dropped,
    }
