"""StageProgram: what one device does in a pipeline: its parameters, the state that ticks change, and the ops that change it.

Per-shard code, inside the shard_map of `moejax.executor`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax import axes as ax
from moejax.buffers import add, get, put, repeat, room, when
from moejax.pipeline import COMPUTE
from moejax.split import SplitLayer
from moejax.stage_layers import StageLayers
from moejax.ticks import DX, KINDS, Ticks

STAGE = "stage"
Observer = Callable[..., None]
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """Layers that run one function on parameters of one structure. Per-shard code.

    Attributes:
      apply: (params, given, x, inputs) -> (x, loss, stats): one layer on one micro-batch. `given` are arrays of the layer
        that get no gradient; loss is a scalar that all token shards agree on, or None; stats a pytree of numbers or None:
        integers are added over micro-batches, the others averaged.
      specs: the PartitionSpec of each parameter, without the axis of layers.
    """

    apply: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]
    specs: Any


@dataclasses.dataclass(frozen=True)
class PipelineModel:
    """A model as a pipeline runs it: layers, and what comes before the first and after the last one. Per-shard code.

    Attributes:
      kinds: the kinds of layers.
      order: the kind of each layer, in the model's order.
      embed: (ends, inputs) -> x: the first layer's input.
      head: (ends, x, inputs) -> this token shard's part of the micro-batch's loss, a scalar.
      end_specs: the PartitionSpec of each parameter of the ends.
      tokens: mesh axes that the rows of a micro-batch are divided over.
      gathered: those of them that parameters are divided over, and gathered for use (FSDP).
    """

    kinds: tuple[LayerKind, ...]
    order: tuple[int, ...]
    embed: Callable[[Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]
    end_specs: Any
    tokens: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """Axes over which every device has work of its own."""
        return (STAGE, *self.tokens)

    def divided(self, spec: P) -> int | None:
        """The dimension of a parameter that is divided over the gathered axes."""
        return next((dim for dim, entry in enumerate(spec) if set(ax.as_tuple(entry)) & set(self.gathered)), None)

    def whole(self, leaf, spec: P):
        """A shard of a parameter, gathered where it is divided."""
        dim = self.divided(spec)
        return leaf if dim is None else lax.all_gather(leaf, self.gathered, axis=dim, tiled=True)

    def reduced(self, leaf, spec: P):
        """The transpose of `whole`: a shard of the gradient, summed over the gathered axes."""
        dim = self.divided(spec)
        return leaf if dim is None else lax.psum_scatter(leaf, self.gathered, scatter_dimension=dim, tiled=True)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every device's program is made from.

    Attributes:
      model: what runs.
      layers: where its layers are.
      ticks: the table.
      num_microbatches: M.
      table: gathers and reduces of divided parameters are the table's; else every op gathers a layer at a time.
      backward: False runs forwards alone.
      observer: see `moejax.executor.run_pipeline`.
    """

    model: PipelineModel
    layers: StageLayers
    ticks: Ticks
    num_microbatches: int
    table: bool
    backward: bool
    observer: Observer | None


class Kind:
    """One kind of layer on this device: its parameters as a list of leaves, [slots, ...] each."""

    def __init__(self, plan: Plan, number: int, params: Any, given: Any):
        """Args: plan; number, of the kind; params and given, this stage's, of all pipes."""
        self.model, self.rule, self.given = plan.model, plan.model.kinds[number], given
        self.params, self.tree = jax.tree.flatten(params)
        self.specs: list[P] = self.tree.flatten_up_to(self.rule.specs)
        self.by_table = [plan.table and self.model.divided(spec) is not None for spec in self.specs]
        self.num_stages = plan.layers.num_stages

    def split(self, x, inputs, scale: float) -> SplitLayer:
        """The layer's three sections, for parameters as `own` and `with_gathered` give them."""

        def layer(leaves, given, x):
            given, inputs = given
            each = zip(leaves, self.specs, self.by_table, strict=True)
            leaves = [leaf if by_table else self.model.whole(leaf, spec) for leaf, spec, by_table in each]
            return self.rule.apply(self.tree.unflatten(leaves), given, x, inputs)

        wide = self.with_gathered(self.own(0), [self.gather(leaf, spec) for leaf, spec in self.divided(self.own(0))])
        split = SplitLayer(layer, wide, (get(self.given, 0), inputs), x, scale)
        for reads, by_table in zip(split.weight_reads(), self.by_table, strict=True):
            if reads and by_table:
                raise ValueError("a weight's gradient reads a gathered parameter, gone by then: needs a table without gathers")
        return split

    def own(self, slot) -> list:
        """One layer's parameters as this device has them."""
        return get(self.params, slot)

    def divided(self, leaves: list) -> list[tuple[Any, P]]:
        """Of one leaf a parameter, those that the table gathers, each with its spec."""
        each = zip(leaves, self.specs, self.by_table, strict=True)
        return [(leaf, spec) for leaf, spec, by_table in each if by_table]

    def with_gathered(self, leaves: list, gathered: list) -> list:
        """The parameters with gathered ones in place of the divided ones."""
        left = iter(gathered)
        return [next(left) if by_table else leaf for leaf, by_table in zip(leaves, self.by_table, strict=True)]

    def gather(self, leaf, spec: P):
        """One parameter of one layer, whole."""
        return self.model.whole(leaf, spec)


class StageProgram:
    """The state and the ops."""

    def __init__(self, plan: Plan, params: Any, ends: Any, given: Any, inputs: Any):
        """Args: plan; params and given, by kind, this stage's, of all pipes; ends; inputs, leaves [M, rows, ...]."""
        self.plan, self.model, self.ticks = plan, plan.model, plan.ticks
        self.inputs = ax.vary_over(inputs, (STAGE,))
        # Marked here as different on every token shard, so that gradients are summed once, at the end.
        self.kinds = [Kind(plan, k, ax.vary_over(tree, self.model.own), given[k]) for k, tree in enumerate(params)]
        ends = ax.vary_over(ends, self.model.own)
        self.ends = jax.tree.map(lambda spec, leaf: self.model.whole(leaf, spec), self.model.end_specs, ends, is_leaf=is_spec)
        first = get(self.inputs, 0)
        self.x = self._embedded(self.ends, first)
        self.splits = [kind.split(self.x, first, 1 / plan.num_microbatches) for kind in self.kinds]

    def _embedded(self, ends, inputs):
        return ax.vary_over(self.model.embed(ends, inputs), self.model.own)

    def start(self) -> State:
        """The state before the first tick: zeros."""
        like = lambda leaf, *leading: room(jax.typeof(leaf), *leading, over=self.model.own)
        layers, slots = self.plan.layers, self.ticks.slots
        held = [size * len(layers.pipes) for size in layers.slots]
        state: State = {
            "y": like(self.x),
            "inbox": like(self.x, self.ticks.inbox + 1),
            "loss": like(jnp.float32(0)),
            "stats": self._per_kind(
                lambda k: jax.tree.map(lambda aval: room(aval, held[k], over=(STAGE,)), self.splits[k].stats())
            ),
            "gathered": self._per_kind(lambda k: self._gathered_room(k, slots["gathered"][k])),
        }
        if not self.plan.backward:
            return state
        for name in ("keep_b", "keep_w", "stash"):
            kept = [split.kept()[name] for split in self.splits]
            state[name] = self._per_kind(lambda k, n=name, kept=kept: [room(v, slots[n][k], over=(STAGE,)) for v in kept[k]])
        state["grads"] = self._per_kind(lambda k: [like(leaf) for leaf in self.kinds[k].params])
        state["sums"] = self._per_kind(lambda k: self._gathered_room(k, slots["sums"][k]))
        return state | {"dx": like(self.x), "end_grads": jax.tree.map(like, self.ends)}

    def _per_kind(self, make: Callable[[int], Any]) -> tuple:
        return tuple(make(k) for k in range(len(self.kinds)))

    def _gathered_room(self, k: int, size: int) -> list:
        kind = self.kinds[k]
        return [room(jax.typeof(kind.gather(leaf, spec)), size) for leaf, spec in kind.divided(kind.own(0))]

    # ------------------------------------------------------------------------------------------------------------ ticks

    def tick(self, state: State, tick) -> tuple[State, None]:
        """One op of this stage, or none; then every stage sends what the table says."""
        number, columns = tick
        row = get(columns, lax.axis_index(STAGE)) | {"tick": number}
        ops = {"F": self._forward, "B": self._backward, "W": self._weight}
        if self.plan.table:
            state = self._moves("gather", self._gather, row, state)
        for name in COMPUTE if self.plan.backward else ("F",):
            run = lambda state, name=name: self._observed(name, ops[name](row, state), row, row["chunk"], row["mb"])
            state = when(row["op"] == KINDS.index(name), run, state)
        if self.plan.table and self.plan.backward:
            state = self._moves("reduce", self._reduce, row, state)
        return self._send(row, state), None

    def _observed(self, name: str, state: State, row, *numbers) -> State:
        observer = self.plan.observer
        if observer is not None:
            tell = lambda stage, tick, *more: observer(int(stage), int(tick), name, *map(int, more))
            jax.debug.callback(tell, lax.axis_index(STAGE), row["tick"], *numbers)
        return state

    def _send(self, row, state: State) -> State:
        inbox, size = state["inbox"], self.plan.layers.num_stages
        for i, shift in enumerate(self.ticks.channels):
            value = state["y"]
            if self.plan.backward and (self.ticks.columns[f"sends_{i}"] == DX).any():
                value = jnp.where(row[f"sends_{i}"] == DX, state["dx"], value)
            value = lax.ppermute(value, STAGE, [(r, (r + shift) % size) for r in range(size)]) if shift else value
            inbox = put(inbox, row[f"takes_{i}"], value)
        return state | {"inbox": inbox}

    # -------------------------------------------------------------------------------------------------------------- ops

    def _each_layer(self, row, change: Callable, carry, reverse: bool = False):
        """change(kind, j, carry) for each layer j of the chunk, first to last or back."""

        def one(i, carry):
            j = row["count"] - 1 - i if reverse else i
            if len(self.kinds) == 1:
                return change(0, j, carry)
            for k in range(len(self.kinds)):
                carry = when(row["kind"][j] == k, lambda c, k=k: change(k, j, c), carry)
            return carry

        if self.plan.layers.one_layer_chunks:
            return one(jnp.zeros_like(row["count"]), carry)
        return repeat(row["count"], one, carry)

    def _layer(self, k: int, row, j, inputs, gathered) -> tuple[list, Any]:
        """A layer's parameters and what else it is given."""
        kind = self.kinds[k]
        wide = [] if gathered is None else get(gathered[k], row["gathered"][j])
        leaves = kind.own(row["slot"][j])
        leaves = leaves if gathered is None else kind.with_gathered(leaves, wide)
        return leaves, (get(kind.given, row["slot"][j]), inputs)

    def _forward(self, row, state: State) -> State:
        inputs = get(self.inputs, row["mb"])
        x = when(row["first"] == 1, lambda _: self._embedded(self.ends, inputs), get(state["inbox"], row["input"]))

        def layer(k, j, carry):
            x, state = carry
            x, stats, *kept = self.splits[k].forward(*self._layer(k, row, j, inputs, state["gathered"]), x)
            state = _change(state, "stats", k, lambda stored: add(stored, row["slot"][j], stats))
            for name, values in zip(("keep_b", "keep_w") if self.plan.backward else (), kept, strict=False):
                state = _change(state, name, k, lambda stored, n=name, v=values: put(stored, row[n][j], v))
            return x, state

        x, state = self._each_layer(row, layer, (x, state))
        return when(row["last"] == 1, lambda state: self._head(inputs, state), state | {"y": x})

    def _head(self, inputs, state: State) -> State:
        """The loss and, in place of the last part's output, its gradient: what the part's own B reads."""
        if not self.plan.backward:
            return state | {"loss": state["loss"] + self.model.head(self.ends, state["y"], inputs)}
        loss, pull = jax.vjp(lambda ends, y: self.model.head(ends, y, inputs), self.ends, state["y"])
        ends, dy = pull(jnp.ones_like(loss))
        grads = jax.tree.map(jnp.add, state["end_grads"], ends)
        return state | {"loss": state["loss"] + loss, "end_grads": grads, "y": dy}

    def _backward(self, row, state: State) -> State:
        inputs = get(self.inputs, row["mb"])

        def layer(k, j, carry):
            dy, state = carry
            kept = [get(state[name][k], row[name][j]) for name in ("keep_b", "keep_w")]
            dx, stash = self.splits[k].backward(*self._layer(k, row, j, inputs, state["gathered"]), *kept, dy)
            return dx, _change(state, "stash", k, lambda stored: put(stored, row["stash"][j], stash))

        dx, state = self._each_layer(row, layer, (get(state["inbox"], row["input"]), state), reverse=True)
        return when(row["first"] == 1, lambda state: self._into_embedding(inputs, state), state | {"dx": dx})

    def _into_embedding(self, inputs, state: State) -> State:
        pull = jax.vjp(lambda ends: self._embedded(ends, inputs), self.ends)[1]
        return state | {"end_grads": jax.tree.map(jnp.add, state["end_grads"], pull(state["dx"])[0])}

    def _weight(self, row, state: State) -> State:
        inputs = get(self.inputs, row["mb"])

        def layer(k, j, state):
            kept = [get(state[name][k], row[name][j]) for name in ("keep_w", "stash")]
            grads = self.splits[k].weight(*self._layer(k, row, j, inputs, None), *kept)
            return self._collect(k, row, j, grads, state)

        return self._each_layer(row, layer, state)

    def _collect(self, k: int, row, j, grads: list, state: State) -> State:
        """Adds a layer's gradients: to the unit's sums where the table reduces these, else to the step's."""
        kind, sums = self.kinds[k], iter(state["sums"][k])
        new_sums, new_grads = [], []
        for leaf, total, by_table in zip(grads, state["grads"][k], kind.by_table, strict=True):
            if by_table:
                stored, at = next(sums), row["sums"][j]
                so_far = jnp.where(row["fresh"] == 1, 0, get(stored, at))
                new_sums.append(put(stored, at, so_far + leaf))
            new_grads.append(total if by_table else add(total, row["slot"][j], leaf))
        state = _change(state, "sums", k, lambda _: new_sums)
        return _change(state, "grads", k, lambda _: new_grads)

    # ------------------------------------------------------------------------------------------- gathers and reduces (FSDP)

    def _moves(self, name: str, move: Callable, row, state: State) -> State:
        """The tick's gathers or reduces, a layer after another."""

        def one(i, state):
            for k in range(len(self.kinds)):
                here = lambda state, k=k: move(k, row[f"{name}_slot"][i], row[f"{name}_at"][i], state)
                state = when(row[f"{name}_kind"][i] == k, here, state)
            return self._observed(name, state, row, row[f"{name}_chunk"][i], row[f"{name}_index"][i])

        return repeat(row[f"num_{name}"], one, state)

    def _gather(self, k: int, slot, at, state: State) -> State:
        kind = self.kinds[k]
        wide = [kind.gather(leaf, spec) for leaf, spec in kind.divided(kind.own(slot))]
        return _change(state, "gathered", k, lambda stored: put(stored, at, wide))

    def _reduce(self, k: int, slot, at, state: State) -> State:
        kind, sums = self.kinds[k], iter(get(state["sums"][k], at))
        pairs = zip(state["grads"][k], kind.specs, kind.by_table, strict=True)
        grads = [
            add(total, slot, self.model.reduced(next(sums), spec)) if by_table else total for total, spec, by_table in pairs
        ]
        return _change(state, "grads", k, lambda _: grads)


def is_spec(leaf) -> bool:
    """Whether a node of a tree of PartitionSpecs is one (they are tuples)."""
    return isinstance(leaf, P)


def _change(state: State, name: str, kind: int, change: Callable) -> State:
    """The state with one kind's part of a buffer changed."""
    return state | {name: tuple(change(part) if k == kind else part for k, part in enumerate(state[name]))}
