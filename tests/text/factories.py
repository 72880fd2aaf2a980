"""Tokenizers trained here, templates of the kinds found in the wild, and texts that are hard to cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from benchmarks.front.splits import CL100K, DEEPSEEK, O200K
from rekindle.text.prompt import PromptEncoder
from rekindle.text.template import ChatTemplate
from rekindle.text.tokenizer import TokenizerFile

SPECIALS = ("<|end|>", "<|start|>", "<s>")
UNFLAGGED = ("<|user|>", "<think>", "</think>", "<tool_call>")
KEPT = ("<|custom|>", "<extra_1>")

CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
UNFLAGGED_ROLES = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
    "<|start|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|start|>{{ m.role }}\n{{ c }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TRIMS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
DATED = (
    "<|start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|end|>\n{% for m in messages %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MOVES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<|start|>{{ m.role }}\n{% if loop.last %}{{ sys }}{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REFUSES_TWO_USERS = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog, doesn't it? We'll see what they've done; I'm sure she'd say it's ok.",
    "def main(args):\n    for index in range(100):\n        print(f'{index}: {args[index]}')\n\n    return 0\n",
    "In 1998, 12345678 people paid 3.14159 dollars (or 2,500,000 yen) on 2024-05-06 at 10:30.",
    "Größe, naïve café, Ünïcödé über alles; señor, façade, crème brûlée. Ελληνικά και русский текст.",
    "日本語のテキストと漢字、ひらがな。中文文本也有。 한국어 텍스트 🙂🙃 emoji 👩‍👩‍👧",
    "  indented   text\twith\ttabs\r\nand\r\n\r\nblank lines\n\n\nhere.   trailing   ",
    "HelloWorld camelCase HTTPServer XMLHttpRequest SCREAMING_CASE can't WON'T I'LL you're",
)
SNIPPETS = (
    *"s|re|ll|d| |  |   |\n|\n\n|\r\n|\t| \n |a|the| the|The| fox|ing|n't|'s|'ll|'re|'r|'l|'|I|HTTP|Server|xY".split(
        "|"
    ),
    *"1|12|123|4567|.|,|!!|...|?|(|)|/|//|_|-|—|é|e\u0301|\u0301|ü|ß|日本|語|、|русский|한|🙂|👩‍👧|\u00a0|\u3000|ﷺ".split(
        "|"
    ),
    *"<|end|>;<think>;</think>;<|cus;<|custom|>;tom|>;<;|>;<s>;▁; ▁;<0x41>;<extra_1>;Ω;\x00".split(";"),
)
PLAIN_SNIPPETS = tuple(text for text in SNIPPETS if "<" not in text and "|>" not in text and "▁" not in text)

texts = st.lists(st.sampled_from(SNIPPETS), max_size=30).map("".join)
plain_texts = st.lists(st.sampled_from(PLAIN_SNIPPETS), max_size=30).map("".join)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _byte_level(patterns: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if patterns:
        parts = [*map(_split, patterns), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(prefix: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if prefix == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Metaspace("▁")
    return tokenizer


@cache
def tokenizer_json(kind: str) -> str:
    """The JSON of a trained tokenizer with all added tokens.

    Kinds: gpt2, cl100k, o200k, deepseek, unknown (no known splitter), nfc, bos, prefixed (byte-level with a prefix
    space), prepend, always, first, words (sentencepiece split at blanks), lower (a normaliser that changes text).
    """
    byte_fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    first_specials: list[str] = []
    patterns = {"gpt2": (), "o200k": (O200K,), "deepseek": DEEPSEEK, "unknown": (r"\S+|\s+",)}
    if kind in ("prepend", "always", "first", "words"):
        tokenizer = _sentencepiece(kind if kind != "words" else "always")
        if kind == "words":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
        first_specials = ["<unk>", *byte_fallback]
        alphabet = []
    else:
        tokenizer = _byte_level(patterns.get(kind, (CL100K,)))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "lower":
        tokenizer.normalizer = normalizers.Lowercase()
    if kind == "prefixed":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*first_specials, "<s>"],
        initial_alphabet=alphabet,
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    # In between, so that taking the control tokens away renumbers those that stay.
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*UNFLAGGED, KEPT[0])])
    tokenizer.add_special_tokens(["<|start|>"])
    tokenizer.add_tokens([AddedToken(KEPT[1], normalized=False)])
    if kind == "bos":
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    data = json.loads(tokenizer.to_str())
    for entry in data["added_tokens"]:
        # Byte tokens and <unk> belong to the model; only training needs them as special tokens.
        entry["special"] = entry["special"] and entry["content"] not in byte_fallback
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] not in byte_fallback]
    return json.dumps(data)


BYTE_LEVEL = ("gpt2", "cl100k", "o200k", "deepseek", "unknown", "nfc", "bos", "prefixed")
SENTENCEPIECE = ("prepend", "always", "first", "words")
KINDS = (*BYTE_LEVEL, *SENTENCEPIECE)
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}


def make_encoder(kind: str, template: str = CHAT, *, moment: datetime = datetime(2024, 1, 31, 12)) -> PromptEncoder:
    chat = ChatTemplate({"default": template}, {"bos_token": "<s>"}, clock=lambda: moment)
    return PromptEncoder(TokenizerFile(tokenizer_json(kind).encode()), CONFIG, chat)


@cache
def encoder_of(kind: str, template: str = CHAT) -> PromptEncoder:
    return make_encoder(kind, template)


@cache
def full_tokenizer(kind: str) -> Tokenizer:
    """The library's own tokenizer with everything in it: the oracle."""
    return Tokenizer.from_str(tokenizer_json(kind))


def write_model_dir(directory: Path, kind: str, template: str = CHAT) -> Path:
    (directory / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@cache
def _ids_by_bytes(kind: str) -> dict[bytes, list[int]]:
    encoder = encoder_of(kind)
    found: dict[bytes, list[int]] = {}
    for token_id in range(encoder.vocab_size):
        if not encoder.vocabulary.is_control_token(token_id):
            found.setdefault(encoder.vocabulary.shown(token_id), []).append(token_id)
    return found


def odd_ids(kind: str, text: str, seed: int) -> np.ndarray:
    """Ids that spell `text`, chosen at random: as a sampler might, not as the tokenizer would."""
    rng, table = random.Random(seed), _ids_by_bytes(kind)
    data, at, ids = text.encode(), 0, []
    while at < len(data):
        sizes = [size for size in range(1, 13) if at + size <= len(data) and data[at : at + size] in table]
        size = rng.choice(sizes)
        ids.append(rng.choice(table[data[at : at + size]]))
        at += size
    return np.array(ids, dtype=np.uint32)
