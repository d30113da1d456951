"""`python -m train`: overrides, every bad input in one line with exit code 2, --list, --keys, --dry-run."""

import dataclasses
import subprocess
import sys

import pytest

import train.__main__ as command
import train.loop
from tests.conftest import ROOT
from train.config import check_config
from train.configs import CONFIGS, get_config
from train.errors import InputError
from train.overrides import all_keys, apply_overrides


def changed(*overrides, name="tiny"):
    return apply_overrides(get_config(name), overrides)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_possible_and_says_what_it_is(name):
    check_config(get_config(name))
    first = CONFIGS[name].__doc__.splitlines()[0]
    assert 30 < len(first) <= 110


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("steps=7", "steps", 7),
        ("steps=1_000", "steps", 1000),
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate", 1e-3),
        ("optimizer.clip_norm=2", "optimizer.clip_norm", 2.0),
        ("model.qk_norm=true", "model.qk_norm", True),
        ("model.qk_norm=False", "model.qk_norm", False),
        ("model.moe.capacity_factor=none", "model.moe.capacity_factor", None),
        ("model.moe.capacity_factor=1.5", "model.moe.capacity_factor", 1.5),
        ("model.moe.codec=bf16", "model.moe.codec", "bf16"),
        ("model.moe.codec=('bf16', 'plain')", "model.moe.codec", ("bf16", "plain")),
        ("model.moe.router=sigmoid_bias", "model.moe.router", "sigmoid_bias"),
        ("model.head_dim=none", "model.head_dim", None),
        ("data.corpus=123", "data.corpus", "123"),
        ("run_dir=a=b", "run_dir", "a=b"),
    ],
)
def test_values_take_the_type_of_their_key(text, key, value):
    found = all_keys(changed(text))[key]
    assert (found, type(found)) == (value, type(value))
    assert {name for name, old in all_keys(get_config("tiny")).items() if all_keys(changed(text))[name] != old} <= {key}


def test_overrides_are_applied_together():
    cfg = changed("model.moe.top_k=12", "model.moe.num_experts=16")
    assert (cfg.model.moe.top_k, cfg.model.moe.num_experts) == (12, 16)


def test_the_models_width_and_dtypes_reach_its_moe_layers_unless_they_have_their_own():
    cfg = changed("model.d_model=32", "model.dtype=bfloat16")
    assert (cfg.model.moe.d_model, cfg.model.moe.dtype) == (32, "bfloat16")
    assert changed("model.dtype=bfloat16", "model.moe.dtype=float32").model.moe.dtype == "float32"
    with pytest.raises(InputError, match=r"model\.moe\.d_model=48: must be the model's d_model=32"):
        changed("model.d_model=32", "model.moe.d_model=48")
    assert changed("model.moe=none", "model.d_model=32").model.moe is None


BAD = [
    (["tyni"], "unknown config 'tyni'; did you mean 'tiny'? legal are demo, "),
    ([], "no config named; legal are"),
    (["tiny", "model.moe.topk=2"], "unknown key 'model.moe.topk'; nearest keys: model.moe.top_k"),
    (["tiny", "num_experts=4"], "unknown key 'num_experts'; nearest keys: model.moe.num_experts"),
    (["tiny", "model.moe.zzz.top_k=2"], "nearest keys: model.moe.top_k"),
    (["tiny", "steps"], "'steps': overrides are key=value"),
    (["tiny", "--resum", "x=1", "--unknown"], "unrecognized arguments: --unknown"),
    (["tiny", "steps=many"], "steps='many': needs a whole number"),
    (["tiny", "steps=1.5"], "steps='1.5': needs a whole number"),
    (["tiny", "steps=true"], "steps='true': needs a whole number"),
    (["tiny", "model.moe.capacity_factor=big"], "model.moe.capacity_factor='big': needs a number or none"),
    (["tiny", "model.moe.codec=3"], "codec='3': legal values are 'plain', 'bf16'"),
    (["tiny", "steps=0"], "steps=0: needs a whole number of at least 1"),
    (["tiny", "optimizer.learning_rate=-1"], "optimizer.learning_rate=-1.0: needs a finite number above 0"),
    (["tiny", "data.held_out=1.5"], "data.held_out=1.5: needs a fraction"),
    (["tiny", "model.moe.top_k=9"], "model.moe.top_k=9 exceeds num_experts=8: needs 1 to 8"),
    (["tiny", "model.moe.capacity_factor=0"], "model.moe.capacity_factor=0.0: needs a finite number above 0"),
    (["tiny", "model.moe.capacity_factor=-1.5"], "model.moe.capacity_factor=-1.5: needs"),
    (
        ["tiny", "model.num_heads=3", "model.num_kv_heads=3"],
        "model.d_model=16 is not divisible by num_heads=3: nearest",
    ),
    (
        ["tiny", "mesh.expert=3"],
        "num_experts=8 is not divisible by mesh axis expert of 3 devices: nearest num_experts 6 or 9",
    ),
    (["tiny", "mesh.tensor=4"], "is not divisible by mesh axis tensor of 4 devices"),
    (
        ["tiny", "mesh.data=8", "global_batch=12"],
        "global_batch / num_microbatches=12 is not divisible by mesh axis data",
    ),
    (["tiny", "microbatch_overlap=2"], "microbatch_overlap=2 does not divide num_microbatches=1: legal are 1"),
    (["tiny", "num_microbatches=3"], "num_microbatches=3 does not divide global_batch=8: legal are 1, 2, 4, 8"),
    (["tiny", "model.moe.num_senders=24", "mesh.expert=8"], "num_senders=24 does not divide a micro-batch of 8 x 32"),
    (["tiny", "mesh.stage=2"], "pipeline.schedule='none' with mesh.stage=2: legal are gpipe"),
    (["tiny", "mesh.stages=2"], "unknown key 'mesh.stages'; nearest keys: mesh.stage"),
    (["tiny", "--resume", "perhaps"], "--resume='perhaps': legal are auto, never, must"),
    (["tiny", "data.corpus=no/such/folder"], "data.corpus='no/such/folder': no file or folder 'no/such/folder'"),
    (["tiny", "data.corpus=EMPTY"], "is empty: needs at least one file with text"),
    (["tiny", "data.tokenizer=no.json"], "data.tokenizer='no.json': no such file"),
    (
        ["tiny", "model.vocab_size=200"],
        "model.vocab_size=200 is too small for data.tokenizer='bytes': needs at least 258",
    ),
    (["tiny", "sample.num_tokens=99"], "sample.num_tokens=99: with a prompt of 4 tokens and seq=32, legal are 0 to 27"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(case[0]) or "nothing" for case in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_any_device(arguments, said, capsys, monkeypatch, tmp_path):
    def no_devices(*_):
        raise AssertionError("devices were asked for")

    monkeypatch.setattr(train.loop, "start_mesh", no_devices)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    code = command.main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", [[], ["--dry-run"]])
def test_more_devices_than_there_are_is_bad_input(flag, capsys, tmp_path):
    arguments = ["tiny", "mesh.expert=8", "mesh.data=4", "global_batch=32", "model.moe.num_senders=32", *flag]
    code = command.main([*arguments, f"run_dir={tmp_path / 'run'}"])
    err = capsys.readouterr().err
    assert code == 2
    assert "= 32 devices: there are 8" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_resume_must_needs_a_checkpoint(capsys, tmp_path):
    code = command.main(["tiny", "--resume", "must", f"run_dir={tmp_path / 'run'}"])
    err = capsys.readouterr().err
    assert code == 2
    assert "--resume must: no checkpoint in" in err
    assert err.count("\n") == 1


def test_a_process_of_its_own_says_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "train", "tiny", "model.moe.top_k=99"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: model.moe.top_k=99 exceeds num_experts=8: needs 1 to 8\n"


def test_list_names_every_config_on_a_line(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CONFIGS)


def test_keys_lists_what_may_be_changed(capsys):
    assert command.main(["tiny", "--keys", "steps=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "steps=3" in lines
    assert "model.moe.top_k=2" in lines


def test_help_states_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    assert stopped.value.code == 0
    assert "exit codes: 0 done" in capsys.readouterr().out


def test_a_dry_run_shows_shapes_shardings_and_memory_and_runs_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert command.main(["tiny", "--dry-run", "mesh.expert=4", "mesh.data=2"]) == 0
    out = capsys.readouterr().out
    assert "data 2 x fsdp 1 x stage 1 x expert 4 x tensor 1 = 8 cpu devices" in out
    expert = next(line for line in out.splitlines() if "expert_up" in line)
    assert "(2, 8, 16, 32)" in expert
    assert "(2, 2, 16, 32)" in expert
    assert "'expert'" in expert
    total, active = counted(out)
    per_expert = 3 * 16 * 32
    assert total - active == 2 * per_expert * (8 - 2)
    memory = next(line for line in out.splitlines() if line.startswith("memory"))
    assert int(memory.split()[1].replace(",", "")) > 100_000
    assert not (tmp_path / "runs").exists()


def counted(out):
    line = next(line for line in out.splitlines() if line.startswith("parameters")).replace(",", "")
    return [int(word) for word in line.split() if word.isdigit()]


def test_configs_are_plain_values():
    cfg = get_config("demo")
    assert dataclasses.replace(cfg) == get_config("demo")
