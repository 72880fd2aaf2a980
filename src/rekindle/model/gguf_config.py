"""The config of a GGUF file as config.json and generation_config.json.

Owns which key of the file is which field of transformers' config: transformers' own tables, and what these leave out
though it changes numbers. Defaults of a config class are one model's values, so what the file says is written even
where it agrees. The ids that end a reply and the sampling that the model's makers advise are in generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import GgufHeader, shown, unreadable
from rekindle.model.gguf_rope import apply_rope
from rekindle.model.gguf_tokenizer import KEY, end_ids, special_id
from rekindle.model.refusals import MOST_LAYERS, WHAT_FITS, refusing

ARCHITECTURE = "general.architecture"
# Where transformers calls an architecture otherwise.
MODEL_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
# What transformers' tables leave out of llama.cpp's keys, if the config's class has such a field.
FIELDS = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
OWN_FIELDS = {"gpt-oss": {"attention.sliding_window": "sliding_window"}}
TIED = frozenset({"falcon", "bloom"})  # whose head is the embedding, whatever tensors there are
BY_HEADS = {"gemma2": 46, "gemma3": 62}  # by the number of layers: 27B scales its attention by hidden size and heads
BIASES = {"attention_bias": ".attn_q.bias", "mlp_bias": ".ffn_up.bias"}  # fields that say whether there are biases
SAMPLING = {  # keys of general.sampling, and their names in generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """The content of config.json and generation_config.json; ModelRefused if no config of transformers fits."""
    # All fields: those that agree with a default would follow it when that changes.
    described = json.loads(_config(header).to_json_string(use_diff=False))
    return {"config.json": described, "generation_config.json": _generation(header)}


def description_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """The same with what a file says in the same words whatever its architecture is; nothing can be loaded by it."""
    architecture = header.text(ARCHITECTURE)
    if architecture is None:
        raise unreadable(header.path, f"it has no {ARCHITECTURE}")
    described: dict[str, Any] = {"architectures": [architecture], "model_type": architecture}
    described["vocab_size"] = _vocab_size(header)
    most = header.number(f"{architecture}.context_length")
    if most is not None:
        described["max_position_embeddings"] = int(most)
    return {"config.json": described, "generation_config.json": _generation(header)}


def _generation(header: GgufHeader) -> dict[str, Any]:
    """The content of generation_config.json."""
    ids = {name: special_id(header, key) for name, key in _ID_KEYS.items()}
    generation: dict[str, Any] = {name: found for name, found in ids.items() if found is not None}
    generation["eos_token_id"] = end_ids(header)
    for name, field in SAMPLING.items():
        value = header.number(f"general.sampling.{name}")
        if value is not None:
            generation[field] = value
    if {"temperature", "top_k", "top_p", "min_p"} & generation.keys():
        generation["do_sample"] = True
    return generation


_ID_KEYS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}


def _config(header: GgufHeader) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = header.text(ARCHITECTURE)
    if architecture is None:
        raise unreadable(header.path, f"it has no {ARCHITECTURE}")
    _check_layers(header, architecture)
    fields = _described(header, architecture)
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _not_served(header, architecture)
    fields["vocab_size"] = _vocab_size(header)
    fields["eos_token_id"] = special_id(header, "eos_token_id")
    fields |= {name: special_id(header, key) for name, key in _ID_KEYS.items()}
    with refusing(f"{header.path} cannot be read", "; name the original model, from which it was made"):
        config = CONFIG_MAPPING[kind](**fields)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        _complete(header, architecture, config)
    return config


def _check_layers(header: GgufHeader, architecture: str) -> None:
    """Refuse more layers than a model has, before they are listed one by one."""
    count = header.number(f"{architecture}.block_count")
    if count is not None and not 1 <= count <= MOST_LAYERS:
        raise unreadable(header.path, f"it claims {count:,} layers: a model has 1 to {MOST_LAYERS}")


def _not_served(header: GgufHeader, architecture: str) -> ModelRefused:
    return ModelRefused(
        f"{header.path}: GGUF files of the architecture '{shown(architecture)}' are not read by transformers: choose "
        f"the original, if that is served; {WHAT_FITS}"
    )


def _described(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """The fields that transformers' tables name, `model_type` among them."""
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    newer = _newer_config(header, architecture)
    if newer is not None:
        return newer
    name = MODEL_TYPES.get(architecture, architecture)
    known = GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING.get(name)
    if known is None or architecture in ("general", "tokenizer"):
        raise _not_served(header, architecture)
    fields: dict[str, Any] = {"model_type": name, **GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {})}
    for key, field in {**FIELDS, **OWN_FIELDS.get(architecture, {}), **known}.items():
        value = header.number(f"{architecture}.{key}")
        if field is not None and value is not None:
            fields[field] = value
    names = {each.name for each in header.tensors}
    fields["tie_word_embeddings"] = "output.weight" not in names or architecture in TIED
    if architecture == "stablelm":
        fields["use_qkv_bias"] = any(name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias")) for name in names)
        fields["use_parallel_residual"] = not any("ffn_norm" in name for name in names)
    if isinstance(fields.get("scoring_func"), int):  # of MiniMax M2
        fields["scoring_func"] = {0: "none", 1: "softmax", 2: "sigmoid"}.get(fields["scoring_func"], "softmax")
    return fields


def _newer_config(header: GgufHeader, architecture: str) -> dict[str, Any] | None:
    """What transformers' newer reader makes of it; None if it does not know the architecture, or is not there."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
    except ImportError:  # transformers before 5.20
        return None
    if architecture not in GGUF_CONFIG_ARCHS:
        return None
    # It expects a vocabulary as its length, and other arrays as lists.
    plain = {key: _plain(value) for key, value in header.values.items()}
    with refusing(f"{header.path} cannot be read", "; name the original model, from which it was made"):
        return dict(get_gguf_config(plain, tuple(each.name for each in header.tensors)))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return len(value) if isinstance(value, list) else value


def _vocab_size(header: GgufHeader) -> int:
    """The rows of the embedding, which may be more than there are tokens."""
    table = header.tensor("token_embd.weight")
    return table.shape[0] if table is not None and table.shape else len(header.texts(KEY + "tokens") or ())


def _complete(header: GgufHeader, architecture: str, config: Any) -> None:
    """Write what is no field of its own in the file."""
    if hasattr(config, "query_pre_attn_scalar"):
        wide = config.num_hidden_layers == BY_HEADS.get(architecture)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if wide else config.head_dim
    names = {each.name for each in header.tensors}
    for field, part in BIASES.items():
        if hasattr(config, field):
            setattr(config, field, any(name.endswith(part) for name in names))
    _set_windows(header, architecture, config)
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rope and _newer_config(header, architecture) is None and architecture != "gemma4":
        apply_rope(header, config)


def _set_windows(header: GgufHeader, architecture: str, config: Any) -> None:
    """Which layers attend to a window, where the file says it: every so many layers one does not, or one by one."""
    pattern = header.values.get(f"{architecture}.attention.sliding_window_pattern")
    if pattern is None or not hasattr(config, "layer_types"):
        return
    count = config.num_hidden_layers
    if isinstance(pattern, np.ndarray):
        slides = [bool(each) for each in pattern.tolist()]
    else:
        every = int(header.number(f"{architecture}.attention.sliding_window_pattern") or 1)
        slides = [(index + 1) % every != 0 for index in range(count)]
    if len(slides) != count:
        raise unreadable(header.path, f"it has windows for {len(slides)} layers of {count}")
    config.layer_types = ["sliding_attention" if each else "full_attention" for each in slides]
