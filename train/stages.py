"""The pipeline that a config asks for."""

import functools

from layouts.errors import LayoutsError
from layouts.schedules import MAKERS, make_schedule
from layouts.tables import Shape
from moejax.pipeline import Schedule
from moejax.staged import Pipeline
from train.config import PipelineConfig, TrainConfig
from train.errors import InputError


def make_pipeline(cfg: TrainConfig) -> Pipeline | None:
    """The pipeline of a run; None without stages. Touches no device.

    Raises:
      InputError: where the schedule cannot have these stages, chunks and micro-batches, or cannot run this model.
    """
    chosen, stages = cfg.pipeline, cfg.mesh.stage
    if stages == 1 and chosen != PipelineConfig():
        raise InputError(f"pipeline.schedule={chosen.schedule!r} with mesh.stage=1: settings of a pipeline need stages")
    if stages == 1:
        return None
    if chosen.schedule == "none":
        raise InputError(f"pipeline.schedule='none' with mesh.stage={stages}: legal are {', '.join(MAKERS)}")
    if cfg.microbatch_overlap != 1:
        raise InputError(f"microbatch_overlap={cfg.microbatch_overlap}: in a pipeline the schedule overlaps them; legal is 1")
    if cfg.trace_tokens:
        raise InputError(f"eval.trace_tokens={cfg.trace_tokens}: over stages no routing is recorded; legal are 0 and none")
    try:
        schedule = _schedule(chosen, stages, cfg.num_microbatches)
        pipeline = Pipeline(schedule, chosen.cuts)
        pipeline.check(cfg.model, stages)
    except LayoutsError as error:
        raise InputError(f"pipeline: {error}") from error
    except ValueError as error:
        raise InputError(f"pipeline: {error}") from error
    return pipeline


@functools.lru_cache
def _schedule(chosen: PipelineConfig, stages: int, num_microbatches: int) -> Schedule:
    shape = Shape(stages, num_microbatches, chosen.chunks, chosen.unit, chosen.split)
    return make_schedule(chosen.schedule, shape)
