"""Models by name (data/models.toml), from files of that form, from a Hugging Face config.json or a TransformerConfig."""

import dataclasses
import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layouts.errors import InputError
from layouts.hardware import DATA, unknown
from layouts.model import Attention, FeedForward, Layer, Model, MoE, check_model
from layouts.workload import MOEJAX, Recipe

if TYPE_CHECKING:
    from moejax.transformer import TransformerConfig

_KEYS = ("num_layers", "d_model", "vocab_size", "attention")
_OPTIONAL = {
    "title": "",
    "source": "",
    "checkpoint_params": None,
    "num_dense_layers": 0,
    "d_ff": 0,
    "gated": True,
    "bias": False,
    "moe": None,
    "windows": [],
    "tied": False,
    "norm": "rms",
    "positions": 0,
    "num_mtp": 0,
    "lacks": [],
}


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / "models.toml").read_text())


def preset_names() -> list[str]:
    """The models known by name."""
    return list(_tables())


def preset_entry(name: str) -> dict[str, Any]:
    """A preset's table as written, with its title, source and checkpoint's count.

    Raises:
      InputError: for an unknown name, with the nearest.
    """
    if name not in _tables():
        raise InputError(unknown("model", name, _tables()))
    return _OPTIONAL | _tables()[name]


def load_model(text: str) -> Model:
    """A model by name, or from a .toml or .json file: a table like those of data/models.toml with "schema" 1, or a Hugging
    Face config.json.

    Raises:
      InputError: for an unknown name (the nearest named), a file that is none, or sizes that cannot be.
    """
    path = Path(text)
    if path.suffix not in (".toml", ".json"):
        return _model(text, preset_entry(text))
    try:
        entry = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"model file {text!r}: {error}") from error
    if not isinstance(entry, dict):
        raise InputError(f"model file {text!r}: holds a {type(entry).__name__}, needs a table")
    if "model_type" in entry:
        return _model(path.stem, _OPTIONAL | _from_hugging_face(text, entry))
    if entry.pop("schema", None) != 1:
        raise InputError(f"model file {text!r}: needs schema 1, or model_type (a Hugging Face config.json)")
    return _model(path.stem, _OPTIONAL | entry)


def _model(name: str, entry: Mapping[str, Any]) -> Model:
    missing, wrong = [key for key in _KEYS if key not in entry], sorted(set(entry) - set(_KEYS) - set(_OPTIONAL))
    if missing or wrong:
        raise InputError(f"model {name!r}: {f'lacks {missing}' if missing else f'unknown keys {wrong}'}")
    try:
        made = Model(
            name=name,
            d_model=entry["d_model"],
            vocab_size=entry["vocab_size"],
            layers=_layers(entry),
            tied=entry["tied"],
            norm=entry["norm"],
            positions=entry["positions"],
            num_mtp=entry["num_mtp"],
            source=entry["source"],
            lacks=tuple(entry["lacks"]),
        )
        check_model(made)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"model {name!r}: {type(error).__name__}: {error}") from error
    return made


def _layers(entry: Mapping[str, Any]) -> tuple[Layer, ...]:
    attention = dict(entry["attention"])
    width = attention.pop("head_dim")
    base = Attention(**{"qk_dim": width, "v_dim": width, **attention})
    moe = MoE(**entry["moe"]) if entry["moe"] else None
    dense = FeedForward(entry["d_ff"], entry["gated"], entry["bias"])
    windows = entry["windows"] or [0]
    made = []
    for index in range(entry["num_layers"]):
        window = windows[index % len(windows)] or None
        feed_forward = dense if moe is None or index < entry["num_dense_layers"] else moe
        made.append(Layer(dataclasses.replace(base, window=window), feed_forward))
    return tuple(made)


def _from_hugging_face(text: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = entry["model_type"]
    if kind not in HUGGING_FACE:
        raise InputError(unknown(f"model file {text!r}: model_type", kind, HUGGING_FACE))
    try:
        return _hugging_face_sizes(text, entry)
    except KeyError as error:
        raise InputError(f"model file {text!r}: model_type {kind!r} needs the key {error}") from error


def _hugging_face_sizes(text: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    heads = entry["num_attention_heads"]
    attention = {
        "num_heads": heads,
        "num_kv_heads": entry.get("num_key_value_heads") or heads,
        "head_dim": entry.get("head_dim") or entry["hidden_size"] // heads,
    }
    common = {
        "source": text,
        "num_layers": entry["num_hidden_layers"],
        "d_model": entry["hidden_size"],
        "vocab_size": entry["vocab_size"],
        "tied": bool(entry.get("tie_word_embeddings", False)),
        "d_ff": entry.get("intermediate_size") or 0,
        "attention": attention,
    }
    own = HUGGING_FACE[entry["model_type"]](entry)
    return common | own | {"attention": attention | own.get("attention", {})}


def _mixtral(entry: Mapping[str, Any]) -> dict[str, Any]:
    moe = {"num_experts": entry["num_local_experts"], "top_k": entry["num_experts_per_tok"], "d_ff": entry["intermediate_size"]}
    return {"moe": moe}


def _olmoe(entry: Mapping[str, Any]) -> dict[str, Any]:
    moe = {"num_experts": entry["num_experts"], "top_k": entry["num_experts_per_tok"], "d_ff": entry["intermediate_size"]}
    return {"moe": moe, "attention": {"qk_norm": "width"}}


def _qwen3_moe(entry: Mapping[str, Any]) -> dict[str, Any]:
    moe = {"num_experts": entry["num_experts"], "top_k": entry["num_experts_per_tok"], "d_ff": entry["moe_intermediate_size"]}
    return {"moe": moe, "attention": {"qk_norm": "head"}}


def _deepseek(entry: Mapping[str, Any]) -> dict[str, Any]:
    width = entry["moe_intermediate_size"]
    moe = {
        "num_experts": entry["n_routed_experts"],
        "top_k": entry["num_experts_per_tok"],
        "d_ff": width,
        "shared_d_ff": width * (entry.get("n_shared_experts") or 0),
        "selection_bias": entry.get("topk_method") == "noaux_tc",
    }
    attention = {
        "head_dim": entry["qk_nope_head_dim"] + entry["qk_rope_head_dim"],
        "v_dim": entry["v_head_dim"],
        "kv_rank": entry["kv_lora_rank"],
        "q_rank": entry.get("q_lora_rank"),
        "rope_dim": entry["qk_rope_head_dim"],
    }
    return {
        "moe": moe,
        "attention": attention,
        "num_dense_layers": entry["first_k_dense_replace"],
        "num_mtp": entry.get("num_nextn_predict_layers", 0),
        "lacks": ["routing limited to groups"] if (entry.get("n_group") or 1) > 1 else [],
    }


def _gpt_oss(entry: Mapping[str, Any]) -> dict[str, Any]:
    moe = {
        "num_experts": entry["num_local_experts"],
        "top_k": entry["num_experts_per_tok"],
        "d_ff": entry["intermediate_size"],
        "bias": True,
        "router_bias": True,
    }
    kinds = entry.get("layer_types") or ["sliding_attention", "full_attention"]
    windows = [entry["sliding_window"] if kind == "sliding_attention" else 0 for kind in kinds]
    attention = {"qkv_bias": True, "out_bias": True, "sinks": True}
    return {"moe": moe, "attention": attention, "windows": windows, "lacks": ["clamped SwiGLU"]}


HUGGING_FACE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
    "llama": lambda entry: {},
}


def model_from_json(entry: Mapping[str, Any]) -> Model:
    """The model of which `entry` is `dataclasses.asdict`."""
    layers = []
    for layer in entry["layers"]:
        kind = MoE if "num_experts" in layer["feed_forward"] else FeedForward
        layers.append(Layer(Attention(**layer["attention"]), kind(**layer["feed_forward"])))
    return Model(**{**entry, "layers": tuple(layers), "lacks": tuple(entry["lacks"])})


def recipe_of(cfg: "TransformerConfig") -> Recipe:
    """How moejax keeps the numbers of a model of that config."""
    size = {"float32": 4.0}
    param, compute = size.get(cfg.param_dtype, 2.0), size.get(cfg.dtype, 2.0)
    recipe = dataclasses.replace(MOEJAX, param_bytes=param, compute_bytes=compute, grad_bytes=param, moment_bytes=2 * param)
    if cfg.moe is None:
        return recipe
    return dataclasses.replace(recipe, capacity=cfg.moe.capacity, capacity_factor=cfg.moe.capacity_factor)


def model_of(cfg: "TransformerConfig", name: str = "config") -> Model:
    """The model that a moejax TransformerConfig describes."""
    norm = "head" if cfg.qk_norm else ""
    attention = Attention(cfg.num_heads, cfg.num_kv_heads, cfg.head_width, cfg.head_width, qk_norm=norm)
    dense = Layer(attention, FeedForward(cfg.d_ff, cfg.activation in ("swiglu", "geglu")))
    layers = {False: dense, True: dense}
    if cfg.moe is not None:
        m = cfg.moe
        gated = m.activation in ("swiglu", "geglu")
        layers[True] = Layer(attention, MoE(m.num_experts, m.top_k, m.d_ff, m.num_shared_experts * m.d_ff, gated))
    kinds = [is_moe for repeats, group in cfg.stacks for is_moe in group * repeats]
    return Model(name, cfg.d_model, cfg.vocab_size, tuple(layers[kind] for kind in kinds), cfg.tie_embeddings)
