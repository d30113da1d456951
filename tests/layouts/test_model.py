"""layouts.model and layouts.presets: parameters as checkpoints count them, FLOPs a token, files."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from layouts import __main__ as command_line
from layouts.errors import InputError
from layouts.model import Attention
from layouts.presets import load_model, model_of, preset_entry, preset_names
from moejax import MoEConfig, Transformer, TransformerConfig
from train.configs import CONFIGS

PRESETS = [name for name in preset_names() if name != "demo"]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_checkpoints(name):
    assert load_model(name).params_total == preset_entry(name)["checkpoint_params"]
    assert "http" in preset_entry(name)["source"]


@pytest.mark.parametrize(
    ("name", "billions"), [("mixtral-8x7b", 12.88), ("qwen3-235b-a22b", 22.19), ("llama-3.1-405b", 405.853)]
)
def test_active_parameters(name, billions):
    assert load_model(name).params_active == pytest.approx(billions * 1e9, rel=5e-4)


@pytest.mark.parametrize(
    ("name", "seq", "gflops"),
    [
        ("llama-3.1-405b", 8192, 2524.0),
        ("qwen3-235b-a22b", 4096, 148.3),
        ("qwen3-30b-a3b", 4096, 23.1),
        ("mixtral-8x7b", 4096, 79.7),
    ],
)
def test_flops_per_token(name, seq, gflops):
    assert load_model(name).flops_per_token(seq) == pytest.approx(gflops * 1e9, rel=5e-3)


def test_flops_without_attention():
    assert load_model("mixtral-8x7b").flops_per_token(1) == pytest.approx(76.5e9, rel=1e-3)


@pytest.mark.parametrize("seq", [1, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 5, 200])
def test_context_is_the_mean_of_what_tokens_see(seq, window):
    """Half a token less than the true mean: the usual convention counts seq / 2 where (seq + 1) / 2 are seen."""
    seen = np.mean([min(i + 1, window or seq) for i in range(seq)])
    assert Attention(1, 1, 1, 1, window=window).context(seq) == pytest.approx(seen, abs=0.5)
    assert Attention(1, 1, 1, 1, window=window).context(seq) <= seen


@pytest.mark.parametrize("cfg", [CONFIGS["demo"]().model, CONFIGS["tiny"]().model, CONFIGS["olmoe_1b_7b"]().model])
def test_parameters_are_the_transformers(cfg):
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert model_of(cfg).params_total == sum(leaf.size for leaf in leaves)
    assert model_of(cfg).not_runnable() == ()


def test_the_demo_preset_is_the_demos_config():
    cfg = CONFIGS["demo"]().model
    demo = load_model("demo")
    assert demo.layers == model_of(cfg).layers
    assert (demo.params_total, demo.params_active) == (model_of(cfg).params_total, model_of(cfg).params_active)


def test_dense_layers_between():
    moe = MoEConfig(d_model=8, d_ff=16, num_experts=4, top_k=2, num_shared_experts=2)
    cfg = TransformerConfig(16, 5, 8, 2, 1, 32, moe=moe, num_dense_layers=1, moe_every=2, tie_embeddings=False)
    kinds = [type(layer.feed_forward).__name__ for layer in model_of(cfg).layers]
    assert kinds == ["FeedForward", "FeedForward", "MoE", "FeedForward", "MoE"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek-v3", "multi-head latent attention"),
        ("deepseek-v3", "multi-token prediction"),
        ("gpt-oss-20b", "sliding windows"),
        ("olmoe-1b-7b", "QK norm over all heads"),
    ],
)
def test_what_moejax_cannot_run_says_why(name, reason):
    assert reason in load_model(name).not_runnable()


HF = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_method": "noaux_tc",
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "num_nextn_predict_layers": 1,
        "vocab_size": 129280,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", HF)
def test_hugging_face_files(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(HF[name]))
    found, preset = load_model(str(path)), load_model(name)
    assert found.layers == preset.layers
    assert found.params_total == preset.params_total
    assert found.not_runnable() == preset.not_runnable()


def test_own_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "schema = 1\nnum_layers = 2\nd_model = 8\nvocab_size = 16\nd_ff = 32\n"
        "[attention]\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 4\n"
    )
    # Two tables of 128; a layer: 2 x 64 (queries, output), 2 x 32 (keys, values), 3 x 256, two norms of 8; the last norm.
    assert load_model(str(path)).params_total == 2 * 128 + 2 * (128 + 64 + 768 + 16) + 8


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"d_model": 8}, "needs schema 1, or model_type"),
        ({"schema": 1, "d_model": 8}, "lacks ['num_layers', 'vocab_size', 'attention']"),
        ({"schema": 1, "num_layers": 1, "d_model": 8, "vocab_size": 8, "attention": {}, "dff": 1}, "unknown keys ['dff']"),
        ({"schema": 1, "num_layers": 1, "d_model": 8, "vocab_size": 8, "attention": {}}, "KeyError: 'head_dim'"),
        ({"model_type": "qwen3_mo"}, "model_type 'qwen3_mo' is not known; did you mean qwen3_moe"),
        ({"model_type": "llama"}, "'num_attention_heads'"),
        ([1], "holds a list"),
    ],
)
def test_bad_files(tmp_path, entry, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(entry))
    with pytest.raises(InputError) as error:
        load_model(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_get_the_nearest():
    with pytest.raises(InputError, match="model 'mixtral-8x7' is not known; did you mean mixtral-8x7b"):
        load_model("mixtral-8x7")
    with pytest.raises(InputError, match="No such file"):
        load_model("nothing.json")


def test_impossible_sizes(tmp_path):
    path = tmp_path / "bad.json"
    base = {"schema": 1, "num_layers": 1, "d_model": 8, "vocab_size": 8}
    path.write_text(json.dumps(base | {"attention": {"num_heads": 4, "num_kv_heads": 3, "head_dim": 2}}))
    with pytest.raises(InputError, match="num_kv_heads=3 does not divide num_heads=4"):
        load_model(str(path))
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
    path.write_text(json.dumps(base | {"attention": attention, "num_layers": 0}))
    with pytest.raises(InputError, match="num_layers=0: needs at least one"):
        load_model(str(path))
    path.write_text(json.dumps(base | {"attention": attention, "moe": {"num_experts": 2, "top_k": 3, "d_ff": 4}}))
    with pytest.raises(InputError, match="top_k=3 exceeds num_experts=2"):
        load_model(str(path))


def test_the_command(tmp_path, capsys):
    out = tmp_path / "models.json"
    assert command_line.main(["models", "--sources", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in preset_names())
    found = json.loads(out.read_text())["models"]
    assert found["deepseek-v3"]["runnable"] is False
    assert found["qwen3-30b-a3b"]["params_total"] == 30_532_122_624
    assert command_line.main(["models", "kimi-k3"]) == 2
    assert "kimi-k2" in capsys.readouterr().err
