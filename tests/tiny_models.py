"""Tiny models of real architectures, written as complete model directories.

`tiny_model_dir(kind, dtype, parent)` gives weights, config, a tokenizer trained here and a chat template. Weights are
drawn with eight times the usual spread: with the usual one, logits hardly see a broken cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from rekindle.model.check_text import OWN_TEXT

VOCAB_SIZE = 384
MAX_CONTEXT = 1024
SPREAD = 0.02 * 8
WINDOW = 24
CONTROL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|tool|>")
PAD_ID, START_ID, END_ID, TOOL_ID = range(4)
# Around pictures, after all other ids: as the tokenizers of these models name them, that of each row first.
TILE_TOKENS = (
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
PATCH_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
POOLED_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
PARTS_TEMPLATE = (  # content is a list of parts, as in the templates of models that see
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
CORPUS = (
    "The lighthouse keeper wrote the number down and went to sleep.",
    "Remember: the red box holds 4711 screws, the blue box holds 12 nuts.",
    "What did she say about the weather in Trondheim? It rained, and it will rain again.",
    "def add(a, b):\n    return a + b\n",
    "Größe, Straße, naïve café, 数字 and emoji 🙂 are text as well.",
    "You are a careful assistant. Answer in one short sentence.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": END_ID,
}
_NONE_IS_A_VALUE = ("sliding_window", "bos_token_id")
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

_MLA: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_DEEPSEEK_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
_DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}

# Tiles of 16 x 16 pixels, at most 4 x 4 of them and the whole picture; each is 4 tokens.
_TILED = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 16},
    "do_image_splitting": True,
    "processor_class": "Idefics3Processor",
}
# At most 64 pixels each way; a token has 8 x 8 of them.
_PATCHED = {
    "size": {"longest_edge": 64},
    "patch_size": 4,
    "processor_class": "PixtralProcessor",
    "image_processor_type": "PixtralImageProcessorFast",
}
_POOLED = {
    "size": {"height": 64, "width": 64},
    "processor_class": "Gemma3Processor",
    "image_processor_type": "Gemma3ImageProcessor",
}
_PIXTRAL = {"model_type": "pixtral", "num_hidden_layers": 1, "image_size": 16, **_EYE}
_WITH_PICTURES = {"vocab_size": VOCAB_SIZE + 32}
_OF_TILES = {"scale_factor": 2, "image_token_id": VOCAB_SIZE}
_OF_PATCHES = {"vision_config": _PIXTRAL, "spatial_merge_size": 2, "image_token_id": VOCAB_SIZE}
# By kind: what a template writes for a picture, what follows the tokenizer's own ids, and the config of the processor.
_SEEN: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "smolvlm": ("<image>", TILE_TOKENS, {"image_processor_type": "SmolVLMImageProcessor", **_TILED}),
    "idefics3": ("<image>", TILE_TOKENS, {"image_processor_type": "Idefics3ImageProcessor", **_TILED}),
    "mistral3": ("[IMG]", PATCH_TOKENS, _PATCHED),
    "mistral3-ministral3": ("[IMG]", PATCH_TOKENS, _PATCHED),
    "mistral3-mistral4": ("[IMG]", PATCH_TOKENS, _PATCHED),
    "gemma3-vl": ("<start_of_image>", POOLED_TOKENS, _POOLED),
}

# model_type, differences from _COMMON (None removes a key); with a `text_config` they are that one's.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-80": ("llama", {"head_dim": 80}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral3": (  # queries grow with the logarithm of their position
        "ministral3",
        {"sliding_window": None,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5,
                             "original_max_position_embeddings": 256}},
    ),
    "glm": ("glm", {"head_dim": 64, "partial_rotary_factor": 0.5}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": None, "hidden_size": 128}),
    "qwen3": ("qwen3", {}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0,
         "layer_types": _ALTERNATING},
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    ),
    "gemma4": (  # the last two layers attend to the KV of the first two
        "gemma4_text",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
         "num_kv_shared_layers": 2, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCAB_SIZE},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
    ),
    "phi3": ("phi3", {"head_dim": None, "sliding_window": None}),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": _ALTERNATING,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                             "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0}},
    ),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
    "gpt2": (
        "gpt2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_CONTEXT, "hidden_size": None,
         "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None, "head_dim": None,
         "max_position_embeddings": None, "intermediate_size": None},
    ),
    "smollm3": ("smollm3", {"head_dim": None}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "granite": ("granite", {"head_dim": None}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "glm4": ("glm4", {"head_dim": 64, "partial_rotary_factor": 0.5}),
    "glm4-moe": (
        "glm4_moe",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
         "first_k_dense_replace": 1},
    ),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("olmo3", {"head_dim": None, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "exaone4": ("exaone4", {"head_dim": None, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
    "seed-oss": ("seed_oss", {}),
    "starcoder2": ("starcoder2", {"head_dim": None, "sliding_window": None}),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {"head_dim": None}),
    "ernie": ("ernie4_5", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "lfm2": (  # short convolutions
        "lfm2",
        {"head_dim": None, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
         "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {"head_dim": None, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
         "conv_L_cache": 3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "num_dense_layers": 1},
    ),
    "qwen3-next": (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
         "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
         "linear_value_head_dim": 32},
    ),
    "qwen3.5": (  # Gated DeltaNet
        "qwen3_5_text",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16},
    ),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "shared_expert_intermediate_size": 48},
    ),
    "granite-4-h": (  # Mamba 2
        "granitemoehybrid",
        {"head_dim": None, "num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "attention"],
         "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
         "mamba_chunk_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    ),
    "nemotron-h": (  # Mamba 2, and layers without attention
        "nemotron_h",
        {"num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention", "mlp"],
         "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 64,
         "expand": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1},
    ),
    "falcon-h1": (  # attention and Mamba 2 in every layer
        "falcon_h1",
        {"num_hidden_layers": 2, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
         "mamba_n_groups": 1, "mamba_chunk_size": 64, "mamba_expand": 2},
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        {"head_dim": None, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16},
    ),
    "lfm3": (  # short convolutions and windows
        "lfm3",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
         "sliding_window": WINDOW},
    ),
    "bamba": (
        "bamba",
        {"head_dim": None, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
         "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64},
    ),
    "zamba2": (
        "zamba2",
        {"head_dim": None, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
         "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_expand": 2, "chunk_size": 64, "mamba_ngroups": 1,
         "num_key_value_heads": 4, "num_mem_blocks": 1, "use_mem_rope": True},
    ),
    # They see, too; tests ask for text alone.
    "qwen3.5-vl": (
        "qwen3_5",
        {"text_config": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                         "linear_value_head_dim": 16},
         "vision_config": {"depth": 1, "num_position_embeddings": 16, **_EYE}},
    ),
    "qwen3.5-moe-vl": (
        "qwen3_5_moe",
        {"text_config": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
                         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                         "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
         "vision_config": {"depth": 1, "num_position_embeddings": 16, **_EYE}},
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}},
         "vision_config": {"depth": 1, "num_position_embeddings": 16, "deepstack_visual_indexes": [0], **_EYE}},
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                         "head_dim": None},
         "vision_config": {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0], **_EYE}},
    ),
    "mistral3": (
        "mistral3",
        {"text_config": {"model_type": "mistral", "sliding_window": None, **_WITH_PICTURES}, **_OF_PATCHES},
    ),
    "mistral3-ministral3": (
        "mistral3",
        {"text_config": {"model_type": "ministral3", "sliding_window": None, **_WITH_PICTURES,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5,
                                             "original_max_position_embeddings": 256}},
         **_OF_PATCHES},
    ),
    "mistral3-mistral4": (
        "mistral3",
        {"text_config": {"model_type": "mistral4", **_MLA, **_DEEPSEEK_MOE, **_WITH_PICTURES}, **_OF_PATCHES},
    ),
    "smolvlm": (
        "smolvlm",
        {"text_config": {"model_type": "llama", **_WITH_PICTURES},
         "vision_config": {"num_hidden_layers": 2, "image_size": 16, **_EYE},
         **_OF_TILES},
    ),
    "idefics3": (
        "idefics3",
        {"text_config": {"model_type": "llama", **_WITH_PICTURES},
         "vision_config": {"num_hidden_layers": 2, "image_size": 16, **_EYE},
         **_OF_TILES},
    ),
    "gemma3-vl": (  # 64 tokens a picture, more than a window has
        "gemma3",
        {"text_config": {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "sliding_window": WINDOW,
                         "layer_types": _ALTERNATING, **_WITH_PICTURES},
         "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 64,
                           "vision_use_head": False, **_EYE},
         "mm_tokens_per_image": 64, "image_token_id": VOCAB_SIZE},
    ),
    # Multi-head latent attention.
    "deepseek-v3": ("deepseek_v3", {**_MLA, **_DEEPSEEK_MOE}),
    "deepseek-v2": ("deepseek_v2", {**_MLA, **_DEEPSEEK_MOE, "n_shared_experts": 1}),
    "glm-4.7-flash": ("glm4_moe_lite", {**_MLA, **_DEEPSEEK_MOE}),
    "axk1": ("axk1", {**_MLA, **_DEEPSEEK_MOE}),
    "minicpm3": ("minicpm3", _MLA),
    "youtu": ("youtu", _MLA),
    "longcat-flash": (  # two attentions in a layer
        "longcat_flash",
        {**_MLA, "head_dim": 16, "num_hidden_layers": None, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2,
         "zero_expert_num": 2, "expert_ffn_hidden_size": 48, "ffn_hidden_size": 96},
    ),
    "kimi-linear": (
        "kimi_linear",
        {**_MLA, "layer_types": ["full_attention", "linear_attention", "full_attention"], "linear_num_heads": 4,
         "linear_head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "ling-hybrid": (
        "bailing_hybrid",
        {**_MLA, **_DELTA, **_DEEPSEEK_MOE, "head_dim": 32, "num_local_experts": 4},
    ),
    # Refused, each for its own reason.
    "deepseek-v32": ("deepseek_v32", {**_MLA, **_DEEPSEEK_MOE, "index_n_heads": 2, "index_head_dim": 32}),
    "glm-5": ("glm_moe_dsa", {**_MLA, **_DEEPSEEK_MOE, "index_n_heads": 2, "index_head_dim": 32}),
    "stablelm": ("stablelm", {"head_dim": None}),
    "falcon": ("falcon", {"head_dim": None, "intermediate_size": None, "num_key_value_heads": None}),
    "jamba": (  # Mamba 1
        "jamba",
        {"head_dim": None, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
         "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    ),
    "minimax": (  # lightning attention
        "minimax",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4,
         "num_experts_per_tok": 2, "block_size": 64},
    ),
    "llama4": (
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "num_local_experts": 2,
         "intermediate_size_mlp": 96, "attention_chunk_size": 64, "interleave_moe_layer_step": 2},
    ),
    "phi3-longrope": (
        "phi3",
        {"head_dim": None, "sliding_window": None, "original_max_position_embeddings": 256,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
                             "long_factor": [4.0] * 8, "original_max_position_embeddings": 256}},
    ),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
}  # fmt: skip
HYBRID_KINDS = (
    *("lfm2", "lfm2-moe", "lfm3", "qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-4-h", "nemotron-h", "falcon-h1"),
    *("olmo-hybrid", "bamba", "zamba2", "kimi-linear", "ling-hybrid"),
)
LATENT_KINDS = ("deepseek-v3", "deepseek-v2", "glm-4.7-flash", "axk1", "minicpm3", "youtu", "longcat-flash")
EXACT_KINDS = ("llama", "qwen3", "gemma3", "mixtral", "phi3")
SEEING_KINDS = (
    *("qwen3-vl", "qwen2.5-vl", "mistral3", "mistral3-ministral3", "mistral3-mistral4"),
    *("qwen3.5-vl", "qwen3.5-moe-vl", "smolvlm", "idefics3", "gemma3-vl"),
)
PICTURE_KINDS = tuple(_SEEN)  # which see here, too


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model; `changes` override or add keys."""
    model_type, differences = KINDS[kind]
    if "text_config" in differences:
        text = _kept({**_COMMON, **differences["text_config"], **changes})
        return AutoConfig.for_model(model_type, **{**differences, "text_config": text, "tie_word_embeddings": False})
    return AutoConfig.for_model(model_type, **_kept({**_COMMON, **differences, **changes}))


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None or name in _NONE_IS_A_VALUE}


def tiny_model(kind: str, dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random model in memory, in eval mode; the same seed gives the same weights in every dtype."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        auto = AutoModelForMultimodalLM if kind in SEEING_KINDS else AutoModelForCausalLM
        model = auto.from_config(tiny_config(kind, **changes), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Zero by default, so dropping one would not be seen.
            if name.endswith(("bias", "sinks", "mm_input_projection_weight")):
                torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).eval()


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with the four control tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def write_tokenizer(directory: Path, template: str = CHAT_TEMPLATE, more: Sequence[str] = ()) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; `more` control tokens after all others."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str()) if more else tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "bos_token": None,
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described), "utf-8")
    (directory / "chat_template.jinja").write_text(template, "utf-8")


def tiny_model_dir(
    kind: str, dtype: Literal["fp64", "fp32", "bf16"], parent: Path, *, seed: int = 0, **changes: Any
) -> Path:
    """Write a tiny model with tokenizer and template below `parent`; returns its directory."""
    directory = parent / f"{kind}-{dtype}-{seed}"
    tiny_model(kind, DTYPES[dtype], seed=seed, **changes).save_pretrained(directory)
    if kind in PICTURE_KINDS:
        shown, tokens, described = _SEEN[kind]
        write_tokenizer(directory, PARTS_TEMPLATE.replace("<image>", shown), tokens)
        (directory / "preprocessor_config.json").write_text(json.dumps(described), "utf-8")
    else:
        write_tokenizer(directory)
    (directory / OWN_TEXT).write_text("\n".join(CORPUS), "utf-8")  # a short one: it is computed at every load
    return directory
