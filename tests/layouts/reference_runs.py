"""Published runs (data/reference_runs.csv, each with its source): rows of one run joined, models and layouts read, grouped."""

import csv
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from layouts.layout import Layout
from layouts.model import Attention, FeedForward, Layer, Model
from layouts.presets import load_model
from layouts.workload import MEGATRON, Batch, Recipe

PATH = Path(__file__).parent / "data" / "reference_runs.csv"
PARALLEL = ("dp", "fsdp", "tp", "pp", "vpp", "ep", "cp", "microbatch")
# The same model under its sources' names; what is not here is built from the row's own columns.
PRESETS = {
    "llama-3.1-8b": ("LLAMA3_8B", "Llama-3.1-8B", "Llama3.1-8B-MaxText"),
    "llama-3.1-70b": ("LLAMA3_70B", "llama3.1-70b", "Llama3.1-70B-MaxText", "Llama 3.1 70B"),
    "llama-3.1-405b": ("LLAMA3.1_405B", "Llama-3.1-405B", "llama3.1-405b", "Llama3.1-405B-MaxText", "Llama 3.1 405B"),
    "qwen3-30b-a3b": ("Qwen3_30B_a3B", "Qwen3_30B_a3B (tokendrop)"),
    "qwen3-235b-a22b": ("Qwen3_235B_a22B", "Qwen3_235B_a22B (tokendrop)", "Qwen3-235B-A22B", "qwen3-235b-a22b"),
    "mixtral-8x7b": ("Mixtral 8x7B", "Mixtral-8x7B-MaxText"),
    "mixtral-8x22b": ("Mixtral 8x22B", "Mixtral-8x22B"),
}
NAMES = {alias: name for name, aliases in PRESETS.items() for alias in aliases}
CHIPS = {
    "DGX-GB300": "gb300",
    "GB300": "gb300",
    "DGX-GB200": "gb200",
    "GB200": "gb200",
    "DGX-B300": "b300",
    "DGX-B200": "b200",
    "DGX-H100": "h100",
    "H100": "h100",
    "h100_80gb": "h100",
    "H100 (IB 8x50GB/s)": "h100",
    "H100-80GB (A3)": "h100",
    "H100-96GB HBM2e 500W": "h100",
    "A100-80GB": "a100-80",
    "a100_80gb": "a100-80",
    "a100_40gb": "a100-40",
    "TPU v4": "v4",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v6e": "v6e",
    "TPU7x Ironwood": "tpu7x",
}
TOKENS = ("tokens_per_s_per_device", "tokens_per_s_per_chip")
FLOPS = ("model_tflops_per_device", "model_tflops_per_chip")


@dataclasses.dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
      source: where it is published.
      family: the model, under one name for all sources.
      task: "pretraining", "SFT" or "LoRA".
      hardware: as the source writes it.
      chip: name in data/chips.toml; "" where none is stated.
      devices: chips of the run; None where not stated.
      layout: (column, number) pairs that the source states, of `PARALLEL`.
      seq: tokens of a sequence; None where not stated.
      sequences: of the whole batch; None where not stated.
      precision: as the source writes it.
      notes: the rest, without what follows from the figures.
      measured: (metric, value) pairs.
    """

    source: str
    family: str
    task: str
    hardware: str
    chip: str
    devices: int | None
    layout: tuple[tuple[str, int], ...]
    seq: int | None
    sequences: int | None
    precision: str
    notes: str
    measured: tuple[tuple[str, float], ...]

    @property
    def model(self) -> Model | None:
        """The model; None where the source gives no sizes."""
        return models()[self.family]

    @property
    def has_layout(self) -> bool:
        """Whether the source says how the devices were used."""
        stated = dict(self.layout).keys()
        return {"tp", "pp"} <= stated and bool({"dp", "fsdp", "ep"} & stated)

    @property
    def tokens_per_second(self) -> float | None:
        """Of one device: as stated, else from the step's time, else from the stated FLOP/s; None for runs without a time."""
        measured = dict(self.measured)
        for metric in TOKENS:
            if metric in measured:
                return measured[metric]
        if "step_time_s" in measured and self.seq and self.sequences and self.devices:
            return self.seq * self.sequences / self.devices / measured["step_time_s"]
        for metric in FLOPS:
            if metric in measured and self.model and self.seq:
                return measured[metric] * 1e12 / self.model.flops_per_token(self.seq)
        return None

    @property
    def what_ran(self) -> tuple:
        """What repeated runs share: layout, batch, precision and recompute, whatever the software and its version."""
        layout = tuple((name, count) for name, count in self.layout if count > 1 and name != "dp")
        return layout, self.seq, self.sequences, self.number_format, stated_remat(self), self.exact_load

    @property
    def number_format(self) -> str:
        """Of the products: "bf16", "fp8" or "fp4"."""
        text = self.precision.lower()
        return "fp4" if "fp4" in text else "fp8" if "fp8" in text else "bf16"

    @property
    def exact_load(self) -> bool:
        """Whether experts got what the router chose, where the source tells this from an even load by force."""
        return "real dropless routing" in self.notes


def runs(path: Path = PATH) -> list[Run]:
    """All runs: rows that differ only in the metric are one; a metric that comes again with another value is another run."""
    found: dict[tuple, list[dict[str, float]]] = {}
    for row in rows(path):
        key = tuple(
            value if name != "notes" else _plain(value) for name, value in row.items() if name not in ("metric", "value")
        )
        measured, value = found.setdefault(key, [{}]), float(row["value"])
        if measured[-1].get(row["metric"], value) != value:
            measured.append({})
        measured[-1][row["metric"]] = value
    names = [name for name in rows(path)[0] if name not in ("metric", "value")]
    return [_run(dict(zip(names, key, strict=True)), one) for key, several in found.items() for one in several]


def groups(found: Iterable[Run]) -> dict[tuple[str, str, int], list[Run]]:
    """Timed runs whose layout is stated, by (model and task, hardware, devices)."""
    grouped = defaultdict(list)
    for run in found:
        if run.has_layout and run.tokens_per_second and run.devices and run.chip:
            task = "" if run.task == "pretraining" else f" {run.task}"
            grouped[run.family + task, run.chip, run.devices].append(run)
    return dict(grouped)


def distinct(group: Iterable[Run]) -> dict[tuple, list[Run]]:
    """The runs of a group by what ran: those of one entry are repeats, ties by definition."""
    found = defaultdict(list)
    for run in group:
        found[run.what_ran].append(run)
    return dict(found)


@functools.cache
def models() -> dict[str, Model | None]:
    """Every family's model, from the presets or from the rows' own columns; None where these are missing."""
    found: dict[str, Model | None] = {}
    for row in rows():
        family = NAMES.get(row["model"], row["model"])
        found[family] = found.get(family) or (load_model(family) if family in PRESETS else _from_columns(row))
    return found


# Parameters, gradients and moments in float32, divided; attention fused: MaxText and PyTorch's FSDP.
FLOAT32 = Recipe("float32", 4, 2, 4, 0, 8)


def layout_of(run: Run, remat: str) -> tuple[Layout, Batch, Recipe] | None:
    """How the run used its devices, in our terms; None where the source leaves that open, or they have no word.

    Experts are folded over the tensor axis, as in Megatron-Core, where both are stated.
    """
    stated = dict(run.layout)
    if not (run.has_layout and run.devices and run.seq and run.sequences and run.model):
        return None
    tensor, stage, context = stated["tp"], stated["pp"], stated.get("cp", 1)
    replicas = run.devices // (tensor * stage * context)
    shards, divided = stated.get("ep", 1), stated.get("fsdp", 0)
    axes = _expert_axes(shards, replicas, tensor, context)
    expert = shards // (tensor if "tensor" in axes else 1) // (context if "context" in axes else 1)
    if not expert:
        return None  # experts over a part of an axis
    # MaxText states both, the slices and the parts within one; Megatron-Bridge the same number twice.
    fsdp = (divided if stated.get("dp", 1) * divided == replicas else replicas) // expert if divided > 1 else 1
    data = replicas // (expert * fsdp)
    chunks, micro = stated.get("vpp", 1), stated.get("microbatch", 1)
    parts = stage * chunks
    # Megatron counts embedding and head as layers where the model's own do not fill the parts.
    ends = parts == len(run.model.layers) + 2
    layout = Layout(
        data=data,
        fsdp=fsdp,
        stage=stage,
        expert=expert,
        tensor=tensor,
        context=context,
        expert_axes=axes,
        num_microbatches=max(1, run.sequences // (data * fsdp * expert * micro)),
        schedule="none" if stage == 1 else "interleaved" if chunks > 1 else "1f1b",
        stage_chunks=chunks if stage > 1 else 1,
        cuts=(0, *(1,) * (parts - 2), 0) if ends else None,
        # DeepEP and HybridEP: a token crosses once to each domain of its experts.
        exchange="hierarchical" if shards > 1 else "all_to_all",
        remat=remat,
        sequence=tensor > 1,
        moments="over_data",
    )
    return layout, Batch(run.seq, run.sequences), FLOAT32 if fsdp > 1 or run.chip.startswith(("v", "tpu")) else MEGATRON


def _expert_axes(shards: int, replicas: int, tensor: int, context: int) -> tuple[str, ...]:
    axes = ("expert", "tensor") if shards > 1 and tensor > 1 else ("expert",)
    return (*axes, "context") if shards > replicas * (tensor if len(axes) == 2 else 1) and context > 1 else axes


def stated_remat(run: Run) -> str | None:
    """The remat policy that the notes state; None where they state none."""
    notes = run.notes.lower()
    if "recompute=none" in notes or "no recompute" in notes:
        return "none"
    if "recompute=norm,act" in notes:
        return "norm+activation"
    if "selective" in notes:
        return "selective"
    if "remat=minimal" in notes:
        return "norm+activation"
    return "full" if re.search(r"remat=full|full ac|full recompute|checkpointing=ckpt", notes) else None


def _from_columns(row: Mapping[str, str]) -> Model | None:
    if not all(row[name].isdigit() for name in ("layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "vocab")):
        return None
    d, width, heads = int(row["d_model"]), int(row["d_ff"]), int(row["n_heads"])
    oldest = row["model"] in ("maxtext-22B", "maxtext-52B")
    gated = row["model"].startswith(("Llama", "Mistral", "maxtext-")) and not oldest
    tied = row["model"].startswith(("MPT", "megatron", "turing", "GPT3"))
    # MaxText's scaled models have heads of 128 (of 256 in the two oldest), whatever their number; others divide the width.
    head = 256 if oldest else 128 if row["model"].startswith("maxtext") else d // heads
    attention = Attention(heads, int(row["n_kv_heads"]), head, head)
    layer = Layer(attention, FeedForward(width, gated))
    return Model(row["model"], d, int(row["vocab"]), (layer,) * int(row["layers"]), tied)


@functools.cache
def rows(path: Path = PATH) -> list[dict[str, str]]:
    """The file's rows, one a figure."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _plain(notes: str) -> str:
    """Notes without what follows from the figures, which differs between rows of one run."""
    return re.sub(r"[;,]? ?(implied step_time_s|\([^)]*alt[^)]*\)|[\d.]+ TFLOP/s/chip)=?[\d.]*", "", notes).strip("; ")


def _run(row: Mapping[str, str], measured: Mapping[str, float]) -> Run:
    seq = int(row["seq"]) if row["seq"] else None
    task = next((task for task in ("SFT", "LoRA") if f"{task} Performance" in row["notes"]), "pretraining")
    layout = ((name, int(re.match(r"\d+", row[name]).group())) for name in PARALLEL if re.match(r"\d", row[name]))
    return Run(
        source=row["source"],
        family=NAMES.get(row["model"], row["model"]),
        task=task,
        hardware=row["hardware"],
        chip=CHIPS.get(row["hardware"], ""),
        devices=int(row["devices"]) if row["devices"] else None,
        layout=tuple(layout),
        seq=seq,
        sequences=_sequences(row["global_batch_tokens_or_seqs"], seq),
        precision=row["precision"],
        notes=row["notes"],
        measured=tuple(measured.items()),
    )


def _sequences(text: str, seq: int | None) -> int | None:
    number = re.match(r"(\d+) (seqs|tokens)", text)
    if not number:
        return None
    count = int(number[1])
    return count if number[2] == "seqs" else count // seq if seq else None
