"""GGUF files that no honest program writes: a small good file, and what is changed in it.

Owns the cases and the random changes of `tools/gguf_fuzz.py`. A number in the place of bytes is a hole of so many zero
bytes, which takes no room on disk.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rekindle_lab.bench.engine.gguf_file import ALIGNMENT, TENSOR_TYPES, VERSION, Tensor, Value, encoded

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = 4, 5, 6, 7, 8, 9, 10, 11, 12
NUMBERS = {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q", INT64: "q", FLOAT64: "d"}
HUGE = 1 << 62
GIB = 1 << 30
Part = bytes | int  # a hole of so many zeros
WORDS, TYPES, SCORES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
TEMPLATE = "tokenizer.chat_template"


def text(value: str | bytes) -> bytes:
    """A text with its length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(kind: int, value: float) -> bytes:
    """A value that is a number."""
    return struct.pack(f"<I{NUMBERS[kind]}", kind, value)


def texts(values: Iterable[str | bytes]) -> bytes:
    """A value that is a list of texts."""
    packed = [text(value) for value in values]
    return struct.pack("<IIQ", ARRAY, STRING, len(packed)) + b"".join(packed)


def numbers(kind: int, values: Sequence[float]) -> bytes:
    """A value that is a list of numbers."""
    return struct.pack(f"<IIQ{len(values)}{NUMBERS[kind]}", ARRAY, kind, len(values), *values)


def valued(value: Value) -> bytes:
    """A value of the kind that files have for it."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, bool | int | float):
        kind = BOOL if isinstance(value, bool) else UINT32 if isinstance(value, int) else FLOAT32
        return number(kind, value)
    if not value or isinstance(value[0], str):
        return texts(each for each in value if isinstance(each, str))
    return numbers(
        INT32 if isinstance(value[0], int) else FLOAT32, [each for each in value if not isinstance(each, str)]
    )


@dataclass
class Placed:
    """An entry of the table of tensors: dimensions as in the file, the fastest first."""

    dimensions: tuple[int, ...]
    kind: int
    offset: int


class Draft:
    """A file before it is written: `values` by keys, `tensors` by names, the tensors' `data`; all may be changed."""

    def __init__(self, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> None:
        self.metadata = dict(metadata)
        self.values: list[tuple[bytes, list[Part]]] = [
            (key.encode(), [valued(value)]) for key, value in metadata.items()
        ]
        self.tensors: list[tuple[bytes, Placed]] = []
        self.data: list[Part] = []
        offset = 0
        for tensor in tensors:
            held = encoded(tensor.values(), tensor.kind)
            held += bytes(-len(held) % ALIGNMENT)
            self.tensors.append((tensor.name.encode(), Placed(tensor.shape[::-1], TENSOR_TYPES[tensor.kind], offset)))
            self.data.append(held)
            offset += len(held)

    @property
    def family(self) -> str:
        """The architecture, with which keys of sizes begin."""
        return str(self.metadata["general.architecture"])

    @property
    def words(self) -> list[str]:
        """The vocabulary of the good file."""
        found = self.metadata[WORDS]
        assert not isinstance(found, str | int | float)
        return [str(word) for word in found]

    def put(self, key: str, *parts: Part) -> None:
        """Give a key another value, or a new one."""
        name = key.replace("~", self.family).encode()
        self.values = [each for each in self.values if each[0] != name] + [(name, list(parts))]

    def place(self, name: str) -> Placed:
        """The entry of a tensor."""
        return next(placed for known, placed in self.tensors if known == name.encode())

    def header(self) -> list[Part]:
        """Everything before the data, without padding."""
        parts: list[Part] = [b"GGUF" + struct.pack("<IQQ", VERSION, len(self.tensors), len(self.values))]
        for key, value in self.values:
            parts += [text(key), *value]
        for name, placed in self.tensors:
            sizes = struct.pack(f"<I{len(placed.dimensions)}Q", len(placed.dimensions), *placed.dimensions)
            parts.append(text(name) + sizes + struct.pack("<IQ", placed.kind, placed.offset))
        return parts

    def write(self, path: Path) -> None:
        """Write the file, with holes for numbers."""
        with path.open("wb") as file:
            for part in self.header():
                _put(file, part)
            _put(file, bytes(-file.tell() % ALIGNMENT))
            for part in self.data:
                _put(file, part)
            file.truncate(file.tell())


def _put(file: BinaryIO, part: Part) -> None:
    if isinstance(part, int):
        file.seek(part, 1)
    else:
        file.write(part)


def _listed(count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, count)


def _template(source: str | bytes) -> Callable[[Draft], None]:
    return lambda draft: draft.put(TEMPLATE, struct.pack("<I", STRING) + text(source))


def _words(change: Callable[[list[str]], list[str]]) -> Callable[[Draft], None]:
    def changed(draft: Draft) -> None:
        found = change(draft.words)
        draft.put(WORDS, texts(found))
        draft.put(TYPES, numbers(INT32, [1] * len(found)))

    return changed


def _as_sentencepiece(words: Sequence[str]) -> Callable[[Draft], None]:
    def changed(draft: Draft) -> None:
        draft.put("tokenizer.ggml.model", struct.pack("<I", STRING) + text("llama"))
        draft.put(WORDS, texts(words))
        draft.put(TYPES, numbers(INT32, [1] * len(words)))
        draft.put(SCORES, numbers(FLOAT32, [0.0] * len(words)))

    return changed


def _sized(key: str, kind: int, value: float) -> Callable[[Draft], None]:
    return lambda draft: draft.put(key, number(kind, value))


def _shaped(name: str, dimensions: tuple[int, ...], kind: int = 0) -> Callable[[Draft], None]:
    def changed(draft: Draft) -> None:
        placed = draft.place(name)
        placed.dimensions, placed.kind = dimensions, kind

    return changed


def _repeat_tensors(draft: Draft) -> None:
    """65,536 tensors that are one."""
    first = draft.tensors[0][1]
    draft.tensors += [(f"blk.{at}.attn_q.weight".encode(), first) for at in range(100, 65_636)]


def _move(draft: Draft) -> None:
    """A tensor that begins inside another."""
    draft.tensors[1][1].offset = draft.tensors[0][1].offset + ALIGNMENT


EMBEDDING = "token_embd.weight"
CASES: dict[str, Callable[[Draft], None]] = {
    "nothing changed": lambda draft: None,
    # lengths and counts
    "words, a billion of them": lambda d: d.put(WORDS, _listed(1 << 30), 8 << 30),
    "words, 200 million": lambda d: d.put(WORDS, _listed(200_000_000), 1_600_000_000),
    "words, 2^62": lambda d: d.put(WORDS, _listed(HUGE)),
    "words, none": lambda d: d.put(WORDS, _listed(0)),
    "words, one of 64 GiB": lambda d: d.put(WORDS, _listed(1) + struct.pack("<Q", 64 * GIB), 64 * GIB),
    "words, half a million": _words(lambda w: w + [f"w{at}" for at in range(500_000)]),
    "words, one of 8 MiB": _words(lambda w: [*w[:-1], "x" * (8 << 20)]),
    "words, twice": _words(lambda w: [*w[:-1], w[0]]),
    "words of surrogates": _words(lambda w: [*w[:-1], "\x00\x1b[31m"]),
    "SentencePiece, a word of 8 MiB": _as_sentencepiece(["<unk>", "a", "aa", "a" * (8 << 20)]),
    "SentencePiece, thousand words of 64 KiB": _as_sentencepiece(
        ["<unk>", "a", *(f"{at}{'a' * (1 << 16)}" for at in range(1000))]
    ),
    "SentencePiece, words of a": _as_sentencepiece(["<unk>", *("a" * at for at in range(1, 6000))]),
    "a text of 64 GiB": lambda d: d.put("general.name", struct.pack("<IQ", STRING, 64 * GIB), 64 * GIB),
    "a text of 2 GiB": lambda d: d.put("general.name", struct.pack("<IQ", STRING, 2 * GIB), 2 * GIB),
    "a text of 2^62": lambda d: d.put("general.name", struct.pack("<IQ", STRING, HUGE)),
    "numbers, eight billion": lambda d: d.put("x.y", struct.pack("<IIQ", ARRAY, 0, 8 * GIB), 8 * GIB),
    "numbers, 2^62": lambda d: d.put("x.y", struct.pack("<IIQ", ARRAY, UINT64, HUGE)),
    "nested lists": lambda d: d.put("x.y", struct.pack("<IIQIQ", ARRAY, ARRAY, 1, ARRAY, 1) * 1000),
    "keys, 20,000": lambda d: d.values.extend((f"x.{at}".encode(), [number(UINT32, 0)]) for at in range(20_000)),
    # tensors
    "tensors, 140,000": lambda d: d.tensors.extend((f"x{at}".encode(), Placed((), 0, 0)) for at in range(140_000)),
    "tensors, one 65,536 times": _repeat_tensors,
    "tensors that overlap": _move,
    "tensor of no rows": _shaped(EMBEDDING, (64, 0)),
    "tensor of no columns and 2^62 rows": _shaped(EMBEDDING, (0, HUGE)),
    "tensor of no dimensions": _shaped(EMBEDDING, ()),
    "tensor of one dimension": _shaped(EMBEDDING, (64,)),
    "tensor of four dimensions": _shaped(EMBEDDING, (2, 2, 2, 2)),
    "tensor of zeros, no rows of 2^62": _shaped("blk.0.attn_q.weight", (HUGE, 0)),
    "tensor with factors of zero": lambda d: d.tensors.append((b"rope_freqs.weight", Placed((0, HUGE), 0, 0))),
    **{
        f"tensor of the type {kind}": _shaped(EMBEDDING, (256, 2), kind)
        for kind in (2, 9, 15, 16, 24, 27, 28, 34, 39, 40, 41, 99)
    },
    **{
        f"layer's tensor of the type {kind}": _shaped("blk.0.attn_q.weight", (64, 64), kind)
        for kind in (24, 27, 28, 2, 40)
    },
    "embedding missing": lambda d: d.tensors.pop(
        next(i for i, t in enumerate(d.tensors) if t[0] == EMBEDDING.encode())
    ),
    "tensors, none": lambda d: d.tensors.clear(),
    # sizes
    **{
        f"{key} {kind} {value}": _sized(f"~.{key}", kind, value)
        for key in (
            *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
            *("attention.head_count_kv", "attention.key_length", "rope.dimension_count", "rope.freq_base"),
            *("attention.layer_norm_rms_epsilon", "vocab_size", "rope.scaling.factor", "expert_count"),
            *("attention.sliding_window", "attention.sliding_window_pattern"),
        )
        for kind, value in (
            *((UINT32, 0), (UINT32, 0xFFFFFFFF), (UINT64, HUGE), (INT64, -1), (FLOAT64, float("nan"))),
            *((FLOAT64, float("inf")), (FLOAT64, 0.5)),
        )
    },
    "layers of Gemma, four billion": lambda d: (
        d.put("general.architecture", struct.pack("<I", STRING) + text("gemma3")),
        d.put("gemma3.block_count", number(UINT32, 0xFFFFFFFF)),
    ),
    # ids
    **{
        f"{name} {kind} {value}": _sized(f"tokenizer.ggml.{name}", kind, value)
        for name in ("eos_token_id", "bos_token_id", "padding_token_id")
        for kind, value in (
            (UINT64, HUGE),
            (INT64, -1),
            (FLOAT64, float("nan")),
            (FLOAT64, float("inf")),
            (FLOAT32, 1.5),
        )
    },
    **{f"sampling {value}": _sized("general.sampling.temp", FLOAT64, value) for value in (float("nan"), -1.0, 1e300)},
    **{f"sampling top_k {value}": _sized("general.sampling.top_k", INT64, value) for value in (-HUGE, HUGE)},
    "sampling penalty 0": _sized("general.sampling.penalty_repeat", FLOAT64, 0.0),
    "alignment 2^62": _sized("general.alignment", UINT64, HUGE),
    # merges
    "merges of unknown words": lambda d: d.put(MERGES, texts(["zzzz yyyy", "qqq www"])),
    "merges that are no pairs": lambda d: d.put(MERGES, texts(["a b c", "a"])),
    "merges, three million": lambda d: d.put(MERGES, _listed(3_000_000) + text("a b") * 3_000_000),
    "merges, empty": lambda d: d.put(MERGES, texts([])),
    "merges of nothing": lambda d: d.put(MERGES, texts([" "])),
    "types of words, of another kind": lambda d: d.put(TYPES, texts(["a"])),
    "types of words, too few": lambda d: d.put(TYPES, numbers(INT32, [1])),
    "types of words, all control": lambda d: d.put(TYPES, numbers(INT32, [3] * len(d.words))),
    "types of words, floats": lambda d: d.put(TYPES, numbers(FLOAT64, [float("nan")] * len(d.words))),
    # templates
    "template that never ends": _template(
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}"
    ),
    "template that doubles": _template(
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "template that multiplies": _template("{{ 'ab' * 10000000000 }}"),
    "template that raises to a power": _template("{{ 9 ** 9 ** 9 }}"),
    "template that recurses": _template("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    "template that pads": _template("{{ '%1000000000d' % 1 }}"),
    "template that reaches out": _template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template that includes": _template("{% include '/etc/passwd' %}{% import 'os' as os %}"),
    "template of 100 MB": _template("x" * 100_000_000),
    "template of 100 MB of loops": _template("{% for a in b %}x{% endfor %}" * 3_200_000),
    "template, nested": _template("{% if a %}" * 5000 + "{% endif %}" * 5000),
    "template, brackets": _template("{{ " + "(" * 50_000 + ")" * 50_000 + " }}"),
    "template, filters": _template("{{ x" + "|trim" * 50_000 + " }}"),
    "template, a number of digits": _template("{{ " + "9" * 500_000 + " }}"),
    "template, a list of lists": _template("{{ " + "[" * 20_000 + "]" * 20_000 + " }}"),
    "template, sums": _template("{{ 1" + "+1" * 100_000 + " }}"),
    "template, strings": _template("{{ 'a'" + "~'a'" * 50_000 + " }}"),
    "template, literals": _template("".join(f"{{{{ '{at:x}' }}}}" for at in range(30_000))),
    "template that is no text": _template(b"\xff\xfe{{ \x00 }}"),
    "templates, thousands": lambda d: d.values.extend(
        (f"{TEMPLATE}.{at}".encode(), [struct.pack("<I", STRING) + text("{{ messages }}" * 1000)]) for at in range(3000)
    ),
    "template named as a folder": lambda d: d.put(f"{TEMPLATE}.../../x", struct.pack("<I", STRING) + text("{{ 1 }}")),
    # names
    "architecture, a path": lambda d: d.put("general.architecture", struct.pack("<I", STRING) + text("../../etc")),
    "architecture, a number": _sized("general.architecture", UINT32, 7),
    "splits, unknown": lambda d: d.put("tokenizer.ggml.pre", struct.pack("<I", STRING) + text("\x1b[31m" * 1000)),
}


HOSTILE: tuple[Callable[[random.Random], bytes], ...] = (
    lambda c: number(c.choice((UINT32, UINT64)), c.choice((0, 1, 2, 7, 0x7FFFFFFF, 0xFFFFFFFF))),
    lambda c: number(INT64, c.choice((-1, -HUGE, HUGE))),
    lambda c: number(FLOAT64, c.choice((float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 0.5, 1e308, 5e-324))),
    lambda c: number(BOOL, c.random() < 0.5),
    lambda c: struct.pack("<I", STRING) + text(c.choice(("", "x" * 100_000, "\x00", "llama", "qwen2", "gpt2", "{{"))),
    lambda c: texts([c.choice(("", "a", "a b", "\x1b[0m"))] * c.choice((0, 1, 1000))),
    lambda c: numbers(c.choice((INT32, FLOAT32, UINT64)), [c.choice((0, 1, 3))] * c.choice((0, 1, 2, 64, 1000))),
)


def mutated(draft: Draft, chance: random.Random) -> str:
    """Change a good file at random; say what was changed."""
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        what = chance.randrange(4)
        if what <= 1:
            at = chance.randrange(len(draft.values))
            key = draft.values[at][0]
            draft.values[at] = (key, [chance.choice(HOSTILE)(chance)])
            done.append(f"value of {key.decode()}")
        elif what == 2:
            name, placed = chance.choice(draft.tensors)
            size = (0, 1, 2, 3, 32, 64, 256, 1 << 31, HUGE)
            match chance.randrange(3):
                case 0:
                    placed.dimensions = tuple(chance.choice(size) for _ in range(chance.randrange(5)))
                case 1:
                    placed.kind = chance.randrange(45)
                case _:
                    placed.offset = chance.choice((0, 1, 31, 64, 1 << 40, HUGE, (1 << 64) - 1))
            done.append(f"tensor {name.decode()}")
        else:
            at = chance.randrange(len(draft.values))
            key, parts = draft.values[at]
            held = bytearray(b"".join(part for part in parts if isinstance(part, bytes)))
            for _ in range(chance.choice((1, 1, 4))):
                held[chance.randrange(min(len(held), 4096))] ^= 1 << chance.randrange(8)
            draft.values[at] = (key, [bytes(held)])
            done.append(f"bits of {key.decode()}")
    return ", ".join(done)
