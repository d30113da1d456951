"""TrainConfig: the frozen facts of a run. Impossible ones are refused here, before any device work."""

import dataclasses
import math

from jax.sharding import AbstractMesh

from moejax import AxisRules, TransformerConfig
from moejax import axes as ax
from moejax.checks import positive
from moejax.step import check_microbatches
from moejax.transformer import check_model
from train.errors import InputError

RULES = AxisRules()
# Whose routing an evaluation records, unless the config says how many.
_TRACE_TOKENS = 4096


def _above(name: str, value: float, bound: float) -> None:
    if not bound < value < math.inf:
        raise ValueError(f"{name}={value!r}: needs a finite number above {bound}")


def _at_least(name: str, value: float, bound: float) -> None:
    if not bound <= value < math.inf:
        raise ValueError(f"{name}={value!r}: needs a finite number of at least {bound}")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis.

    Attributes:
      data: replicas of the parameters.
      fsdp: parts that parameters are split into along the model width, gathered before use.
      stage: pipeline stages, see `PipelineConfig`.
      expert: parts that the experts are split over.
      tensor: parts that heads and hidden widths are split into.
      virtual_devices: on a machine without accelerators, the CPU plays this many devices; 0 leaves jax's own number.
    """

    data: int = 1
    fsdp: int = 1
    stage: int = 1
    expert: int = 1
    tensor: int = 1
    virtual_devices: int = 0

    def __post_init__(self):
        for name in self.sizes:
            positive(name, getattr(self, name))
        _at_least("virtual_devices", self.virtual_devices, 0)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by axis, in the order of the mesh."""
        return {name: getattr(self, name) for name in ("data", "fsdp", "stage", "expert", "tensor")}

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.sizes.values())


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How a step runs over `mesh.stage` stages; its micro-batches are the config's `num_microbatches`.

    Attributes:
      schedule: a name from `layouts.schedules.MAKERS`; "none" without stages.
      chunks: V, chunks of the model on a stage; none: the schedule's own.
      unit: U of "zeropp": micro-batches for which a chunk's parameters are gathered once; none: the schedule's own.
      split: "gpipe", "1f1b" and "interleaved" send an input's gradient before they compute the weights'.
      cuts: layers of each of the stage x chunks parts of the model, in its order; none: as even as can be.
    """

    schedule: str = "none"
    chunks: int | None = None
    unit: int | None = None
    split: bool = False
    cuts: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in ("chunks", "unit"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text and how it is cut.

    Attributes:
      corpus: "stdlib", the running Python's own standard library sources; files or folders, separated by commas; or
        "hf:NAME" and "hf:NAME/SUBSET", a Hugging Face data set's train split.
      tokenizer: "bytes", or the path of a Hugging Face `tokenizers` JSON file.
      held_out: fraction of the documents, chosen by their hash, that is never trained on.
      text_column: the column of a Hugging Face data set that holds the text.
    """

    corpus: str = "stdlib"
    tokenizer: str = "bytes"
    held_out: float = 0.02
    text_column: str = "text"

    def __post_init__(self):
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out={self.held_out!r}: needs a fraction above 0 and below 1")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019), linear warm-up, cosine decay, clipping by the global norm.

    Attributes:
      learning_rate: at its peak.
      warmup_steps: steps from 0 to the peak.
      final_fraction: what the cosine ends at, as a fraction of the peak.
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root of that mean.
      weight_decay: on matrices only: norms and other vectors are left out.
      clip_norm: the largest global gradient norm.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 100
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("learning_rate", "eps", "clip_norm"):
            _above(name, getattr(self, name), 0)
        for name in ("warmup_steps", "weight_decay"):
            _at_least(name, getattr(self, name), 0)
        for name in ("b1", "b2", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: needs a number from 0 to 1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save.

    Attributes:
      every: steps between checkpoints; the last step is saved too.
      keep: how many of the newest are kept.
    """

    every: int = 1000
    keep: int = 3

    def __post_init__(self):
        positive("every", self.every)
        positive("keep", self.keep)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and on how much held-out text to evaluate.

    Attributes:
      every: steps between evaluations; 0 evaluates at the end only.
      max_bytes: held-out documents are taken whole, in the order of their hashes, as long as they fit in this.
      trace_tokens: of its first batch, tokens whose routing is recorded in `routing.npz`, which the pictures read; 0: none.
        "none": 4096, or 0 over pipeline stages, which cannot record any.
    """

    every: int = 1000
    max_bytes: int = 1_000_000
    trace_tokens: int | None = None

    def __post_init__(self):
        _at_least("every", self.every, 0)
        if self.trace_tokens is not None:
            _at_least("trace_tokens", self.trace_tokens, 0)
        positive("max_bytes", self.max_bytes)


@dataclasses.dataclass(frozen=True)
class AlarmConfig:
    """What is worth an alarm, besides a loss that is not finite (which always stops the run).

    Attributes:
      dropped_fraction: dropped (token, expert) pairs over all, of one step, above which it rings.
      dead_expert_steps: an expert that no token chose for this many steps in a row rings.
    """

    dropped_fraction: float = 0.5
    dead_expert_steps: int = 100

    def __post_init__(self):
        _above("dropped_fraction", self.dropped_fraction, 0)
        positive("dead_expert_steps", self.dead_expert_steps)


@dataclasses.dataclass(frozen=True)
class PlacementConfig:
    """Experts that move between devices as their loads change; for models with `moe.num_slots`.

    Attributes:
      every: steps between two looks at the loads; 0: experts stay.
      decay: what a step's loads weigh a step later.
      horizon_steps: for how many steps loads are believed to stay as they are. Only what pays for its bytes by then is moved.
      bytes_per_second: between two devices.
      flops_per_second: of a device's products.
    """

    every: int = 0
    decay: float = 0.9
    horizon_steps: float = 1000
    bytes_per_second: float = 5e10
    flops_per_second: float = 4e14

    def __post_init__(self):
        _at_least("every", self.every, 0)
        for name in ("horizon_steps", "bytes_per_second", "flops_per_second"):
            _above(name, getattr(self, name), 0)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay!r}: needs a number of at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text written at the end.

    Attributes:
      prompt: what it begins with.
      num_tokens: how many are added; 0 writes none.
      temperature: of the softmax they are drawn from.
    """

    prompt: str = "def "
    num_tokens: int = 0
    temperature: float = 0.8

    def __post_init__(self):
        _at_least("num_tokens", self.num_tokens, 0)
        _above("temperature", self.temperature, 0)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run.

    Attributes:
      model: the model.
      mesh: the devices it is spread over.
      pipeline: the schedule of its stages.
      data: the text.
      optimizer: AdamW and its schedule.
      checkpoint: when to save.
      eval: when to evaluate.
      alarms: what to warn of.
      placement: when experts move.
      sample: the text written at the end.
      steps: optimizer steps in all.
      global_batch: rows of `seq` tokens in one step, over all devices and micro-batches.
      seq: tokens in a row.
      num_microbatches: parts of the batch that are worked through one after the other, their gradients added.
      microbatch_overlap: how many of them walk through the layers together, so that one's exchanges run beside another's
        products, for the memory of as many (see `moejax.step.make_train_step`).
      seed: of the parameters, the order of the text and the sample.
      deterministic: the same bits on every run on GPUs too, which may cost them some speed (see `moejax.compiler_options`).
      log_every: steps between two lines of metrics.
      run_dir: folder of checkpoints, metrics and plot; empty for runs/CONFIG.
      compilation_cache: folder of compiled programs, or "none". JAX_COMPILATION_CACHE_DIR in the environment wins.
    """

    model: TransformerConfig
    steps: int
    global_batch: int
    seq: int
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    alarms: AlarmConfig = AlarmConfig()
    placement: PlacementConfig = PlacementConfig()
    sample: SampleConfig = SampleConfig()
    num_microbatches: int = 1
    microbatch_overlap: int = 1
    seed: int = 0
    deterministic: bool = True
    log_every: int = 10
    run_dir: str = ""
    compilation_cache: str = "~/.cache/moejax/xla"

    def __post_init__(self):
        for name in ("steps", "global_batch", "seq", "log_every"):
            positive(name, getattr(self, name))
        check_microbatches(self.num_microbatches, self.microbatch_overlap)
        _at_least("seed", self.seed, 0)

    @property
    def trace_tokens(self) -> int:
        """Tokens whose routing an evaluation records."""
        if self.eval.trace_tokens is None:
            return 0 if self.mesh.stage > 1 else _TRACE_TOKENS
        return self.eval.trace_tokens


def check_config(cfg: TrainConfig) -> None:
    """Refuses what only the parts together show to be impossible; touches no device.

    Raises:
      InputError: where a mesh axis does not divide the model or the batch, naming the nearest legal sizes.
    """
    mesh = AbstractMesh(tuple(cfg.mesh.sizes.values()), tuple(cfg.mesh.sizes))
    try:
        check_model(cfg.model, RULES, mesh)
        _check_batch(cfg, mesh)
    except ValueError as error:
        raise InputError(str(error)) from error


def _check_batch(cfg: TrainConfig, mesh: AbstractMesh) -> None:
    if cfg.global_batch % cfg.num_microbatches:
        legal = [n for n in range(1, cfg.global_batch + 1) if cfg.global_batch % n == 0]
        raise InputError(
            f"num_microbatches={cfg.num_microbatches} does not divide global_batch={cfg.global_batch}: "
            f"legal are {', '.join(map(str, legal))}"
        )
    rows = cfg.global_batch // cfg.num_microbatches
    ax.check_divides("global_batch / num_microbatches", rows, RULES.axes("batch", mesh), mesh)
    moe = cfg.model.moe
    if cfg.placement.every and (moe is None or moe.num_slots is None):
        raise InputError(f"placement.every={cfg.placement.every}: needs model.moe.num_slots, or 0")
    if moe is not None and moe.num_senders is not None and rows * cfg.seq % moe.num_senders:
        raise InputError(
            f"model.moe.num_senders={moe.num_senders} does not divide a micro-batch of {rows} x {cfg.seq} tokens: "
            f"needs a divisor of {rows * cfg.seq}"
        )
