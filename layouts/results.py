"""Answers as JSON values: what `search` writes of a problem and of each layout."""

from typing import Any

from layouts.cost import Cost
from layouts.layout import Layout
from layouts.memory import Memory
from layouts.search import Found, Problem


def workload_entry(problem: Problem) -> dict[str, Any]:
    """The model's counts and the batch."""
    model, batch = problem.model, problem.batch
    return {
        "model": model.name,
        "flops_per_token": model.flops_per_token(batch.seq),
        "params_total": model.params_total,
        "params_active": model.params_active,
        "seq": batch.seq,
        "global_batch": batch.tokens,
        "cluster": str(problem.cluster),
        "devices": problem.cluster.num_devices,
        "memory_limit_bytes": problem.limit_bytes,
        "objective": problem.objective,
    }


def reasons(problem: Problem, layout: Layout) -> list[str]:
    """Why moejax does not run the model so; empty where it does."""
    return [*problem.model.not_runnable(), *layout.not_runnable()]


def layout_entry(problem: Problem, found: Found, rank: int) -> dict[str, Any]:
    """One layout of the answer."""
    lacking = reasons(problem, found.layout)
    return {
        "rank": rank,
        "layout": found.layout.to_json(),
        **figures(problem, found.cost, found.memory, found.batch.tokens, found.layout),
        "runnable": not lacking,
        "not_runnable": lacking,
    }


def figures(problem: Problem, priced: Cost, held: Memory, tokens: int, layout: Layout) -> dict[str, Any]:
    """Seconds and bytes, term by term."""
    per_second = tokens / priced.step_seconds / layout.num_devices
    heaviest = held.heaviest
    return {
        "step_seconds": priced.step_seconds,
        "global_batch": tokens,
        "tokens_per_second_per_device": per_second,
        "model_flops_utilisation": utilisation(problem, per_second),
        "time": priced.terms,
        "stage_seconds": list(priced.stage_seconds),
        "peak_bytes": heaviest.total_bytes,
        "heaviest_stage": heaviest.stage,
        "memory": {name: heaviest.term(name) for name in heaviest.terms},
        "host_bytes": max(stage.host_bytes for stage in held.stages),
    }


def utilisation(problem: Problem, tokens_per_second: float) -> float:
    """Model FLOP/s of a device over the peak of its format."""
    chip = problem.job(Layout()).chip
    return tokens_per_second * problem.model.flops_per_token(problem.batch.seq) / chip.peak(problem.number_format)
