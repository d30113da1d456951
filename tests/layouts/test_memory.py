"""layouts.memory: the published closed forms, what divides what, and the schedules' own tables."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from layouts.activations import Cut, kept_bytes, tensors
from layouts.errors import InputError
from layouts.hardware import chips
from layouts.layout import REMATS, SCHEDULES, Layout
from layouts.live import live, placement, waiting
from layouts.memory import memory
from layouts.model import Attention, FeedForward, Layer, Model, MoE
from layouts.presets import load_model
from layouts.schedules import make_schedule
from layouts.tables import Shape
from layouts.workload import MEGATRON, MOEJAX, Batch, Recipe

GIB = 2**30
# Korthikanti et al. (arXiv 2205.05198): dropout, attention scores kept (softmax, its mask, what the mask leaves).
KORTHIKANTI = dataclasses.replace(MEGATRON, score_bytes=5, dropout=True)
STATES = ("parameters", "master", "moments", "gradients")


def gpt(num_layers: int, d: int, heads: int) -> Model:
    """GPT-3's shape; only its layers' matrices are counted in the paper's figures."""
    layer = Layer(Attention(heads, heads, d // heads, d // heads), FeedForward(4 * d, gated=False))
    return Model("gpt", d, 51200, (layer,) * num_layers, norm="layer")


GPT = {"22B": gpt(48, 6144, 64), "175B": gpt(96, 12288, 96), "530B": gpt(105, 20480, 128), "1T": gpt(128, 25600, 160)}
TENSOR = Layout(tensor=8)
PIPES = {
    "22B": (TENSOR, Batch(2048, 4)),
    "175B": (
        dataclasses.replace(TENSOR, stage=8, stage_chunks=3, schedule="interleaved", num_microbatches=64),
        Batch(2048, 64),
    ),
    "530B": (
        dataclasses.replace(TENSOR, stage=35, stage_chunks=3, schedule="interleaved", num_microbatches=280),
        Batch(2048, 280),
    ),
    "1T": (dataclasses.replace(TENSOR, stage=64, schedule="1f1b", num_microbatches=512), Batch(2048, 512)),
}
SHARED = {"sequence": True, "remat": "selective"}


@pytest.mark.parametrize(
    ("name", "changes", "gib"),
    [
        ("22B", {}, 59.25),
        ("22B", SHARED, 9.5625),
        ("175B", {}, 66.84375),
        ("530B", {}, 114.0234375),
        ("530B", SHARED, 23.076171875),
        ("1T", {}, 131.25),
        ("1T", SHARED, 26.5625),
    ],
)
def test_activations_of_the_first_stage(name, changes, gib):
    layout, batch = PIPES[name]
    first = memory(GPT[name], dataclasses.replace(layout, **changes), batch, KORTHIKANTI).stages[0]
    assert first.term("activations") / GIB == pytest.approx(gib, rel=1e-6)


@pytest.mark.parametrize(("name", "gib"), [("22B", 45.5625), ("530B", 31.640625), ("1T", 32.958984375)])
def test_parameters_and_optimizer(name, gib):
    """18 bytes a parameter of the layers' matrices."""
    layout, batch = PIPES[name]
    first = memory(GPT[name], layout, batch, KORTHIKANTI).stages[-2 if layout.stage > 1 else 0]
    found = sum(first.terms[term][group] for term in STATES for group in ("attention", "dense"))
    assert found / GIB == pytest.approx(gib, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "changes", "percent"),
    [
        ("22B", {"sequence": True}, 66.84),
        ("22B", {"remat": "selective"}, 49.42),
        ("22B", SHARED, 16.18),
        ("22B", {"remat": "full"}, 7.64),
        ("530B", {"sequence": True}, 58.31),
        ("530B", {"remat": "selective"}, 62.04),
        ("530B", SHARED, 20.27),
        ("530B", {"remat": "full"}, 9.42),
    ],
)
def test_shares_of_the_tensor_parallel_baseline(name, changes, percent):
    """Figure 7 of the paper, as read off it: to a fifth of a point."""
    model, batch = GPT[name], Batch(2048, 4)
    base = memory(model, TENSOR, batch, KORTHIKANTI).heaviest.term("activations")
    found = memory(model, dataclasses.replace(TENSOR, **changes), batch, KORTHIKANTI).heaviest.term("activations")
    assert 100 * found / base == pytest.approx(percent, abs=0.2)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_first_stage_factor(chunks):
    """1 + (p - 1) / (p v) of the model's layers for v > 1, and 1 for v = 1."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    layout = Layout(stage=4, stage_chunks=chunks, schedule=schedule, num_microbatches=16)
    model = gpt(32, 64, 4)
    one = memory(model, Layout(num_microbatches=16), Batch(128, 16), KORTHIKANTI).heaviest.term("activations")
    first = memory(model, layout, Batch(128, 16), KORTHIKANTI).stages[0].term("activations")
    assert first / one == pytest.approx(1 + 3 / (4 * chunks) if chunks > 1 else 1)


DEEPSEEK = Layout(
    expert=64, stage=4, stage_chunks=4, schedule="interleaved", num_microbatches=32, moments="over_data", cuts=(4,) * 15 + (1,)
)


def test_the_known_misfit():
    """DeepSeek-V3 on 256 GB200 (arXiv 2603.07685, table 3): 36.4 + 32.1 + 131.0 = 199.5 a device, more than it has.

    The paper's parts are those of a stage of 16 MoE layers with 15 chunks in flight, in GiB; stages before it hold more.
    """
    found = memory(load_model("deepseek-v3"), DEEPSEEK, Batch(4096, 64 * 32), MEGATRON)
    third = found.stages[2]
    assert (third.term("parameters") + third.term("gradients")) / GIB == pytest.approx(36.4, rel=0.01)
    assert (third.term("master") + third.term("moments")) / GIB == pytest.approx(32.1, rel=0.01)
    assert third.term("activations") / GIB == pytest.approx(131.0, rel=0.01)
    published = [sum(map(stage.term, (*STATES, "activations"))) for stage in found.stages]
    assert published[2] / GIB == pytest.approx(199.5, rel=0.01)
    assert max(published) / GIB == pytest.approx(199.5, rel=0.1)
    assert found.heaviest.stage == 0
    assert found.peak_bytes > chips()["gb200"].hbm_bytes


def test_the_usual_cure_fits():
    """Full recompute and two pipelines' worth of stages leave room on the same devices."""
    layout = dataclasses.replace(DEEPSEEK, remat="full", stage=8, stage_chunks=2, expert=32, num_microbatches=64)
    found = memory(load_model("deepseek-v3"), layout, Batch(4096, 32 * 64), MEGATRON)
    assert found.peak_bytes < chips()["gb200"].hbm_bytes


# ------------------------------------------------------------------------------------------------------- what divides what

MIXTRAL, BATCH = load_model("mixtral-8x7b"), Batch(4096, 64)


def mixtral(recipe: Recipe = MEGATRON, **fields) -> dict[str, dict[str, float]]:
    """The terms of one device."""
    return memory(MIXTRAL, Layout(**fields), BATCH, recipe).heaviest.terms


def test_expert_shards_divide_only_experts():
    """The same 8 devices as replicas or as expert shards."""
    whole, parted = mixtral(data=8), mixtral(expert=8)
    for term in STATES:
        for group in whole[term]:
            share = 8 if group == "experts" else 1
            assert parted[term][group] == pytest.approx(whole[term][group] / share, rel=1e-12), (term, group)
    assert parted["activations"] == whole["activations"]


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_fsdp_and_tensor_divide_matrices(axis):
    whole, parted = mixtral(data=8), mixtral(**{axis: 8})
    for group in ("attention", "experts", "embedding", "head"):
        assert parted["moments"][group] == pytest.approx(whole["moments"][group] / 8, rel=1e-12)
    assert parted["moments"]["norms"] == whole["moments"]["norms"]


def test_moments_over_data_use_the_right_groups():
    """Dense ones over data, expert and context; experts' over the devices that hold the same experts."""
    plain = mixtral(data=4, expert=4, context=2)
    over = mixtral(data=4, expert=4, context=2, moments="over_data")
    for term in ("master", "moments"):
        assert over[term]["attention"] == pytest.approx(plain[term]["attention"] / 32)
        assert over[term]["experts"] == pytest.approx(plain[term]["experts"] / 8)
    assert over["parameters"] == plain["parameters"]
    folded = mixtral(data=4, expert=2, tensor=4, expert_axes=("expert", "tensor"), moments="over_data")
    unfolded = mixtral(data=4, expert=2, tensor=4, expert_axes=("expert", "tensor"))
    assert folded["moments"]["experts"] == pytest.approx(unfolded["moments"]["experts"] / 4)


def test_folding_leaves_experts_whole():
    """Over the tensor axis as shards, a device holds as many expert numbers, but works on a part of the rows."""
    split = mixtral(expert=2, tensor=4)
    folded = mixtral(expert=2, tensor=4, expert_axes=("expert", "tensor"))
    assert folded["parameters"]["experts"] == pytest.approx(split["parameters"]["experts"])
    assert folded["activations"]["dispatched rows"] == pytest.approx(split["activations"]["dispatched rows"] / 4)
    assert folded["activations"]["expert hidden"] == pytest.approx(split["activations"]["expert hidden"])


def test_policies():
    gather, keep = mixtral(fsdp=8), mixtral(fsdp=8, policy=(("experts", "keep"),))
    experts = 32 * 3 * 8 * 4096 * 14336 * 2  # bytes of all experts in bf16
    assert keep["gathered"]["kept"] == experts
    assert gather["gathered"]["kept"] == 0
    assert gather["gathered"]["in use"] > keep["gathered"]["in use"]
    stage = memory(MIXTRAL, Layout(fsdp=8, policy=(("experts", "offload"),)), BATCH, MEGATRON).heaviest
    assert stage.terms["parameters"]["experts"] == stage.terms["moments"]["experts"] == 0
    assert stage.host_bytes == pytest.approx(sum(gather[term]["experts"] for term in ("parameters", "master", "moments")))


@pytest.mark.parametrize("remat", [*REMATS, "norm+activation"])
def test_what_is_not_kept_is_recomputed(remat):
    kept = mixtral(remat=remat)
    assert sum(kept["activations"].values()) + 32 * kept["recomputed"]["fullest layer"] == pytest.approx(
        sum(mixtral()["activations"].values())
    )


def test_room_for_experts():
    """Rows of a layer of 8 experts, 2 a token, over 4 devices, for 1,000 tokens a device."""
    moe = MoE(8, 2, 16)
    rows = lambda **fields: dataclasses.replace(MOEJAX, **fields).expert_rows(moe, 1000, 4)
    assert rows(capacity="exact") == 2000
    assert rows(capacity="exact", imbalance=1.5) == 3000
    assert rows(capacity="cell", capacity_factor=1.25) == 8 * 313
    assert rows(capacity="cell", capacity_factor=None) == 8000
    assert rows(capacity="pool", capacity_factor=1.25) == 2500
    assert rows(capacity="pool", capacity_factor=None) == rows(capacity="worst") == 4 * 1000 * 2


def test_codecs_and_chunks_shrink_what_crosses():
    whole = mixtral(expert=8)["exchange"]["rows"]
    assert mixtral(expert=8, codec="fp8")["exchange"]["rows"] == whole / 2
    assert mixtral(expert=8, num_chunks=4)["exchange"]["rows"] == whole / 2
    assert mixtral(data=8)["exchange"]["rows"] == 0


# -------------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "none"])
def test_what_is_in_flight_is_what_the_table_says(schedule):
    """Equal chunks: the most of each stage, in micro-batches of a full stage."""
    chunks = {"interleaved": 3, "zb_v": 2, "dualpipe_v": 2, "bitpipe": 2, "hanayo": 2, "zeropp": 2}.get(schedule, 1)
    for stages, count in ((2, 8), (4, 8), (4, 14), (4, 40)):
        table = make_schedule(schedule, Shape(stages, count, chunks))
        layout = Layout(stage=stages, schedule=schedule, stage_chunks=chunks, num_microbatches=count)
        assert placement(layout) == table.placement
        held = [max(map(sum, moments)) * table.placement.chunk_share for moments in live(layout)]
        assert held == list(table.peak_activations()), (stages, count)
        for by_chunk in (False, True):
            counts = [max(map(sum, _waits(row, table.placement.num_chunks, by_chunk))) for row in table.rows]
            assert [max(map(sum, moments)) for moments in waiting(layout, by_chunk)] == counts, (stages, count, by_chunk)


def _waits(row, num_chunks, by_chunk):
    """Chunk by chunk, at each op, how many are between B and W: before the op's W, or after it."""
    counts = [0] * num_chunks
    yield tuple(counts)
    for cell in row:
        ends = [op.chunk for op in cell if op.kind == "W"]
        for op in cell:
            counts[op.chunk] += op.kind == "B"
        after = [count - ends.count(chunk) for chunk, count in enumerate(counts)]
        yield tuple(counts if by_chunk else after)
        counts = after


@hypothesis.given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 24))
def test_interleaved_chunks_in_flight(stages, chunks, count):
    """Chunk by chunk, not only in sum: unlike chunks weigh unlike."""
    table = make_schedule("interleaved", Shape(stages, count, chunks))
    layout = Layout(stage=stages, schedule="interleaved", stage_chunks=chunks, num_microbatches=count)
    for row, moments in zip(table.rows, live(layout), strict=True):
        counts, seen = [0] * chunks, set()
        for cell in row:
            for op in cell:
                counts[op.chunk] += op.kind == "F"
            seen.add(tuple(counts))
            for op in cell:
                counts[op.chunk] -= op.kind == "W"
        assert set(moments) <= seen
        assert all(any(all(a >= b for a, b in zip(m, s, strict=True)) for m in moments) for s in seen)


@pytest.mark.parametrize(("cuts", "heaviest"), [((5, 1, 1, 1), 0), ((1, 1, 1, 5), 3), ((1, 5, 1, 1), 1)])
def test_the_heaviest_stage_of_uneven_pipelines(cuts, heaviest):
    model = dataclasses.replace(gpt(8, 256, 4), vocab_size=64)
    layout = Layout(stage=4, schedule="1f1b", cuts=cuts, num_microbatches=8)
    found = memory(model, layout, Batch(64, 8), KORTHIKANTI)
    assert found.heaviest.stage == heaviest
    assert found.peak_bytes == max(stage.total_bytes for stage in found.stages)


def test_tables_lie_where_they_are_used():
    found = memory(gpt(8, 256, 4), Layout(stage=4, schedule="1f1b", num_microbatches=8), Batch(64, 8), KORTHIKANTI)
    have = [{group for group in ("embedding", "head") if stage.terms["parameters"].get(group)} for stage in found.stages]
    assert have == [{"embedding"}, set(), set(), {"head"}]
    assert [bool(stage.terms["logits"]) for stage in found.stages] == [False, False, False, True]
    tied = dataclasses.replace(gpt(8, 256, 4), tied=True)
    assert memory(tied, Layout(), Batch(64, 8), KORTHIKANTI).heaviest.terms["parameters"]["head"] == 0
    ends = memory(tied, Layout(stage=4, schedule="1f1b", num_microbatches=8), Batch(64, 8), KORTHIKANTI).stages
    assert ends[0].terms["parameters"]["embedding"] == ends[3].terms["parameters"]["head"] == 51200 * 256 * 2


def test_both_ways_hold_two_copies():
    one = memory(gpt(8, 256, 4), Layout(stage=4, schedule="1f1b", num_microbatches=8), Batch(64, 8), KORTHIKANTI)
    two = memory(gpt(8, 256, 4), Layout(stage=4, schedule="dualpipe", num_microbatches=8), Batch(64, 8), KORTHIKANTI)
    for a, b in zip(one.stages, two.stages, strict=True):
        assert b.terms["parameters"]["dense"] == 2 * a.terms["parameters"]["dense"]


@hypothesis.given(
    st.sampled_from(["1f1b", "gpipe", "zeropp", "interleaved"]),
    st.sampled_from(["none", "full", "dots"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([MEGATRON, MOEJAX]),
)
def test_stages_hold_all_parameters(schedule, remat, fsdp, recipe):
    """Over stages, fsdp and experts each number is stored once, but norms and routers on every device of its stage, and where
    stages work by chunks embedding and head on every stage."""
    model = load_model("qwen3-30b-a3b")
    chunks = 2 if schedule in ("zeropp", "interleaved") else 1
    layout = Layout(stage=4, schedule=schedule, stage_chunks=chunks, expert=2, fsdp=fsdp, remat=remat, num_microbatches=8)
    stages = memory(model, layout, Batch(512, 16 * fsdp), recipe).stages
    stored = 0.0
    for stage in stages:
        for group, size in stage.terms["parameters"].items():
            shards = {"experts": 2 * fsdp, "norms": 1, "router": 1}.get(group, fsdp)
            copies = 4 if recipe.by_chunk and group in ("embedding", "head") else 1
            stored += size * shards / copies / recipe.param_bytes
        assert stage.total_bytes == pytest.approx(sum(sum(parts.values()) for parts in stage.terms.values()))
        assert all(size >= 0 for parts in stage.terms.values() for size in parts.values())
    assert stored == pytest.approx(model.params_total, rel=1e-12)


def test_latent_attention_can_be_recomputed():
    layer = load_model("deepseek-v3").layers[-1]
    found = tensors(layer, 7168, MEGATRON, Cut(rows=8.0))
    assert kept_bytes(found, "none") - kept_bytes(found, "latent") == 128 * (192 + 192 + 128) * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": 3}, "64 sequences over 3 batch shards x 1 micro-batches: needs a multiple of 3, nearest 63 or 66"),
        ({"data": 64, "num_microbatches": 2}, "needs a multiple of 128, nearest 128 or 256"),
        ({"expert": 16}, "num_experts=8 over expert=16 parts: does not divide; nearest parts 2, 4, 8"),
        ({"tensor": 64}, "num_heads=32 over tensor=64"),
        ({"context": 3}, "seq=4096 over context=3"),
        ({"stage": 64, "schedule": "1f1b"}, "the model has 32 layers"),
    ],
)
def test_what_does_not_divide(fields, message):
    with pytest.raises(InputError) as error:
        memory(MIXTRAL, Layout(**fields), BATCH, MEGATRON)
    assert message in str(error.value)


def test_a_batch_needs_whole_numbers():
    with pytest.raises(InputError, match="batch sequences=0"):
        Batch(8, 0)
