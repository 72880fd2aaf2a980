"""GGUF files for tests: vocabularies, and the bundled model with a scaled rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle import pocket
from rekindle_lab.bench.engine.gguf_file import Tensor, Value, write_file
from rekindle_lab.bench.engine.gguf_model import contents

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CONTEXT, ORIGINAL = 1024, 256
NUM_PROMPT = 700
TEXTS = [
    "A tokenizer's ids are what the model reads: nobody's, don't, WE'LL.\n\n1. Set up\n2. Run it\n\n\n10) the end",
    "for at in range(100):\n        if value[at] != 2.5e-3:  # <b>&amp;</b>\n\t\treturn {'a': `x`, \"b\": ~y | $z}\r\n",
    "1234567890 12  345 6 7.89 1,000,000 2024-05-06 ½ ² Ⅷ ٣٤",
    "a\n\n\n12\n\n34\n5\t6 \n 7",
    "🙂👩‍👩‍👧🏽 emoji, e\u0301 combining, ✓ → ∑ © €5",
    "日本語のテキスト、中文。한국어 русский العربية हिन्दी ไทย",
    "  two  blanks\n\n\n\tand tabs \r\n trailing  ",
    " " * 9 + "x" + " " * 5 + "y\t\t\t z" + "\n" * 6 + "end " + " " * 3,
    "ÀÉÎõü naïve Straße ΑΒγδ ЖЗи ǅ MiXedCaseWord HTTPServer snake_case_name",
    "!!! ... --- *** (((a))) [[b]] {{c}} <<<d>>> 'e' \"f\" a.b,c;d:e/f\\g @h #i %j ^k &l =m +n",
    "\u00a0nbsp \u3000wide x\u2028y sep",
]
WHOLE = "zyxwv"  # a word that is a token, though no merges make it
ASKED = [*TEXTS, f"a {WHOLE} b{WHOLE}"]
ROPES: Mapping[str, Mapping[str, Value]] = {
    "none": {"scaling.type": "none", "scaling.factor": 4.0},
    "linear": {"scaling.type": "linear", "scaling.factor": 4.0},
    "old": {"scale_linear": 2.0},
    "yarn": {
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": ORIGINAL,
        "scaling.attn_factor": 1.3,
    },
    "freqs": {"scaling.type": "linear", "scaling.factor": 2.0},
    "longrope": {
        "scaling.type": "longrope",
        "scaling.original_context_length": ORIGINAL,
        "scaling.attn_factor": 1.19,
    },
}


def vocabulary_file(vocabulary: Mapping[str, Any], kind: str, name: str, **more: Value) -> dict[str, Value]:
    """The metadata of a file that holds a tokenizer alone: `kind` gpt2 or llama; `name`: how text is split, or + and -.

    `more` are further keys of `tokenizer.ggml`.
    """
    sizes = {"context_length": CONTEXT, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    heads: dict[str, Value] = {"attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-6}
    found: dict[str, Value] = {"model": kind, "add_bos_token": False}
    if kind == "gpt2":
        tokens = [*vocabulary["tokens"], f"Ġ{WHOLE}", "<|end|>"]
        types = [NORMAL] * (len(tokens) - 1) + [CONTROL]
        found |= {"pre": name, "merges": vocabulary["merges"], "eos_token_id": len(tokens) - 1}
    else:
        first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens = [*first, *vocabulary["tokens"]]
        types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(vocabulary["tokens"])]
        found |= {"scores": [-float(number) for number in range(len(tokens))], "add_space_prefix": name == "+"}
        found |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    found |= {"tokens": tokens, "token_type": types, **more}
    return {
        "general.architecture": "llama",
        **{f"llama.{key}": value for key, value in {**sizes, **heads, "vocab_size": len(tokens)}.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in found.items()},
    }


def scaled_model(name: str, path: Path) -> None:
    """Write the bundled model in fp32 with a rotary embedding of ROPES, `freqs` with Llama 3.1's tensor of factors."""
    metadata, tensors = contents(pocket.model_dir(), path.stem, "f32")
    family = metadata["general.architecture"]
    width = int(str(metadata[f"{family}.rope.dimension_count"]))
    base = float(str(metadata[f"{family}.rope.freq_base"]))
    added = {
        "freqs": {"rope_freqs.weight": llama3_factors(width, base)},
        "longrope": {
            "rope_factors_long.weight": np.linspace(1, 12, width // 2, dtype=np.float32),
            "rope_factors_short.weight": np.linspace(1, 2, width // 2, dtype=np.float32),
        },
    }
    keys = {f"{family}.rope.{key}": value for key, value in ROPES[name].items()}
    write_file(
        path,
        {**metadata, **keys, f"{family}.context_length": CONTEXT},
        [*tensors, *map(_stored, added.get(name, {}).items())],
    )


def _stored(named: tuple[str, np.ndarray]) -> Tensor:
    name, values = named
    return Tensor(name, values.shape, "f32", lambda: values)


def llama3_factors(width: int, base: float) -> np.ndarray:
    """By what Llama 3.1 divides its frequencies, with the lengths of its training scaled down to `ORIGINAL`."""
    factor, low, high = 8.0, 1.0, 4.0
    lengths = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    smooth = (ORIGINAL / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(lengths < ORIGINAL / high, 1.0, np.where(lengths > ORIGINAL / low, factor, between)).astype("<f4")


def prompt_of() -> list[int]:
    """A prompt longer than what the scaled models were made for."""
    return np.random.default_rng(7).integers(10, 4000, NUM_PROMPT).tolist()
