"""Proofs: the real training step of a layout, compiled ahead of time for its cluster, beside what was predicted."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from layouts import aot, hlo
from layouts.activations import rerun_kinds
from layouts.build import request_of
from layouts.cost import made_kinds
from layouts.errors import InputError
from layouts.hardware import Cluster
from layouts.layout import Layout
from layouts.lowered import bookkeeping_bytes, compiled_crossings, predicted_crossings
from layouts.memory import StageMemory, memory
from layouts.results import reasons
from layouts.search import Problem
from layouts.work import head_ops, layer_ops, share_of

# How far the compiled peak may be from the predicted one, and FLOPs, and bytes of gathers above the predicted ones.
TOLERANCE = 0.10


@dataclasses.dataclass(frozen=True)
class Held:
    """What a backend holds of each term for moejax's step, over what the algorithm needs: fitted to compiled texts.

    XLA:CPU holds gradients twice, as the sum and as what is added to it, and copies what the forward's scan has saved before
    the backward's reads it.
    """

    gradients: float = 1.0
    activations: float = 1.0
    recomputed: float = 1.0
    exchange: float = 1.0
    gathered: float = 1.0
    logits: float = 1.0


HELD = {"cpu": Held(2.2, 2.1, 1.33, 0.0, 0.77, 0.0), "gpu": Held(), "tpu": Held()}
# In a pipeline what the forward has saved lies in slots that are read in place. From the texts of six pipelines.
HELD_IN_STAGES = HELD | {"cpu": Held(2.2, 1.6, 0.6, 0.0, 0.77, 0.0)}


@dataclasses.dataclass(frozen=True)
class Check:
    """One figure: as predicted, as compiled, and whether they agree (None: said without a judgement)."""

    name: str
    predicted: str
    compiled: str
    agrees: bool | None

    @property
    def says(self) -> str:
        """In a word."""
        return {True: "agrees", False: "differs", None: ""}[self.agrees]


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the compiler said of a layout.

    Attributes:
      rank: in the answer.
      layout: the layout.
      target: what it was compiled for.
      verdict: "proved"; "failed": it does not compile, does not fit, or differs; "unverified": the compiler gave no figures,
        or there is no compiler for this hardware.
      words: why, in the compiler's words where it has some.
      checks: figure by figure.
    """

    rank: int
    layout: Layout
    target: str
    verdict: str
    words: str = ""
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the proof holds."""
        return self.verdict == "proved"

    def entry(self) -> dict[str, Any]:
        """As JSON."""
        checks = [dataclasses.asdict(check) | {"says": check.says} for check in self.checks]
        return {"target": self.target, "verdict": self.verdict, "words": self.words, "checks": checks}

    def lines(self) -> list[str]:
        """As text."""
        why = f": {self.words}" if self.words else ""
        head = f"#{self.rank} for {self.target}: {self.verdict}{why}"
        return [
            head,
            *(f"  {c.name:<26} predicted {c.predicted:>18}  compiled {c.compiled:>18}  {c.says}" for c in self.checks),
        ]


def prove_best(problem: Problem, layouts: Sequence[Layout], wanted: int) -> list[Proof]:
    """Proofs of the best layouts, one after another, until `wanted` hold: those that fail are recorded, and the next is tried.

    Raises:
      InputError: where the compilers are not installed.
    """
    found: list[Proof] = []
    for rank, layout in enumerate(layouts, 1):
        found.append(prove(problem, layout, rank))
        if sum(proof.passed for proof in found) == wanted:
            break
    return found


def prove(problem: Problem, layout: Layout, rank: int = 1, timeout_seconds: float = 900) -> Proof:
    """Compiles the layout's step in a child process and compares.

    Raises:
      InputError: where the compilers are not installed.
    """
    name = target_of(problem.cluster)
    if lacking := reasons(problem, layout):
        return Proof(rank, layout, name, "unverified", f"moejax does not run {', '.join(lacking)}")
    try:
        aot.Target.parse(name)
    except ValueError as error:
        return Proof(rank, layout, name, "unverified", str(error))
    request = request_of(problem.model, layout, problem.batch, problem.recipe, None)
    try:
        compiled = aot.compile_for(name, "layouts.build:step", request, timeout_seconds=timeout_seconds)
    except aot.CompilersMissingError as error:
        raise InputError(str(error)) from error
    except (aot.CompileError, TimeoutError) as error:
        return Proof(rank, layout, name, "failed", " ".join(str(error).split())[-600:])
    return judge(problem, layout, compiled, rank)


def target_of(cluster: Cluster) -> str:
    """The cluster's name as `layouts.aot` has it: the compilers know one class of devices in one slice."""
    part = cluster.classes[0]
    family = "a100" if part.chip.name.startswith("a100") else part.chip.name
    text = f"{family}:{'x'.join(map(str, part.shape))}"
    return text if not cluster.is_mixed and part.slices == 1 else str(cluster)


def judge(problem: Problem, layout: Layout, compiled: aot.Compiled, rank: int = 1) -> Proof:
    """Predicted against compiled."""
    name = str(compiled.target)
    if compiled.memory is None:
        return Proof(rank, layout, name, "unverified", "the compiler's memory statistics are all zero")
    program = hlo.read(compiled.text)
    peak = predicted_peak(problem, layout, compiled.target.kind)
    checks = [_near("peak bytes", peak, compiled.memory.peak_bytes)]
    checks += _crossing_checks(problem, layout, compiled)
    if layout.stage == 1:
        checks.append(_near("product FLOPs", predicted_flops(problem, layout), program.dot_flops + program.kernel_flops))
    if program.cycles:
        checks.append(Check("compiler's Mcycles", "-", f"{program.cycles / 1e6:,.1f}", None))
    over = compiled.memory.peak_bytes - problem.limit_bytes
    words = [f"needs {over:,.0f} bytes more than a device has"] if over > 0 else []
    words += list(compiled.alarms[:1])
    words += [f"{check.name} differ" for check in checks if check.agrees is False]
    return Proof(rank, layout, name, "failed" if words else "proved", "; ".join(words), tuple(checks))


def _near(name: str, predicted: float, compiled: float) -> Check:
    return Check(name, f"{predicted:,.0f}", f"{compiled:,.0f}", abs(predicted / compiled - 1) <= TOLERANCE)


def _crossing_checks(problem: Problem, layout: Layout, compiled: aot.Compiled) -> list[Check]:
    """By kind: arrays and bytes. On the CPU in float32, with one micro-batch, they must be the same to the byte.

    A pipeline's are only read: its program holds every stage's ops, and each device runs those of its own.
    """
    limit = bookkeeping_bytes(problem.batch, layout)
    kind = compiled.target.kind
    piped = layout.stage > 1
    predicted = {} if piped else predicted_crossings(problem.model, layout, problem.batch, problem.recipe, kind)
    found = {key: times for key, times in compiled_crossings(compiled.text).items() if key.nbytes > limit}
    exact = kind == "cpu" and problem.recipe.compute_bytes == 4 and layout.num_microbatches == 1
    checks = []
    for name in sorted({key.kind for key in (*predicted, *found)}):
        sides = [{key: times for key, times in side.items() if key.kind == name} for side in (predicted, found)]
        words = [f"{sum(side.values())} x, {sum(k.nbytes * n for k, n in side.items()):,} B" for side in sides]
        checks.append(Check(name, "-" if piped else words[0], words[1], sides[0] == sides[1] if exact else None))
    return checks


def predicted_peak(problem: Problem, layout: Layout, backend: str) -> float:
    """Bytes of a device as moejax's step holds them under a backend: the states exactly, the rest as `HELD` says."""
    stage: StageMemory = memory(problem.model, layout, problem.batch, problem.recipe).heaviest
    states = sum(map(stage.term, ("parameters", "master", "moments")))
    held = (HELD if layout.stage == 1 else HELD_IN_STAGES)[backend]
    return states + sum(factor * stage.term(name) for name, factor in vars(held).items())


def predicted_flops(problem: Problem, layout: Layout) -> float:
    """Of the products in one device's step as XLA's own attention does them: whole squares of scores, no causal half."""
    model, again = problem.model, rerun_kinds(layout.remat)
    found = 0.0
    for layer, times in zip(model.kinds, model.kind_counts(range(len(model.layers))), strict=True):
        share = share_of(layer, layout, problem.batch, problem.recipe)
        for op in layer_ops(layer, model.d_model, share, problem.recipe.compute_bytes):
            runs = 3 + bool(made_kinds(op.kind, op.name, True) & again)
            found += times * runs * op.flops * (2 if op.kind == "attention" else 1)
    share = share_of(model.layers[-1], layout, problem.batch, problem.recipe)
    found += 3 * sum(op.flops for op in head_ops(model, share, problem.recipe.compute_bytes))
    return found * layout.num_microbatches
