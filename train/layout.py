"""`layout=FILE.json`, `layout=search` and exchange "auto": a run's mesh and what goes with it, from `layouts`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from layouts.clusters import parse_cluster
from layouts.cost import cost
from layouts.errors import LayoutsError
from layouts.layout import Layout, load_layout
from layouts.presets import model_of, recipe_of
from layouts.search import Problem, describe, search
from layouts.space import Space
from layouts.workload import Batch
from moejax import MoEConfig
from moejax.staged import check_staged
from train.config import PipelineConfig, TrainConfig, check_config
from train.distributed import ask_for_devices
from train.errors import InputError
from train.stages import make_pipeline

# Candidates of `search` that are tried against the config's own rules before it gives up.
_TRIES = 20
_EXCHANGES = ("all_to_all", "all_gather", "weight_stream")


def laid_out(cfg: TrainConfig, chosen: str, say: Callable[[str], None]) -> TrainConfig:
    """The config with the mesh, micro-batches, remat, exchange, codec and chunks of a layout.

    Args:
      cfg: a config.
      chosen: "FILE.json" or "FILE.json#RANK" (see `layouts.layout.load_layout`), or "search": the best for the devices
        at hand, by the cost model.
      say: told what was chosen.

    Raises:
      InputError: where the file is none, or holds a layout that the trainer does not run or the config cannot have.
    """
    try:
        if chosen == "search":
            return _searched(cfg, say)
        found = with_layout(cfg, load_layout(chosen)[0])
    except LayoutsError as error:
        raise InputError(f"layout={chosen}: {error}") from error
    check_config(found)
    return found


def with_layout(cfg: TrainConfig, layout: Layout) -> TrainConfig:
    """The config that runs a layout.

    Raises:
      InputError: for a layout that the trainer does not run, or the config cannot have.
    """
    lacking = [*layout.not_runnable(), *(["excluded devices"] if layout.excluded else [])]
    if lacking:
        raise InputError(f"layout {describe(layout)}: the trainer does not run {', '.join(lacking)}")
    sizes = {name: size for name, size in layout.sizes.items() if name in cfg.mesh.sizes}
    try:
        moe = cfg.model.moe and dataclasses.replace(
            cfg.model.moe, exchange=layout.exchange, codec=layout.codec, num_chunks=layout.num_chunks
        )
        return dataclasses.replace(
            cfg,
            model=dataclasses.replace(cfg.model, remat=layout.remat, moe=moe),
            mesh=dataclasses.replace(cfg.mesh, **sizes),
            pipeline=_pipeline(cfg, layout),
            num_microbatches=layout.num_microbatches,
            microbatch_overlap=layout.microbatch_overlap,
        )
    except ValueError as error:
        raise InputError(f"layout {describe(layout)}: {error}") from error


def _pipeline(cfg: TrainConfig, layout: Layout) -> PipelineConfig:
    """The settings of the layout's stages."""
    if layout.stage == 1:
        return PipelineConfig()
    cuts = tuple(map(len, layout.part_layers(cfg.model.num_layers)))
    return PipelineConfig(layout.schedule, layout.stage_chunks, layout.unit, cuts=cuts)


def problem_of(cfg: TrainConfig) -> Problem:
    """What the cost model is asked: the config's model and batch on the devices at hand."""
    ask_for_devices(cfg.mesh)
    number_format = "fp32" if cfg.model.dtype == "float32" else "bf16"
    space = dataclasses.replace(Space().runnable(), exchanges=_EXCHANGES)
    if not _can_have_stages(cfg):
        space = dataclasses.replace(space, axes=tuple(axis for axis in space.axes if axis != "stage"), pipelines=())
    moe = cfg.model.moe
    if moe is not None:
        space = dataclasses.replace(space, codecs=(moe.codec,), exchanges=tuple(_legal(moe)))
    model, batch = model_of(cfg.model), Batch(cfg.seq, cfg.global_batch)
    return Problem(model, batch, parse_cluster("local"), recipe_of(cfg.model), number_format, space=space)


def _can_have_stages(cfg: TrainConfig) -> bool:
    """Whether a pipeline can run the model, under some policy of rematerialisation."""
    try:
        check_staged(dataclasses.replace(cfg.model, remat="none"))
    except ValueError:
        return False
    return True


def _legal(moe: MoEConfig) -> Iterator[str]:
    """The exchanges that implement the config's drop rule."""
    for exchange in _EXCHANGES:
        try:
            dataclasses.replace(moe, exchange=exchange, num_chunks=1)
        except ValueError:
            continue
        yield exchange


def _searched(cfg: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """The best layout that the config's own rules take too."""
    refused = ""
    for rank, found in enumerate(search(problem_of(cfg), _TRIES).found, 1):
        try:
            chosen = with_layout(cfg, found.layout)
            check_config(chosen)
            make_pipeline(chosen)
        except InputError as error:
            refused = str(error)
            continue
        say(f"layout #{rank}: {describe(found.layout)}; predicted {found.cost.step_seconds:.3g} s a step")
        return chosen
    raise InputError(f"layout=search: none of the best {_TRIES} layouts goes with this config; the last: {refused}")


def resolved(cfg: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """The config with a concrete exchange in place of "auto": the one whose step is shortest on this mesh."""
    moe = cfg.model.moe
    if moe is None or moe.exchange != "auto":
        return cfg
    problem, seconds = problem_of(cfg), {}
    # Stages change how often an exchange is made, alike for all of them.
    sizes: dict[str, Any] = {name: size for name, size in cfg.mesh.sizes.items() if name != "stage"}
    for exchange in problem.space.exchanges:
        layout = Layout(
            **sizes, exchange=exchange, codec=moe.codec, remat=cfg.model.remat, num_microbatches=cfg.num_microbatches
        )
        seconds[exchange] = cost(problem.job(layout)).step_seconds
    best = min(seconds, key=seconds.__getitem__)
    say(f"exchange auto: {best} (predicted {', '.join(f'{name} {took:.3g} s' for name, took in seconds.items())} a step)")
    moe = dataclasses.replace(moe, exchange=best)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe=moe))
