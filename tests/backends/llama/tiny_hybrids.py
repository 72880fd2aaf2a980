"""Tiny models with recurrent layers, or windows, as GGUF files, with the bundled model's tokenizer and random weights.

They draw words alone: the rows of the head for other tokens are zero.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from rekindle import pocket
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.engine.gguf_file import Tensor, Value, write_file
from rekindle_lab.bench.engine.gguf_model import config_of, tokenizer

CONTEXT, WIDTH, INNER, HEAD, STATE = 2048, 64, 96, 32, 16
WINDOW = 100  # no multiple of a block's tokens
Shapes = dict[str, tuple[int, ...]]

FEED: Shapes = {"ffn_gate.weight": (INNER, WIDTH), "ffn_up.weight": (INNER, WIDTH), "ffn_down.weight": (WIDTH, INNER)}
ATTENTION: Shapes = {f"attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
MAMBA2: Shapes = {
    "attn_norm.weight": (WIDTH,),
    "ssm_in.weight": (2 * (2 * WIDTH) + 2 * STATE + 2, WIDTH),
    "ssm_conv1d.weight": (2 * WIDTH + 2 * STATE, 4),
    "ssm_conv1d.bias": (2 * WIDTH + 2 * STATE,),
    "ssm_dt.bias": (2,),
    "ssm_a": (2, 1),
    "ssm_d": (2, 1),
    "ssm_norm.weight": (1, 2 * WIDTH),
    "ssm_out.weight": (WIDTH, 2 * WIDTH),
}
OF_MAMBA2: dict[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": STATE,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 1,
}
NORMS: Shapes = {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)}
HYBRIDS: dict[str, tuple[dict[str, Value], list[Shapes]]] = {
    "qwen35": (
        {
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "full_attention_interval": 2,
            "rope.dimension_count": HEAD,
            "rope.dimension_sections": [HEAD // 4, HEAD // 8, HEAD // 8, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 2 * HEAD,
            "ssm.state_size": HEAD,
            "ssm.time_step_rank": 2,
            "ssm.group_count": 2,
        },
        [
            {
                "attn_norm.weight": (WIDTH,),
                "post_attention_norm.weight": (WIDTH,),
                "attn_qkv.weight": (6 * HEAD, WIDTH),
                "attn_gate.weight": (2 * HEAD, WIDTH),
                "ssm_conv1d.weight": (6 * HEAD, 4),
                "ssm_dt.bias": (2,),
                "ssm_a": (2,),
                "ssm_alpha.weight": (2, WIDTH),
                "ssm_beta.weight": (2, WIDTH),
                "ssm_norm.weight": (HEAD,),
                "ssm_out.weight": (WIDTH, 2 * HEAD),
                **FEED,
            },
            {
                "attn_norm.weight": (WIDTH,),
                "post_attention_norm.weight": (WIDTH,),
                "attn_q_norm.weight": (HEAD,),
                "attn_k_norm.weight": (HEAD,),
                **ATTENTION,
                "attn_q.weight": (2 * WIDTH, WIDTH),
                **FEED,
            },
        ],
    ),
    "lfm2": (
        {"attention.head_count": 2, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
        [
            {
                **NORMS,
                "shortconv.conv.weight": (WIDTH, 3),
                "shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
                "shortconv.out_proj.weight": (WIDTH, WIDTH),
                **FEED,
            },
            {**NORMS, "attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,), **ATTENTION, **FEED},
        ],
    ),
    "granitehybrid": (
        {
            **OF_MAMBA2,
            "attention.head_count": 2,
            "attention.head_count_kv": [0, 2],
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "rope.dimension_count": HEAD,
            "attention.scale": 0.1,
            "embedding_scale": 1.0,
            "residual_scale": 1.0,
            "logit_scale": 1.0,
        },
        [{**NORMS, **MAMBA2, **FEED}, {**NORMS, **ATTENTION, **FEED}],
    ),
    "mamba2": ({**OF_MAMBA2, "attention.head_count": 0}, [MAMBA2, MAMBA2]),
}
OF_GEMMA: Shapes = {
    **NORMS,
    **ATTENTION,
    **FEED,
    "attn_q_norm.weight": (HEAD,),
    "attn_k_norm.weight": (HEAD,),
    "post_attention_norm.weight": (WIDTH,),
    "post_ffw_norm.weight": (WIDTH,),
}
WINDOWED: dict[str, tuple[dict[str, Value], list[Shapes]]] = {
    "gemma3": (
        {
            "attention.head_count": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": HEAD,
            "attention.value_length": HEAD,
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": 2,  # every second layer sees all
        },
        [OF_GEMMA, OF_GEMMA],
    )
}


def write(architecture: str, path: Path) -> None:
    """Write a model of an architecture as llama.cpp calls it."""
    own, layers = (HYBRIDS | WINDOWED)[architecture]
    directory = pocket.model_dir()
    vocabulary = PromptEncoder.from_dir(directory).vocabulary
    shown = [vocabulary.shown(each) or b"" for each in range(vocabulary.size)]
    is_word = np.array([[re.fullmatch(rb" ?[a-z]{2,}", each) is not None] for each in shown], dtype=np.float32)
    common: dict[str, Value] = {
        "vocab_size": vocabulary.size,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": len(layers),
        "feed_forward_length": INNER,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
    }
    metadata: dict[str, Value] = {"general.architecture": architecture, "general.name": path.stem}
    metadata |= {f"{architecture}.{key}": value for key, value in {**common, **own}.items()}
    shapes: Shapes = {"token_embd.weight": (vocabulary.size, WIDTH), "output.weight": (vocabulary.size, WIDTH)}
    shapes |= {f"blk.{number}.{name}": shape for number, layer in enumerate(layers) for name, shape in layer.items()}
    shapes["token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"] = (WIDTH,)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        def values() -> np.ndarray:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            drawn = np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)
            if "norm" in name:
                return np.ones_like(drawn)
            if name.endswith("ssm_a"):  # how fast a state decays
                return -abs(drawn)
            return drawn * is_word if name == "output.weight" else drawn

        return Tensor(name, shape, "f32", values)

    tokens = tokenizer(directory, config_of(directory))
    write_file(path, {**metadata, **tokens}, [tensor(name, shape) for name, shape in shapes.items()])
