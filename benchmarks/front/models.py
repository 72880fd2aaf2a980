"""Seven tokenizers of the kinds that models have, trained here, each with a small model of random weights.

Byte-level ones split text as GPT-2, GPT-4, GPT-4o and DeepSeek do; those of SentencePiece put a blank before every
text, before each piece between control tokens, or before the first only. What a random model says is far from what an
encoder would choose for the same text, so every reply encodes to other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.front.splits import CL100K, DEEPSEEK, O200K
from rekindle_lab.bench.workload import WORDS

SPLITS: dict[str, Sequence[str]] = {"gpt2": (), "cl100k": (CL100K,), "o200k": (O200K,), "deepseek": DEEPSEEK}
SENTENCEPIECE = ("prepend", "always", "first")
KINDS = (*SPLITS, *SENTENCEPIECE)
CONTROLS = ("<|start|>", "<|end|>")
CORPUS = (
    " ".join(WORDS) + ".",
    "It's what they've said; we'll see, and I'm sure that she'd agree: (a) 12,345 pieces, (b) none!",
    "def main(args):\n    for index in range(100):\n        print(f'{index}: {args[index]}')\n\n    return 0\n",
)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
VOCAB_SIZE, MAX_CONTEXT = 800, 2048


def write_model(directory: Path, kind: str, seed: int) -> Path:
    """Write the files of a model with the tokenizer of this kind into an empty directory; return it."""
    tokenizer = _trained(kind)
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(_described(tokenizer), "utf-8")
    config = {"chat_template": TEMPLATE, "eos_token": CONTROLS[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        eos_token_id=tokenizer.token_to_id(CONTROLS[1]),
        bos_token_id=None,
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(directory)
    return directory


def _trained(kind: str) -> Tokenizer:
    if kind in SPLITS:
        tokenizer, special, alphabet = Tokenizer(models.BPE()), [], pre_tokenizers.ByteLevel.alphabet()
        patterns = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[kind]]
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*patterns, bytes_alone]) if patterns else bytes_alone
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        special, alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))], []
        if kind == "prepend":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
        tokenizer.decoder = decoders.Metaspace("▁")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROLS])
    return tokenizer


def _described(tokenizer: Tokenizer) -> str:
    """Return tokenizer.json; tokens of bytes needed a flag for the training alone, and belong to the model."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [entry for entry in data["added_tokens"] if not entry["content"].startswith("<0x")]
    for entry in data["added_tokens"]:
        entry["special"] = entry["content"] in CONTROLS
    return json.dumps(data)
