"""Moving experts between slots, with all that belongs to them, and keeping replicas alike.

A leaf of a training state that has the slots of a layer, [layers, P, ...], is known by its path: it is called "expert_..." and
stands beside the layer's table, in the parameters or in what an optimizer keeps of them.

P: slots, p: slots of one shard.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from moejax import axes as ax
from moejax.axes import AxisRules
from moejax.placement import ExpertPlacement, ExpertTable, across_slots

Path = tuple[str, ...]


def tables_of(router: Any) -> dict[Path, ExpertTable]:
    """The tables in a tree of routers' states, by the path of their layers."""
    leaves = jax.tree.leaves_with_path(router, is_leaf=_is_table)
    return {_names(path)[:-1]: table for path, table in leaves if _is_table(table)}


def map_slots(change: Callable[[Array, ExpertTable], Array], tree: Any, tables: dict[Path, ExpertTable]) -> Any:
    """The tree with change(leaf, table) for each leaf that has slots, [*layers, P, ...]; the others as they are."""

    def visit(path, leaf):
        names = _names(path)
        for layer, table in tables.items():
            beside = names[-1].startswith("expert_") and names[-1 - len(layer) : -1] == layer
            if beside and leaf.shape[: table.expert.ndim] == table.expert.shape:
                return change(leaf, table)
        return leaf

    return jax.tree_util.tree_map_with_path(visit, tree)


def leaves_with_slots(tree: Any, router: Any) -> list[tuple[Array, ExpertTable]]:
    """The leaves that `map_slots` would change, each with its table."""
    found: list[tuple[Array, ExpertTable]] = []

    def note(leaf, table):
        found.append((leaf, table))
        return leaf

    map_slots(note, tree, tables_of(router))
    return found


def count_once(grads: Any, router: Any) -> Any:
    """Gradients with zeros in all but the first slot of each expert, so that norms over them count every expert once."""
    wide = lambda mask, leaf: mask.reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
    return map_slots(lambda leaf, table: jnp.where(wide(table.primary, leaf), leaf, 0), grads, tables_of(router))


def copy_to_replicas(tree: Any, router: Any, rules: AxisRules = AxisRules()) -> Any:
    """The tree with what the first slot of each expert holds in all its slots: parameters and optimizer state after an update
    by `count_once` gradients. Only experts with several slots cross the expert axes."""

    def copy(leaf, table):
        one = lambda leaf, table, axes: across_slots(leaf, table, axes, table.primary)
        layered = table.expert.ndim == 2
        each = lambda leaf, table, axes: jax.vmap(functools.partial(one, axes=axes))(leaf, table)
        return _over_experts(each if layered else one, leaf, table, layered, rules) if table.most_shared else leaf

    return map_slots(copy, tree, tables_of(router))


def by_expert(tree: Any, router: Any) -> Any:
    """The tree as it would be without slots: the first slot of each expert, [*layers, E, ...]. All experts must be live."""

    def take(leaf, table):
        index = table.slots[..., 0]
        if index.ndim == 1:
            return leaf[index]
        return jax.vmap(lambda part, index: part[index])(leaf, index)

    return map_slots(take, tree, tables_of(router))


def migrate(state: Any, placements: Sequence[ExpertPlacement], rules: AxisRules = AxisRules()) -> Any:
    """The training state with experts where `placements` say, parameters and all that the optimizer keeps of them together.

    Each slot takes its expert from where it was: from itself if it held it, else from the expert's first live slot. To run
    between steps; one compilation for each shape of leaf serves all migrations.

    Args:
      state: a `moejax.step.TrainState`, or any dataclass with `params`, `router` and `opt_state`.
      placements: of each MoE layer.
      rules: logical axes to mesh axes.

    Raises:
      ValueError: where the state has no slots, or others.
    """
    tables = tables_of(state.router)
    new = _stacked(placements, tables)
    moves = {path: _moves(tables[path], new[path]) for path in tables}
    move = lambda leaf, table: _move(leaf, moves[_path_of(table, tables)], table.expert.ndim == 2, rules)
    params, opt_state = (map_slots(move, tree, tables) for tree in (state.params, state.opt_state))
    place = lambda old: jax.tree.map(_like, new[_path_of(old, tables)], old) if _is_table(old) else old
    router = jax.tree.map(place, state.router, is_leaf=_is_table)
    return dataclasses.replace(state, params=params, opt_state=opt_state, router=router)


def placements_of(router: Any, before: Sequence[ExpertPlacement] | None = None) -> list[ExpertPlacement]:
    """Where the experts of each MoE layer are; what dead slots hold is taken from the placements `before`."""
    (table,) = tables_of(router).values()
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], table) for i in range(table.count.shape[0])]
    known = before or [None] * len(layers)
    return [ExpertPlacement.of_table(layer, old) for layer, old in zip(layers, known, strict=True)]


def num_moved(before: ExpertPlacement, after: ExpertPlacement) -> int:
    """Slots that take another expert than they had."""
    pairs = zip(before.expert_of, after.expert_of, strict=True)
    return sum(now != then and now >= 0 for then, now in pairs)


def _is_table(node) -> bool:
    return isinstance(node, ExpertTable)


def _names(path) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _path_of(table: ExpertTable, tables: dict[Path, ExpertTable]) -> Path:
    return next(path for path, other in tables.items() if other is table)


def _stacked(placements: Sequence[ExpertPlacement], tables: dict[Path, ExpertTable]) -> dict[Path, ExpertTable]:
    """The tables of these placements in the place of those there are."""
    if len(tables) != 1:
        raise ValueError(f"the state has {len(tables)} tables of experts: needs one, of a model with MoEConfig.num_slots")
    ((path, table),) = tables.items()
    made = [placement.table() for placement in placements]
    new = jax.tree.map(lambda *leaves: jnp.stack(leaves), *made) if table.count.ndim > 1 else made[0]
    if jax.tree.map(jnp.shape, new) != jax.tree.map(jnp.shape, table):
        there = table.expert.shape, table.count.shape
        raise ValueError(f"{len(placements)} placements with slots {new.expert.shape[-1:]}: the state has {there}")
    return {path: new}


def _moves(old: ExpertTable, new: ExpertTable) -> np.ndarray:
    """[n, 3] (layer, from slot, to slot) of the slots that take an expert from another one."""
    held, wanted = (np.atleast_2d(np.asarray(table.expert)) for table in (old, new))
    first = np.asarray(old.slots)[..., 0].reshape(len(held), -1)
    found = [
        (layer, first[layer, e], slot)
        for layer, (before, after) in enumerate(zip(held, wanted, strict=True))
        for slot, e in enumerate(after)
        if e < first.shape[1] and before[slot] != e
    ]
    lost = [(layer, slot) for layer, source, slot in found if source >= held.shape[1]]
    if lost:
        raise ValueError(f"layer {lost[0][0]}, slot {lost[0][1]}: its expert is missing, there is no slot to take it from")
    return np.asarray(found, np.int32).reshape(-1, 3)


def _like(new: Array, old: Array) -> Array:
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new


def _move(leaf: Array, moves: np.ndarray, layered: bool, rules: AxisRules) -> Array:
    """The leaf with these moves done at once: all read what was there before."""
    if not len(moves):
        return leaf
    room = np.zeros((1 << (len(moves) - 1).bit_length(), 3), np.int32)  # few sizes, so few compilations
    room[: len(moves)] = moves
    return _mover(layered, rules, leaf.sharding)(leaf, room, np.int32(len(moves)))


@functools.cache
def _mover(layered: bool, rules: AxisRules, sharding):
    def run(leaf, moves, count):
        one = lambda leaf, moves, axes: _moved(leaf if layered else leaf[None], moves, axes).reshape(leaf.shape)
        return _over_experts(one, leaf, (moves, count), layered, rules)

    return jax.jit(run, out_shardings=sharding)


def _moved(leaf, moves_and_count, axes):
    """This shard's part of the leaf [layers, p, ...] after the moves [n, 3]; one slot is under way at a time."""
    (moves, count), own = moves_and_count, leaf.shape[1]
    first = ax.axis_index(axes) * own
    bits = leaf.dtype if not jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
    here = lambda slot: (slot >= first) & (slot < first + own)

    def turn(i, new):
        layer, source, target = moves[i]
        index = lambda slot: (layer, jnp.clip(slot - first, 0, own - 1))
        # As bits: a sum of numbers would lose the sign of a zero.
        sent = jnp.where(here(source), lax.bitcast_convert_type(leaf[index(source)], bits), 0)
        row = lax.bitcast_convert_type(ax.sum_over(sent, axes), leaf.dtype)
        return new.at[index(target)].set(jnp.where(here(target), row, new[index(target)]))

    return lax.fori_loop(0, count, turn, leaf)


def _over_experts(one, leaf, arg, layered: bool, rules: AxisRules):
    """one(leaf, arg, expert axes) on each expert shard's slots."""
    axes = rules.axes("expert", ax.current_mesh())
    if not axes:
        return one(leaf, arg, ())
    spec = P(*[None] * layered, axes)
    run = functools.partial(one, axes=axes)
    return jax.shard_map(run, in_specs=(spec, P()), out_specs=spec, axis_names=set(axes))(leaf, arg)
