"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Owns which tokenizers are rebuilt (byte-level BPE, and BPE with byte fallback, which SentencePiece's is), so that a text
has the ids that llama.cpp gives it. A tokenizer of another kind, or one that splits text in a way that is not known
here, is refused by name. Templates and special tokens are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import GgufHeader, shown, unreadable
from rekindle.model.gguf_splits import SPLITS, Splits

BLANK = "\u2581"
KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
# Gemma's 262,144 tokens have 1.7 million characters, none more than 128, and half a million merges.
MOST_TOKENS, MOST_TOKEN_CHARS, MOST_CHARS, MOST_MERGES = 1 << 19, 2048, 1 << 24, 1 << 21
SPECIALS = {  # names of tokenizer_config.json, and the keys of their ids
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
TEMPLATE = "tokenizer.chat_template"


def tokenizer_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """The content of tokenizer.json and tokenizer_config.json by their names; ModelRefused if they cannot be made."""
    tokens = _tokens(header)
    kind = header.text(KEY + "model")
    builders: Mapping[str | None, Callable[[GgufHeader, Sequence[str]], dict[str, Any]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _gemma4,
    }
    if kind not in builders:
        raise ModelRefused(
            f"{header.path}: tokenizers of the kind {shown(kind or 'none')} are not rebuilt from GGUF files: put the "
            "original's tokenizer.json, tokenizer_config.json and config.json into the file's directory"
        )
    content = {"version": "1.0", "truncation": None, "padding": None, **builders[kind](header, tokens)}
    content["added_tokens"] = _added(header, tokens)
    return {"tokenizer.json": content, "tokenizer_config.json": _config(header, tokens)}


def special_id(header: GgufHeader, name: str) -> int | None:
    """The id under `tokenizer.ggml.<name>`; None if there is none. ModelRefused if no token has it."""
    found = header.number(KEY + name)
    if found is None or int(found) == 0xFFFFFFFF:  # -1 in the type of these keys: no such token
        return None
    count = len(_texts(header))
    if not 0 <= found < count:
        raise unreadable(header.path, f"{KEY}{name} is {int(found)}, and its tokens are 0 to {count - 1}")
    return int(found)


def end_ids(header: GgufHeader) -> list[int]:
    """The ids that end a turn or a message by what the file says, in order."""
    return sorted({found for name in ENDS if (found := special_id(header, name)) is not None})


def _tokens(header: GgufHeader) -> list[str]:
    """The vocabulary; ModelRefused if it has a token twice, or more text than merges are looked for in."""
    # llama.cpp's name for a token without text
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(_texts(header))]
    longest, total = max(map(len, tokens)), sum(map(len, tokens))
    if len(tokens) > MOST_TOKENS or longest > MOST_TOKEN_CHARS or total > MOST_CHARS:
        raise unreadable(
            header.path,
            f"its vocabulary has {len(tokens):,} tokens of {total:,} characters, {longest:,} of them in one: at most "
            f"{MOST_TOKENS:,} of {MOST_CHARS:,} and {MOST_TOKEN_CHARS:,} are read",
        )
    if len(set(tokens)) < len(tokens):
        ids: dict[str, int] = {}
        first, again = next((ids[text], at) for at, text in enumerate(tokens) if ids.setdefault(text, at) != at)
        raise unreadable(header.path, f"its vocabulary has '{shown(tokens[first])}' twice, as {first} and {again}")
    return tokens


def _texts(header: GgufHeader) -> list[str]:
    texts = header.texts(KEY + "tokens")
    if not texts:
        raise unreadable(header.path, f"it has no {KEY}tokens")
    return texts


def _types(header: GgufHeader, count: int) -> np.ndarray:
    """The type of each token."""
    found = header.numbers(KEY + "token_type")
    if found is None:
        return np.full(count, NORMAL)
    if len(found) < count:
        raise unreadable(header.path, f"{KEY}token_type has {len(found)} entries for {count} tokens")
    return found[:count]


def _added(header: GgufHeader, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens that are found in text before it is split."""
    types = _types(header, len(tokens))
    named = [special_id(header, name) for name in (*ENDS, "bos_token_id")]
    special = set(np.flatnonzero((types == CONTROL) | (types == UNKNOWN)).tolist())
    special |= {each for each in named if each is not None}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ids: list[int] = sorted(special | set(np.flatnonzero(types == USER_DEFINED).tolist()))
    return [{"id": each, "content": tokens[each], **flags, "special": each in special} for each in ids]


def _config(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens' texts, and the template or templates."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in SPECIALS.items():
        number = special_id(header, key)
        if number is not None:
            found[name] = tokens[number]
    templates = {"default": header.text(TEMPLATE)} | {
        key.removeprefix(TEMPLATE + "."): header.text(key) for key in header.values if key.startswith(TEMPLATE + ".")
    }
    named = [{"name": name, "template": template} for name, template in templates.items() if template]
    if named:
        found["chat_template"] = named if len(named) > 1 or named[0]["name"] != "default" else named[0]["template"]
    return found


def _byte_level(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    """Byte-level BPE, whose splits have a name."""
    splits = _splits(header)
    model = _bpe(tokens, _merges(header), ignore_merges=splits.whole_words)
    return {
        "normalizer": None,
        "pre_tokenizer": splits.json(),
        "post_processor": _bos(header, tokens, otherwise=splits.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _splits(header: GgufHeader) -> Splits:
    name = header.text(KEY + "pre") or "default"
    found = SPLITS.get(name)
    if found is None:
        raise ModelRefused(
            f"{header.path}: its tokenizer splits text as '{shown(name)}' ({KEY}pre), which is not known here: put the "
            "original's tokenizer.json, tokenizer_config.json and config.json into the file's directory"
        )
    return found


def _merges(header: GgufHeader) -> list[list[str]]:
    """The pairs, best first."""
    merges = header.texts(KEY + "merges")
    if merges is None:
        raise unreadable(header.path, f"it has no {KEY}merges")
    pairs = [merge.split(" ") for merge in merges]
    odd = next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if odd is not None:
        raise unreadable(header.path, f"{KEY}merges has '{shown(odd)}', which is no pair")
    return pairs


def _sentencepiece(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    """SentencePiece's BPE: pairs merge by the score of what they make; characters without a token are bytes."""
    prefix = header.values.get(KEY + "add_space_prefix", True) is not False
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    steps = [{"type": "Prepend", "prepend": BLANK}, blanks] if prefix else [blanks]
    scores = header.numbers(KEY + "scores")
    if scores is None or len(scores) < len(tokens):
        raise unreadable(header.path, f"{KEY}scores is missing or too short for {len(tokens)} tokens")
    normal = _types(header, len(tokens)) == NORMAL
    unknown = special_id(header, "unknown_token_id")
    try:
        merges = merges_by_score(tokens, scores, normal)
    except ValueError as error:
        raise unreadable(header.path, str(error)) from error
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _bos(header, tokens, otherwise=True),
        "decoder": _fallback_decoder(strips=prefix),
        "model": _bpe(
            tokens,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        ),
    }


def merges_by_score(tokens: Sequence[str], scores: np.ndarray, normal: np.ndarray) -> list[list[str]]:
    """Every pair of tokens that makes a third, the highest score first: the order in which SentencePiece merges.

    `normal`: which tokens take part [len(tokens)]. ValueError if there are more than `MOST_MERGES`.
    """
    order = np.flatnonzero(normal)
    order = order[np.argsort(-scores[order], kind="stable")]
    known = {tokens[each] for each in np.flatnonzero(normal).tolist()}
    found = []
    for token in (tokens[each] for each in order.tolist()):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in known and right in known:
                found.append([left, right])
        if len(found) > MOST_MERGES:
            raise ValueError(f"more than {MOST_MERGES:,} pairs of its tokens make a third")
    return found


def _gemma4(header: GgufHeader, tokens: Sequence[str]) -> dict[str, Any]:
    """Gemma 4's: merges in the file, blanks as ▁, no bytes but by fallback, and a text is cut at its newlines."""
    unknown = special_id(header, "unknown_token_id")
    split = {"type": "Split", "pattern": {"Regex": r"[^\n]+|\n+"}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
        "pre_tokenizer": split,
        "post_processor": None,  # the template writes the token that begins a prompt
        "decoder": _fallback_decoder(strips=False),
        "model": _bpe(
            tokens,
            _merges(header),
            unk_token=None if unknown is None else tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        ),
    }


def _bpe(tokens: Sequence[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """The model of tokenizer.json."""
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def _fallback_decoder(*, strips: bool) -> dict[str, Any]:
    """▁ is a blank, bytes are joined; the blank that was put before a text goes."""
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"type": "Sequence", "decoders": [*parts, strip] if strips else parts}


def _bos(header: GgufHeader, tokens: Sequence[str], *, otherwise: bool) -> dict[str, Any] | None:
    """What puts the first token before a prompt: where the file says so, or `otherwise` if it says nothing."""
    number = special_id(header, "bos_token_id")
    wanted = header.values.get(KEY + "add_bos_token", otherwise)
    if number is None or wanted is False:
        return None
    token = tokens[number]
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
