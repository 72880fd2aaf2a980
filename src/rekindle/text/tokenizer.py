"""tokenizer.json as a tokenizer of plain text.

Owns the file's added tokens and a `tokenizers` object made from the file without its control tokens, without the space
some tokenizers put before a text (`normalise` writes that space out), without post-processing. Loading such a file
renumbers the added tokens that stay, silently: their ids are mapped back by content, and all ids are compared with the
file's at load. The object is never changed afterwards, so any thread may encode.

Text is comparable in bytes if the tokenizer leaves it alone, composes it (NFC) or writes spaces as ▁. Any other
tokenizer, and any that does not reproduce a set of probes, is `opaque`: compared by ids only.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, normalizers

from rekindle.errors import BadRequest, ModelRefused
from rekindle.text import splitters
from rekindle.text.messages import GUARD
from rekindle.text.template import special_token_names
from rekindle.text.vocabulary import BLANK, AddedToken, ControlTokens, Vocabulary
from rekindle.worker import is_meant_for_thread

# none: no space is added. first: before the first text of a prompt. each: before every text that has none.
# prepend: before every text.
Prefix = Literal["none", "first", "each", "prepend"]
FILE_NAME = "tokenizer.json"
COMPOSED_CHARS = 1 << 15  # normalised at a time, in milliseconds
MOST_COMBINING = 1 << 15  # in a row; texts have up to 30
_SCHEMES: Mapping[str, Prefix] = {"always": "each", "first": "first", "never": "none"}
_PROBES = (
    "Hello world, it's 2024-05-06 and 1234567 is a number.",
    "  two  blanks\n\n\n\tand tabs \r\n trailing  ",
    "naïve café Ünïcödé 日本語テキスト русский العربية 한국어 ﷺ Ω",
    "🙂👩‍👩‍👧🏽 emoji, e\u0301 combining, \u00a0 nbsp, \u3000 wide, \x00\x01 control",
    "def f(x):\n        return {'a': [1, 2.5e-3]} # <b>&amp;</b> </s> [INST] _under_ ##hash\n" + " " * 17 + "end",
    "a▁b ▁ __",
)


class TokenizerFile:
    """The content of tokenizer.json: its JSON, the digest of its bytes, words and added tokens with their true ids."""

    def __init__(self, data: bytes) -> None:
        try:
            self.json: dict[str, Any] = json.loads(data)
            self.added = tuple(AddedToken.from_json(entry) for entry in self.json.get("added_tokens") or ())
            self.words = _model_words(self.json["model"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelRefused(f"{FILE_NAME} cannot be read: {type(error).__name__}: {error}") from error
        self.digest = hashlib.blake2b(data, digest_size=32).digest()

    @classmethod
    def from_dir(cls, directory: Path) -> TokenizerFile:
        return cls(_content(directory))

    def text_only(self, controls: Sequence[AddedToken]) -> bytes:
        """The JSON of a tokenizer without its control tokens, space before a text, post-processor, cuts and padding.

        To be called once: words and merges leave `json` with it. Of 262,144 words they would take 180 MiB while the
        library reads them.
        """
        written = json.dumps(_text_only(self.json, {token.content for token in controls})).encode()
        self.json["model"] = {"type": self.json["model"]["type"]}
        return written

    def leading_ids(self) -> tuple[int, ...]:
        """The tokens the post-processor puts before a sequence."""
        ids: list[int] = []
        for part in _parts(self.json.get("post_processor"), "processors"):
            if part["type"] == "TemplateProcessing":
                for item in part["single"]:
                    if "Sequence" in item:
                        break
                    ids += part["special_tokens"][item["SpecialToken"]["id"]]["ids"]
            elif part["type"] in ("RobertaProcessing", "BertProcessing"):
                ids.append(int(part["cls"][1]))
        return tuple(ids)


class TextTokenizer:
    """Encodes text that holds no control tokens; look-alikes are text."""

    def __init__(self, file: TokenizerFile, controls: Sequence[AddedToken]) -> None:
        data = file.json
        control_ids = {token.id for token in controls}
        self.kept = tuple(token for token in file.added if token.id not in control_ids)
        self.prefix = _prefix(data)
        self._nfc = normalizers.NFC() if "NFC" in _types(data.get("normalizer"), "normalizers") else None
        byte_level = "ByteLevel" in {
            *_types(data.get("pre_tokenizer"), "pretokenizers"),
            *_types(data.get("decoder"), "decoders"),
        }
        self._blank = not byte_level and _writes_blanks(data)
        contents = sorted((re.escape(token.content) for token in self.kept), key=len, reverse=True)
        self._kept_pattern = re.compile(f"({'|'.join(contents)})") if contents else None
        self._tokenizer = _loaded(file.text_only(controls), "cannot be loaded without its control tokens")
        self._true_ids = self._map_ids(file, controls)
        words = {word: token_id for word, token_id in file.words.items() if token_id not in control_ids}
        table = Vocabulary(words, self.kept, controls, byte_level=byte_level)
        self.cuts = splitters.SafeCuts(self._splitter(data), self.kept)
        self.opaque = not (_is_plain(data, self.kept) and self._reproduces_probes(table))
        self.vocabulary = table.as_codes() if self.opaque else table

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each normalised text, uint32, nothing added."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._true_ids[np.asarray(encoding.ids, dtype=np.int64)] for encoding in encodings]

    def normalise(self, text: str, *, at_start: bool) -> str:
        """Return the text between two control tokens as it is compared and encoded, an added space written out.

        `at_start`: it is the first text of the prompt. Opaque tokenizers normalise when they encode.
        """
        text = composed(self._nfc, text) if self._nfc else text
        text = text.replace(BLANK, " ") if self._blank else text
        if self.prefix == "none" or (self.prefix == "first" and not at_start):
            return text
        if self.prefix == "first" or self._kept_pattern is None:
            return self._prefixed(text)
        # Added tokens that are text end a text as well: what follows them gets a space, too.
        parts = self._kept_pattern.split(text)
        return "".join(part if index % 2 else self._prefixed(part) for index, part in enumerate(parts))

    def _prefixed(self, text: str) -> str:
        return " " + text if text and (self.prefix == "prepend" or not text.startswith(" ")) else text

    def _splitter(self, data: Mapping[str, Any]) -> Any:
        known = data["model"]["type"] == "BPE" and splitters.is_known(data.get("pre_tokenizer"))
        return self._tokenizer.pre_tokenizer if known else None

    def _map_ids(self, file: TokenizerFile, controls: Sequence[AddedToken]) -> np.ndarray:
        """Map every id of the library to the file's; checked for the whole vocabulary."""
        true_ids = {**file.words, **{token.content: token.id for token in file.added}}
        for token in controls:
            true_ids[_hidden(token.content)] = true_ids.pop(token.content, token.id)
        given = self._tokenizer.get_vocab(with_added_tokens=True)
        table = np.arange(max(given.values(), default=-1) + 1, dtype=np.uint32)
        for token in self.kept:
            table[given[token.content]] = token.id
        found = table.tolist()
        for word, given_id in given.items():
            if found[given_id] != true_ids.get(word):
                raise ModelRefused(
                    f"{FILE_NAME}: the id of {word!r} is {true_ids.get(word)}, but it encodes as {given_id}"
                )
        return table

    def _reproduces_probes(self, table: Vocabulary) -> bool:
        """Whether the table decodes the ids of texts of all kinds to these texts."""
        probes = [*_PROBES, *(f"x {token.content} y{token.content}" for token in self.kept)]
        texts = [self.normalise(text, at_start=True) for text in probes]
        return all(table.key(ids) == text.encode() for text, ids in zip(texts, self.encode(texts), strict=True))


def composed(nfc: normalizers.Normalizer, text: str, *, size: int = COMPOSED_CHARS) -> str:
    """Return `nfc.normalize_str(text)`, made of pieces of about `size` characters: no other thread runs during one.

    BadRequest for more than any text has of characters that combine with those before them.
    """
    if text.isascii():
        return text
    pieces, start = list[str](), 0
    while start < len(text):
        end = start + size
        while end < len(text) and not stands_apart(text[end]):
            end += 1
            if end - start > size + MOST_COMBINING:
                raise BadRequest(f"the prompt holds more than {MOST_COMBINING:,} combining characters in a row")
        pieces.append(nfc.normalize_str(text[start:end]))
        start = end
    return "".join(pieces)


def stands_apart(char: str) -> bool:
    """Whether a character never composes with what comes before it: none does but marks and a few parts of syllables.

    One that is unknown here may be a mark in a later version of Unicode.
    """
    is_part = "\u1160" <= char <= "\u11ff" or char == "\U00016d67"  # of Hangul, and of Kirat Rai
    return not is_part and unicodedata.category(char) not in ("Mn", "Mc", "Me", "Cn")


def _hidden(content: str) -> str:
    """Change a token to what no text can contain: input never holds the guard."""
    return GUARD + content


def added_tokens(file: TokenizerFile, config: Mapping[str, Any]) -> list[AddedToken]:
    """The file's added tokens; those that the config names as special are special, also if only the model has them."""
    named = set(special_token_names(config).values())
    for entry in ("additional_special_tokens", "extra_special_tokens"):
        values = config.get(entry) or ()
        for value in values.values() if isinstance(values, Mapping) else values:
            named.add(str(value.get("content") if isinstance(value, Mapping) else value))
    flagged = [
        AddedToken(token.id, token.content, True, token.lstrip, token.rstrip, token.single_word, token.normalized)
        if token.content in named
        else token
        for token in file.added
    ]
    added = {token.content for token in file.added}
    extra = [AddedToken(file.words[word], word, True) for word in named - added if word in file.words]
    return sorted([*flagged, *extra], key=lambda token: token.id)


def leading_ids(file: TokenizerFile, config: Mapping[str, Any], controls: ControlTokens) -> tuple[int, ...]:
    """The ids before a completion: from the post-processor, or from `add_bos_token` of the config."""
    leading = file.leading_ids()
    if leading or not config.get("add_bos_token"):
        return leading
    bos = controls.by_content.get(special_token_names(config).get("bos_token", ""))
    return (bos.id,) if bos is not None else ()


def whole_tokenizer(directory: Path) -> Tokenizer:
    """The library's tokenizer of a model directory, its control tokens included; nothing is cut off or filled up.

    ModelRefused if its tokenizer.json is missing or cannot be used.
    """
    tokenizer = _loaded(_content(directory), "cannot be loaded")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _content(directory: Path) -> bytes:
    path = directory / FILE_NAME
    if not path.is_file():
        raise ModelRefused(f"{directory} has no {FILE_NAME}: convert its tokenizer with transformers and save it there")
    return path.read_bytes()


def _loaded(data: bytes, refusal: str) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except BaseException as error:
        # Border: the library raises plain Exception for every malformed file, or panics, which is no Exception.
        if is_meant_for_thread(error):
            raise
        raise ModelRefused(f"{FILE_NAME} {refusal}: {error}") from error


def _model_words(model: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {word: token_id for token_id, (word, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _text_only(data: Mapping[str, Any], controls: set[str]) -> dict[str, Any]:
    """The file's JSON without control tokens, prefix space, post-processor, truncation and padding."""
    result = {**data, "post_processor": None, "truncation": None, "padding": None}
    result["added_tokens"] = [entry for entry in data.get("added_tokens") or () if entry["content"] not in controls]
    result["normalizer"] = _without_prepend(data.get("normalizer"))
    result["pre_tokenizer"] = _without_prefix(data.get("pre_tokenizer"))
    result["model"] = _hide_words(data["model"], controls)
    return result


def _hide_words(model: Mapping[str, Any], controls: set[str]) -> dict[str, Any]:
    """Change the control tokens among the model's words to what text cannot contain; their ids stay."""
    result = dict(model)
    words = model["vocab"]
    if isinstance(words, list):
        result["vocab"] = [[_hidden(word) if word in controls else word, score] for word, score in words]
        return result
    hidden = controls & words.keys()
    result["vocab"] = dict(words)
    for word in hidden:
        result["vocab"][_hidden(word)] = result["vocab"].pop(word)
    if model.get("unk_token") in hidden:
        result["unk_token"] = _hidden(model["unk_token"])
    if hidden and "merges" in model:
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        result["merges"] = [
            [left, right]
            for left, right in pairs
            if left not in hidden and right not in hidden and left + right not in hidden
        ]
    return result


def _parts(value: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """A component's parts, those of nested sequences too."""
    if value is not None and value["type"] == "Sequence":
        for part in value[name]:
            yield from _parts(part, name)
    elif value is not None:
        yield value


def _types(value: Mapping[str, Any] | None, name: str) -> list[str]:
    return [part["type"] for part in _parts(value, name)]


def _prefix(data: Mapping[str, Any]) -> Prefix:
    if "Prepend" in _types(data.get("normalizer"), "normalizers"):
        return "prepend"
    for part in _parts(data.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Metaspace":
            scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space") else "never")
            return _SCHEMES[scheme]
        if part["type"] == "ByteLevel" and part.get("add_prefix_space", True):
            return "each"
    return "none"


def _without_prepend(normalizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    kept = [dict(part) for part in _parts(normalizer, "normalizers") if part["type"] != "Prepend"]
    return {"type": "Sequence", "normalizers": kept} if kept else None


def _without_prefix(pre_tokenizer: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        parts = [_without_prefix(part) for part in pre_tokenizer["pretokenizers"]]
        return {**pre_tokenizer, "pretokenizers": parts}
    if pre_tokenizer["type"] == "Metaspace":
        changed = {name: value for name, value in pre_tokenizer.items() if name != "add_prefix_space"}
        return {**changed, "prepend_scheme": "never"}
    if pre_tokenizer["type"] == "ByteLevel":
        return {**pre_tokenizer, "add_prefix_space": False}
    return dict(pre_tokenizer)


def _is_blank_replace(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Replace" and part.get("pattern") == {"String": " "} and part.get("content") == BLANK


def _writes_blanks(data: Mapping[str, Any]) -> bool:
    replaces = any(_is_blank_replace(part) for part in _parts(data.get("normalizer"), "normalizers"))
    return replaces or "Metaspace" in _types(data.get("pre_tokenizer"), "pretokenizers")


def _is_plain(data: Mapping[str, Any], kept: Sequence[AddedToken]) -> bool:
    """Whether text keeps its bytes: no normaliser but NFC or ▁, no blanks stripped by added tokens."""
    if any(token.lstrip or token.rstrip for token in kept):
        return False
    parts = _parts(data.get("normalizer"), "normalizers")
    return all(part["type"] in ("NFC", "Prepend") or _is_blank_replace(part) for part in parts)
