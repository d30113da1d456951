"""Ahead-of-time compiles for hardware that is not there, each in a child process with an environment of its own.

With libtpu or the CUDA plugin installed, a plain `import jax` looks for such a device first; so the compilers live in
`.venv-aot` (the extra `aot`), and this process imports no jax for them. `layouts.aot_child` is the other half.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
INTERPRETER_VARIABLE = "MOEJAX_AOT_PYTHON"
# Family: (the prefix of TPU_ACCELERATOR_TYPE, cores a chip). Without that name libtpu warns on every start.
TPUS = {"v4": ("v4", 2), "v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1), "tpu7x": ("tpu7x", 2)}
GPUS = tuple(sorted(path.stem for path in DATA.glob("*.txtpb")))
# What a proof must not overlook among the compiler's messages: a reshard that it could only do by gathering everything.
ALARMING = re.compile(r"full rematerialization", re.IGNORECASE)
# Among the child's messages, before those of each program.
MARK = "moejax-aot: next program\n"


class CompilersMissingError(RuntimeError):
    """The environment of the compilers is not installed."""


class CompileError(RuntimeError):
    """The builder or the compiler failed in the child process; the message ends in the child's own words."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Hardware to compile for, as written: "v5p:2x2x2" (chips), "h100:1x8" (hosts x GPUs), "cpu:8" (virtual devices).

    Attributes:
      kind: "tpu", "gpu" or "cpu".
      family: "v5p", "h100", "cpu" ...
      shape: chips along each torus axis; (hosts, GPUs a host); (devices,).
    """

    kind: str
    family: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads "family:AxBxC".

        Raises:
          ValueError: for an unknown family or a shape of the wrong form.
        """
        family, _, sizes = text.partition(":")
        kinds = {**dict.fromkeys(TPUS, "tpu"), **dict.fromkeys(GPUS, "gpu"), "cpu": "cpu"}
        if family not in kinds:
            raise ValueError(f"target {text!r}: legal families are {', '.join(kinds)}, as in 'v5p:2x2x2' or 'h100:1x8'")
        rank = {"tpu": (2, 3), "gpu": (2,), "cpu": (1,)}[kinds[family]]
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or sizes.count("x") + 1 not in rank:
            form = {
                "tpu": "chips along 2 or 3 axes (2x2x2)",
                "gpu": "HOSTSxGPUS (1x8)",
                "cpu": "a number of devices (8)",
            }
            raise ValueError(f"target {text!r}: after {family!r} needs {form[kinds[family]]}")
        return cls(kinds[family], family, tuple(map(int, sizes.split("x"))))

    def __str__(self) -> str:
        return f"{self.family}:{'x'.join(map(str, self.shape))}"

    def environment(self) -> dict[str, str]:
        """The variables under which a child process compiles for this target and looks for no device."""
        found = {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "XLA_FLAGS": "",
            "TF_CPP_MIN_LOG_LEVEL": "1",
        }
        if self.kind == "cpu":
            found["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={self.shape[0]}"
        if self.kind == "tpu":
            prefix, cores = TPUS[self.family]
            found |= {
                "TPU_ACCELERATOR_TYPE": f"{prefix}-{math.prod(self.shape) * cores}",
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            }
        return found


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to compile.

    Attributes:
      build: "module:function". The child calls function(devices, **arguments) with the target's devices and takes the
        `jax.stages.Lowered` that it returns. The module must be importable from the checkout or the working directory.
      arguments: what JSON can carry.
      compiler_options: for `Lowered.compile`.
    """

    build: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if not re.fullmatch(r"[\w.]+:\w+", self.build):
            raise ValueError(f"build {self.build!r}: needs 'module:function'")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler's `memory_analysis` gives them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments + outputs - what both share + temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came out of one compile.

    Attributes:
      target: what it was compiled for.
      text_path: the scheduled, partitioned HLO (`layouts.hlo.read` takes its text).
      memory: bytes a device; None where the compiler gave zeros: unverified, which is not "fits".
      cost: the compiler's own `cost_analysis` totals ({} on GPU). They count a loop's body once.
      lower_seconds: tracing and lowering.
      compile_seconds: the compiler.
      alarms: lines of the compiler's messages that say it fell back to gathering a whole array.
    """

    target: Target
    text_path: Path
    memory: Memory | None
    cost: dict[str, float]
    lower_seconds: float
    compile_seconds: float
    alarms: tuple[str, ...]

    @property
    def text(self) -> str:
        """The HLO text."""
        return self.text_path.read_text()


def interpreter(target: Target) -> Path:
    """The python that can compile for the target: for "cpu" this one, else $MOEJAX_AOT_PYTHON or that of `.venv-aot`.

    Raises:
      CompilersMissingError: where that is not there.
    """
    if target.kind == "cpu":
        return Path(sys.executable)
    path = Path(os.environ.get(INTERPRETER_VARIABLE) or ROOT / ".venv-aot" / "bin" / "python")
    if not path.exists():
        raise CompilersMissingError(
            f"no compilers for {target} at {path}: run `make .venv-aot/.aot`, or pip install 'moejax[aot]' into an "
            f"environment of its own and name its python in {INTERPRETER_VARIABLE}"
        )
    return path


def compile_for(
    target: str | Target,
    build: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    out: Path | None = None,
    timeout_seconds: float = 600,
) -> Compiled:
    """Compiles what `build` lowers, for hardware that need not be there, in a child process.

    Args:
      target: see `Target`.
      build: with `arguments` and `compiler_options`, a `Job`.
      out: folder for the text; default a new one under the system's temporary folder, which stays.
      timeout_seconds: the child is killed after that long.

    Raises:
      ValueError: for an unknown target or a build that is not "module:function".
      CompilersMissingError: where the compilers' environment is not installed.
      CompileError: where building or compiling fails.
      TimeoutError: where it takes longer than `timeout_seconds`.
    """
    job = Job(build, arguments or {}, compiler_options or {})
    return _compile(target, {"": job}, out, timeout_seconds)[""]


def compile_all(
    target: str | Target, jobs: Mapping[str, Job], *, out: Path | None = None, timeout_seconds: float = 600
) -> dict[str, Compiled]:
    """As `compile_for`, several programs one after another in one child, whose start is then paid for once.

    Args:
      target: see `Target`.
      jobs: by name, of letters, digits, "_", "-" and ".": each text gets a folder of that name.
      out: the folder that those are made in.
      timeout_seconds: for all of them together.

    Returns:
      Each job's result by its name.

    Raises:
      ValueError, CompilersMissingError, CompileError, TimeoutError: as `compile_for`; the first program that fails ends it.
    """
    for name in jobs:
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"program {name!r}: needs a name of letters, digits, '_', '-' and '.'")
    return _compile(target, jobs, out, timeout_seconds)


def _compile(target, jobs: Mapping[str, Job], out: Path | None, timeout_seconds: float) -> dict[str, Compiled]:
    target = target if isinstance(target, Target) else Target.parse(target)
    python = interpreter(target)
    folder = Path(tempfile.mkdtemp(prefix="moejax-aot-")) if out is None else Path(out)
    folders = {name: folder / name for name in jobs}
    for place in folders.values():
        place.mkdir(parents=True, exist_ok=True)
    programs = [_plain(job) | {"folder": str(folders[name].resolve())} for name, job in jobs.items()]
    request = json.dumps({"target": dataclasses.asdict(target), "programs": programs})
    messages = _run(python, request, target, list(jobs), timeout_seconds).split(MARK)[1:]
    return {name: _result(folders[name], target, part) for name, part in zip(jobs, messages, strict=True)}


def _plain(job: Job) -> dict[str, Any]:
    return {"build": job.build, "arguments": dict(job.arguments), "compiler_options": dict(job.compiler_options)}


def _run(python: Path, request: str, target: Target, names: list[str], timeout_seconds: float) -> str:
    """The child's messages, once it has ended well."""
    paths = [str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | target.environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [str(python), "-m", "layouts.aot_child"]
    limits = {"timeout": timeout_seconds, "check": False}
    try:
        done = subprocess.run(command, input=request, env=environment, capture_output=True, text=True, **limits)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"compiling for {target} took longer than {timeout_seconds:g} s") from error
    if done.returncode:
        begun = [name for name in names[: done.stderr.count(MARK)] if name][-1:]
        what = "".join(f"{name!r} " for name in begun)
        raise CompileError(f"compiling {what}for {target} failed (exit {done.returncode}): {_last_words(done.stderr)}")
    return done.stderr


def _last_words(messages: str) -> str:
    """From the last line that names an exception on; the last line where none does (a crash)."""
    lines = messages.strip().splitlines() or ["no message"]
    named = [index for index, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return "\n".join(lines[named[-1] if named else -1 :])


def _result(folder: Path, target: Target, messages: str) -> Compiled:
    found = json.loads((folder / "result.json").read_text())
    memory = Memory(**found["memory"])
    return Compiled(
        target=target,
        text_path=folder / "program.hlo",
        memory=memory if any(found["memory"].values()) else None,
        cost=found["cost"],
        lower_seconds=found["lower_seconds"],
        compile_seconds=found["compile_seconds"],
        alarms=tuple(line for line in messages.splitlines() if ALARMING.search(line)),
    )
