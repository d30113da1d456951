"""Compiles in child processes: on the CPU everywhere, for TPU and GPU where `.venv-aot` is installed."""

import subprocess
import sys
import tempfile

import pytest

from layouts import aot, hlo

LAYER = "tests.layouts.programs:layer"
GATHERS_ALL = "tests.layouts.programs:gathers_all"


@pytest.fixture(autouse=True)
def texts_go_away(monkeypatch, tmp_path):
    """Texts that no test gives a folder go with the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def needs_compilers(target: str) -> None:
    """Skips the test where there are none for the target."""
    try:
        aot.interpreter(aot.Target.parse(target))
    except aot.CompilersMissingError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("v5p:2x2x2", aot.Target("tpu", "v5p", (2, 2, 2))),
        ("v5e:4x4", aot.Target("tpu", "v5e", (4, 4))),
        ("h100:32x8", aot.Target("gpu", "h100", (32, 8))),
        ("cpu:8", aot.Target("cpu", "cpu", (8,))),
    ],
)
def test_targets(text, target):
    assert aot.Target.parse(text) == target
    assert str(target) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", r"target 'v9:2x2': legal families are v4, v5e, v5p, v6e, tpu7x, a100, b200, h100, cpu"),
        ("v5p", r"target 'v5p': after 'v5p' needs chips along 2 or 3 axes"),
        ("v5p:8", r"target 'v5p:8': after 'v5p' needs chips along 2 or 3 axes"),
        ("h100:8", r"target 'h100:8': after 'h100' needs HOSTSxGPUS"),
        ("h100:0x8", r"target 'h100:0x8': after 'h100' needs HOSTSxGPUS"),
        ("cpu:2x2", r"target 'cpu:2x2': after 'cpu' needs a number of devices"),
        ("cpu:", r"target 'cpu:': after 'cpu' needs a number of devices"),
    ],
)
def test_targets_that_are_none(text, message):
    with pytest.raises(ValueError, match=message):
        aot.compile_for(text, LAYER)


def test_build_must_name_a_function():
    with pytest.raises(ValueError, match=r"build 'tests.layouts.programs': needs 'module:function'"):
        aot.compile_for("cpu:2", "tests.layouts.programs")


def test_compilers_that_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setenv(aot.INTERPRETER_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(aot.CompilersMissingError, match=r"no compilers for h100:1x8 at .*python: run `make .venv-aot/.aot`"):
        aot.compile_for("h100:1x8", LAYER)


def test_the_parent_needs_no_jax():
    code = "import sys, layouts.aot, layouts.hlo; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=aot.ROOT, check=False).returncode == 0


def test_every_gpu_states_its_sources():
    for name in aot.GPUS:
        numbers = (aot.DATA / f"{name}.txtpb").read_text().partition("gpu_device_info {")[2].partition("\n}")[0]
        assert all("[" in line.partition("#")[2] for line in numbers.strip().splitlines()), name


def check_layer(compiled: aot.Compiled) -> hlo.Program:
    """What holds of the small layer on every target: its collectives, their bytes, its products, no fallback."""
    program = hlo.read(compiled.text)
    experts, cells, d_model, d_ff = 16, 16 * 20, 128, 256  # cells: 1.25 * 128 tokens * 2 / 16 experts = 20 rows
    found = program.of_kind("all-to-all")
    itemsize = 4 if compiled.target.kind == "cpu" else 2  # XLA:CPU carries bfloat16 rows as float32
    # Each way, forward and backward: the rows of both local experts, on TPU apart; except on CPU their weights, float32.
    count, weights = {"cpu": (4, 0), "gpu": (4, 2), "tpu": (8, 2)}[compiled.target.kind]
    assert (found.count, found.group_size) == (count + weights, 8)
    assert found.payload_bytes == 4 * cells * d_model * itemsize + weights * cells * 4
    router = 2 * 128 * d_model * experts
    assert program.dot_flops == 3 * 3 * 2 * cells * d_model * d_ff + 3 * router
    assert compiled.alarms == ()
    assert compiled.memory is not None
    parameters = 3 * 2 * d_model * d_ff * 4 + d_model * experts * 4
    assert compiled.memory.argument_bytes >= parameters + 128 * d_model * 2
    assert compiled.memory.peak_bytes > compiled.memory.argument_bytes
    assert compiled.compile_seconds > 0
    return program


def test_cpu(tmp_path):
    compiled = aot.compile_for("cpu:8", LAYER, out=tmp_path)
    assert compiled.text_path == tmp_path / "program.hlo"
    assert check_layer(compiled).cycles == 0


def test_gpu():
    needs_compilers("h100:1x8")
    compiled = aot.compile_for("h100:1x8", LAYER)
    program = check_layer(compiled)
    parsed = hlo.parse(compiled.text)
    assert len(hlo.windows(parsed.computations[parsed.entry], "all-to-all")) == 6  # asynchronous there
    assert program.cycles == 0


def test_tpu():
    needs_compilers("v5p:2x2x2")
    options = {"xla_tpu_enable_async_all_to_all": "true"}  # synchronous there unless asked
    compiled = aot.compile_for("v5p:2x2x2", LAYER, compiler_options=options)
    program = check_layer(compiled)
    parsed = hlo.parse(compiled.text)
    assert len(hlo.windows(parsed.computations[parsed.entry], "all-to-all")) == 8  # all but the weights
    assert program.cycles > 10_000
    assert {"moe/experts", "~moe/experts", "moe/dispatch"} <= set(program.cycles_by_scope)


def check_ragged(compiled: aot.Compiled) -> hlo.Program:
    """Three crossings forward, three backward: rows there, their weights, rows back; of the true rows and nothing else."""
    program = hlo.read(compiled.text)
    assert compiled.alarms == ()
    assert program.of_kind("all-to-all").count == 0
    assert program.of_kind("ragged-all-to-all").count == 6
    return program


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "v5p:2x2x2"])
def test_what_does_not_fit_can_stay_there_too(target):
    """The other branch has the ring, forward and backward."""
    needs_compilers(target)
    arguments = {"exchange": "ragged", "receive_factor": 1.25, "overflow": "fallback", "capacity_factor": None}
    assert check_ragged(aot.compile_for(target, LAYER, arguments)).of_kind("collective-permute").count > 0


def test_several_programs_in_one_child(tmp_path):
    """Each has its own arguments, text and alarms."""
    jobs = {
        "few": aot.Job(LAYER, {"top_k": 1, "exchange": "all_gather"}),
        "gathers": aot.Job(GATHERS_ALL),
    }
    compiled = aot.compile_all("cpu:8", jobs, out=tmp_path)
    assert [found.text_path for found in compiled.values()] == [tmp_path / name / "program.hlo" for name in jobs]
    plain = hlo.read(compiled["few"].text)
    assert plain.of_kind("all-to-all").count == 0
    assert plain.of_kind("all-gather").count > 0
    assert compiled["few"].alarms == ()
    (alarm,) = compiled["gathers"].alarms
    assert "full rematerialization" in alarm


def test_options_reach_the_child():
    says = "^compiling for cpu:2 failed .*No such compile option: 'xla_no_such_option'"
    with pytest.raises(aot.CompileError, match=says):
        aot.compile_for("cpu:2", LAYER, compiler_options={"xla_no_such_option": True})


def test_failures_and_limits(tmp_path):
    """The program that fails is named, and those before it have been written."""
    jobs = {"fine": aot.Job(LAYER, {"exchange": "weight_stream"}), "bad": aot.Job("tests.layouts.programs:fails")}
    says = r"^compiling 'bad' for cpu:2 failed \(exit 1\): RuntimeError: no program for 2 devices"
    with pytest.raises(aot.CompileError, match=says):
        aot.compile_all("cpu:2", jobs, out=tmp_path)
    assert (tmp_path / "fine" / "result.json").exists()
    with pytest.raises(TimeoutError, match=r"compiling for cpu:2 took longer than 0.1 s"):
        aot.compile_for("cpu:2", LAYER, timeout_seconds=0.1)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_programs_are_named_as_folders_are(name):
    with pytest.raises(ValueError, match=rf"^program {name!r}: needs a name of letters, digits"):
        aot.compile_all("cpu:2", {name: aot.Job(LAYER)})
