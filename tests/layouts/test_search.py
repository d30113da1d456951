"""layouts.search: what brute force finds, bounds that are bounds, cuts, objectives, and words where nothing fits."""

import dataclasses
import itertools
import math
import random
import time

import numpy as np
import pytest

from layouts.bounds import Bounds, Choices
from layouts.clusters import parse_cluster
from layouts.cost import bubble, cost
from layouts.cuts import Stages, best_cuts
from layouts.errors import InfeasibleError, InputError
from layouts.hardware import Cluster
from layouts.layout import Layout
from layouts.live import live
from layouts.memory import memory
from layouts.model import Attention, FeedForward, Layer, Model, MoE
from layouts.presets import load_model
from layouts.schedules import make_schedule
from layouts.search import Problem, fits, leanest, search
from layouts.simulate import Costs, simulate
from layouts.space import Mesh, Space, applies, every_layout, layout_of, meshes, options, plan_fits, plans
from layouts.step_bounds import Rows
from layouts.tables import Shape
from layouts.workload import MEGATRON, MOEJAX, Batch, check_fit, divides

AXES = ("data", "fsdp", "stage", "expert", "tensor", "context")
WHOLE = Space()


def some(chance: random.Random, values, count: int) -> tuple:
    """A choice of them, in their order."""
    chosen = chance.sample(range(len(values)), min(count, len(values)))
    return tuple(values[index] for index in sorted(chosen))


def small_problem(seed: int) -> Problem:
    """A random model, cluster and space, small enough for brute force."""
    chance = random.Random(seed)
    attention = Attention(chance.choice([4, 8]), chance.choice([2, 4]), 16, 16)
    moe = Layer(attention, MoE(chance.choice([4, 8]), 2, chance.choice([32, 64]), shared_d_ff=chance.choice([0, 32])))
    dense = Layer(attention, FeedForward(chance.choice([64, 128])))
    first = chance.choice([0, 1])
    layers = tuple(dense if index < first else moe for index in range(chance.choice([2, 3, 4])))
    model = Model("small", chance.choice([32, 64]), 64, layers, tied=chance.random() < 0.5)
    space = Space(
        axes=some(chance, AXES, chance.choice([2, 3])),
        folds=some(chance, WHOLE.folds, 2),
        pipelines=some(chance, WHOLE.pipelines, 2),
        uneven=chance.random() < 0.7,
        exchanges=some(chance, WHOLE.exchanges, chance.choice([1, 2])),
        codecs=chance.choice([("plain",), ("plain", "fp8")]),
        num_chunks=chance.choice([(1,), (1, 2)]),
        remats=some(chance, WHOLE.remats, chance.choice([1, 2])),
        policies=some(chance, WHOLE.policies, chance.choice([1, 2])),
        moments=some(chance, WHOLE.moments, chance.choice([1, 2])),
        sequence=chance.choice([(False,), (False, True)]),
    )
    cluster = parse_cluster(chance.choice(["h100:1x4", "v5p:2x2x1", "a100-80:2x2", "h100:1x8", "v6e:2x4"]))
    recipe = chance.choice([MEGATRON, MOEJAX, dataclasses.replace(MEGATRON, imbalance=1.5)])
    return Problem(model, Batch(chance.choice([64, 128]), chance.choice([4, 8])), cluster, recipe, space=space)


def brute_force(problem: Problem, held: list[tuple[Layout, float, float]]) -> float:
    """The least step time of those layouts (with their seconds and bytes) that fit."""
    return min((seconds for _, seconds, size in held if size <= problem.limit_bytes), default=math.inf)


def priced(problem: Problem, most: int) -> list[tuple[Layout, float, float]]:
    """All layouts of the space with seconds and bytes; [] where there are more than `most`."""
    every = every_layout(problem.space, problem.model, problem.batch, problem.recipe, problem.cluster.num_devices)
    found = list(itertools.islice(every, most + 1))
    if len(found) > most:
        return []
    sizes = (memory(problem.model, layout, problem.batch, problem.recipe).peak_bytes for layout in found)
    return [(layout, cost(problem.job(layout)).step_seconds, size) for layout, size in zip(found, sizes, strict=True)]


def compare(seeds, most: int, enough: float = math.inf) -> str:
    """Asserts that search finds what brute force does, each problem with all the memory there is and with too little for
    its best layout; ends after `enough` problems and says how many there were."""
    problems = layouts = infeasible = 0
    for seed in seeds:
        problem = small_problem(seed)
        held = priced(problem, most)
        best = min(held, key=lambda one: one[1], default=None)
        for limit in () if best is None else (None, 0.99 * best[2], 0.7 * best[2]):
            limited = dataclasses.replace(problem, memory_bytes=limit)
            expected = brute_force(limited, held)
            try:
                (found,) = search(limited, 1).found
                assert found.value == pytest.approx(expected, rel=1e-9), (seed, limit, found.layout)
                assert fits(limited, found.memory)
            except InfeasibleError:
                assert expected == math.inf, (seed, limit)
                infeasible += 1
            problems, layouts = problems + 1, layouts + len(held)
        if problems >= enough:
            break
    assert problems >= 200
    return f" {problems} problems of {layouts:,} layouts in all, {infeasible} of them infeasible"


def test_search_equals_brute_force(capsys):
    said = compare(range(400), most=40, enough=200)
    with capsys.disabled():
        print(said, end="")


@pytest.mark.slow
def test_search_equals_brute_force_on_more(capsys):
    said = compare(range(1000, 1400), most=400)
    with capsys.disabled():
        print(said, end="")


@pytest.mark.parametrize(
    ("name", "cluster", "recipe"), [("deepseek-v3", "h100:8x8", MEGATRON), ("gpt-oss-120b", "v5p:4x4x4", MOEJAX)]
)
def test_bounds_are_bounds(name, cluster, recipe):
    """Of layouts drawn from the whole space: with one stage the exact figures, of pipelines not more."""
    chance, model, batch = random.Random(0), load_model(name), Batch(4096, 64)
    problem = Problem(model, batch, parse_cluster(cluster), recipe)
    found = list(meshes(WHOLE, model, batch, problem.cluster.num_devices))
    every = [plan for stage in range(1, 65) for plan in plans(WHOLE, model, stage, batch.sequences)]
    choices = options(WHOLE, model, recipe)
    bounds = Bounds(problem.job(Layout()), found, every, Choices.of(choices), uneven=True)
    tried = 0
    while tried < 150:
        mesh, plan, option = chance.randrange(len(found)), chance.randrange(len(every)), chance.choice(choices)
        if not (plan_fits(found[mesh], every[plan], batch) and applies(found[mesh], every[plan], option)):
            continue
        tried += 1
        alone = Choices((option.remat,), (option.policy,), ((option.exchange, option.codec, option.num_chunks),))
        rows = Rows(bounds, np.array([mesh]), np.array([plan]), alone)
        layout = layout_of(found[mesh], every[plan], option)
        exact = (cost(problem.job(layout)), memory(model, layout, batch, recipe).peak_bytes)
        for bound, figure in zip((rows.step_seconds(), rows.peak_bytes()), (exact[0].step_seconds, exact[1]), strict=True):
            assert bound.item() <= figure, layout
            assert layout.stage > 1 or bound.item() == pytest.approx(figure, rel=0.03), layout
        assert rows.pass_seconds().item() <= sum(exact[0].stage_seconds)
        on_host = max(stage.host_bytes for stage in memory(model, layout, batch, recipe).stages)
        assert rows.host_bytes().item() <= on_host


@pytest.mark.parametrize("seed", range(20))
def test_cuts_equal_brute_force(seed):
    chance = random.Random(seed)
    layers, stages = chance.choice([4, 6, 7]), chance.choice([2, 3])
    seconds = [chance.choice([1.0, 2.0]) for _ in range(layers)]
    fixed = [chance.choice([0.0, 0.5]) for _ in range(stages)]
    most = [chance.choice([2, 3, 5]) for _ in range(stages)]
    fit = lambda stage, first, end: end - first <= most[stage]

    def longest(cuts):
        ends = [0, *itertools.accumulate(cuts)]
        if not all(fit(stage, ends[stage], ends[stage + 1]) for stage in range(stages)):
            return math.inf
        return max(sum(seconds[ends[stage] : ends[stage + 1]]) + fixed[stage] for stage in range(stages))

    every = [cuts for cuts in itertools.product(range(1, layers), repeat=stages) if sum(cuts) == layers]
    best = min(map(longest, every))
    found = best_cuts(Stages(seconds, fixed, fit))
    assert (longest(found) if found else math.inf) == best


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "interleaved", "zeropp"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_closed_forms_are_the_tables(name, stages):
    """Bubbles and live micro-batches that are not read from a table are the table's."""
    for count, chunks in itertools.product(
        (stages, 2 * stages, 4 * stages, 6 * stages), (1,) if "_" in name or "f" in name else (2, 3)
    ):
        chunks = 1 if name in ("gpipe", "1f1b", "zb_h1") else chunks
        layout = Layout(stage=stages, schedule=name, stage_chunks=chunks, num_microbatches=count)
        table = make_schedule(name, Shape(stages, count, chunks))
        waits = simulate(table, Costs(1 / 3, 1 / 3, 1 / 3)).makespan - count
        assert bubble(layout) == pytest.approx(waits, abs=1e-9), count
        for stage, row in enumerate(table.rows):
            held, most = [0] * chunks, 0
            for cell in row:
                for op in cell:
                    held[op.chunk] += op.kind == "F"
                most = max(most, sum(held))
                for op in cell:
                    held[op.chunk] -= op.kind == "W"
            assert max(map(sum, live(layout)[stage])) >= most, (count, stage)


def test_meshes_are_those_that_fit():
    model, batch = load_model("qwen3-30b-a3b"), Batch(4096, 64)
    found = set(meshes(WHOLE, model, batch, 64))
    sizes = (s for s in itertools.product((1, 2, 4, 8, 16, 32, 64), repeat=6) if math.prod(s) == 64)
    for size, fold in itertools.product(random.Random(0).sample(sorted(sizes), 100), WHOLE.folds):
        named = dict(zip(AXES, size, strict=True))
        if any(named[axis] == 1 for axis in fold[1:]):
            continue
        mesh = Mesh(size, fold)
        try:
            check_fit(model, mesh.layout, batch)
            possible = size[2] <= 48
        except InputError:
            possible = False
        assert (mesh in found) == possible == divides(model, mesh.layout, batch), mesh


def test_runnable_is_what_runs():
    space = WHOLE.runnable()
    problem = Problem(load_model("demo"), Batch(256, 16), parse_cluster("cpu:8"), MOEJAX, "fp32", space=space)
    for layout in every_layout(space, problem.model, problem.batch, problem.recipe, 8):
        assert not layout.not_runnable(), layout
    assert {"data", "fsdp", "expert", "tensor"} <= {*space.axes}


FEW = Space(remats=("none", "full"), policies=((),), exchanges=("all_to_all",))
DEMO = Problem(load_model("olmoe-1b-7b"), Batch(4096, 64), parse_cluster("h100:2x8"), MEGATRON, space=FEW)


def test_the_best_of_each_mesh():
    found = search(DEMO, 5).found
    assert len({(*one.layout.sizes.values(), one.layout.expert_axes) for one in found}) == 5
    assert [one.value for one in found] == sorted(one.value for one in found)


def test_objectives():
    answers = {
        name: search(dataclasses.replace(DEMO, objective=name), 1).found[0] for name in ("latency", "throughput", "cost")
    }
    fastest = search(DEMO, 1).found[0]
    assert sum(answers["latency"].cost.stage_seconds) <= sum(fastest.cost.stage_seconds)
    assert answers["throughput"].tokens_per_second >= fastest.tokens_per_second
    spent = lambda found: found.layout.num_devices * found.cost.step_seconds
    assert spent(answers["cost"]) <= spent(fastest)
    with pytest.raises(InputError, match=r"objective 'speed': legal are step_time, latency, throughput, cost"):
        dataclasses.replace(DEMO, objective="speed")


def test_excluded_and_slow_devices():
    cluster = parse_cluster("h100:2x8")
    fewer = Cluster(cluster.classes, cluster.between, excluded=(3,))
    assert search(dataclasses.replace(DEMO, cluster=fewer), 1).found[0].layout.num_devices < 16
    slow = Cluster(cluster.classes, cluster.between, slow=((3, 0.5),))
    limped = search(dataclasses.replace(DEMO, cluster=slow), 1).found[0]
    assert limped.value > 1.5 * search(DEMO, 1).found[0].value


def test_loads_slow_down():
    even = dataclasses.replace(MEGATRON, loads=(1.0,) * 64)
    zipf = dataclasses.replace(MEGATRON, loads=tuple(1 / (rank + 1) for rank in range(64)))
    seconds = [cost(dataclasses.replace(DEMO, recipe=r).job(Layout(expert=16))).step_seconds for r in (MEGATRON, even, zipf)]
    assert seconds[0] == seconds[1]
    fullest = sum(zipf.loads[:4]) * 16 / sum(zipf.loads)
    as_much = dataclasses.replace(MEGATRON, imbalance=fullest)
    assert seconds[2] == pytest.approx(cost(dataclasses.replace(DEMO, recipe=as_much).job(Layout(expert=16))).step_seconds)
    assert seconds[2] > 2 * seconds[1]
    with pytest.raises(InputError, match=r"loads of 3 experts: the model has 64 in a layer"):
        cost(dataclasses.replace(DEMO, recipe=dataclasses.replace(MEGATRON, loads=(1.0, 1.0, 1.0))).job(Layout(expert=16)))


def test_nothing_fits():
    problem = Problem(load_model("olmoe-1b-7b"), Batch(4096, 16), parse_cluster("a100-40:1x2"), MEGATRON, space=FEW)
    with pytest.raises(InfeasibleError) as raised:
        search(problem)
    needed, layout = leanest(problem)
    held = memory(problem.model, layout, problem.batch, problem.recipe).peak_bytes
    assert held == needed
    message = str(raised.value)
    assert message.startswith("memory binds: none of")
    assert f"the smallest change is {needed / 1e9:.5g} GB a device, or" in message
    # What it asks for is enough, and a little less is not.
    assert search(dataclasses.replace(problem, memory_bytes=needed * 1.0001), 1).found
    with pytest.raises(InfeasibleError):
        search(dataclasses.replace(problem, memory_bytes=needed * 0.999), 1)
    enough = parse_cluster(message.split("devices (")[1].split(")")[0])
    assert search(dataclasses.replace(problem, cluster=enough), 1).found


def test_no_mesh():
    with pytest.raises(InputError, match=r"needs a whole number"):
        Batch(4096, 0)
    (found,) = search(dataclasses.replace(DEMO, batch=Batch(4095, 3), space=Space(axes=("data",))), 1).found
    assert found.layout.num_devices == 3  # 3 sequences: 3 of the 16 devices


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "sequences", "limit"), [("h100:128x8", 1024, 10), ("h100:2048x8", 4096, 60)])
def test_large_clusters(cluster, sequences, limit, capsys):
    """The full space, codecs that round included."""
    space = Space(codecs=("plain", "bf16", ("fp8", "bf16"), "fp8", "int8"))
    problem = Problem(load_model("qwen3-235b-a22b"), Batch(4096, sequences), parse_cluster(cluster), MEGATRON, space=space)
    start = time.process_time()
    answer = search(problem)
    took = time.process_time() - start
    with capsys.disabled():
        print(f" {cluster}: {answer.tally.layouts:,} layouts, {answer.tally.priced} priced, {took:.1f} CPU seconds", end="")
    assert took < limit
