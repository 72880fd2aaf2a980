"""The header of a GGUF file: what is read, and what of a damaged or hostile one is refused before it costs anything."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.errors import ModelRefused
from rekindle.model.gguf_header import GgufHeader
from rekindle_lab.bench.engine.gguf_file import Tensor, write_file

UINT32, STRING, ARRAY, FLOAT64 = 4, 8, 9, 12


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    *entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, counts: tuple[int, int] = (-1, -1)
) -> bytes:
    given = (len(tensors), len(entries))
    numbers = [own if claimed < 0 else claimed for own, claimed in zip(given, counts, strict=True)]
    return b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join((*entries, *tensors))


def read(tmp_path: Path, data: bytes) -> GgufHeader:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return GgufHeader.read(path)


def test_every_kind_of_value_and_the_tensors(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "a.flag": True,
        "a.count": 7,
        "a.scale": 0.5,
        "a.words": ["ein", "Größe", ""],
        "a.ids": [1, -2, 3],
        "a.scores": [0.25, -1.5],
    }
    data = np.arange(96, dtype=np.float32).reshape(3, 32)
    tensors = [
        Tensor("first", (3, 32), "f32", lambda: data),
        Tensor("second", (2, 64), "q8_0", lambda: np.ones((2, 64))),
    ]
    write_file(tmp_path / "m.gguf", values, tensors)
    found = GgufHeader.read(tmp_path / "m.gguf")
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.values.items()}
    assert plain == values
    assert [(each.name, each.shape, each.type.name, each.num_values) for each in found.tensors] == [
        ("first", (3, 32), "F32", 96),
        ("second", (2, 64), "Q8_0", 128),
    ]
    assert found.floats(found.tensors[0]).tolist() == data.ravel().tolist()
    assert [each.end - each.begin for each in found.tensors] == [384, 4 * 34]
    assert (found.text("general.architecture"), found.number("a.count"), found.texts("a.none")) == ("llama", 7, None)
    for ask, words in ((found.text, "a text"), (found.number, "a number"), (found.numbers, "a list of numbers")):
        with pytest.raises(ModelRefused, match=f"a.words is not {words}"):
            ask("a.words")
    with pytest.raises(ModelRefused, match=r"a\.flag is not a number"):
        found.number("a.flag")


def test_the_digest_is_of_the_header_alone(tmp_path: Path) -> None:
    one = header(entry("a", UINT32, struct.pack("<I", 1)), tensors=(tensor("t", (4,)),))
    padded = one + bytes(-len(one) % 32)
    first = read(tmp_path, padded + bytes(16)).digest
    assert read(tmp_path, padded + b"x" * 16).digest == first
    other = header(entry("a", UINT32, struct.pack("<I", 2)), tensors=(tensor("t", (4,)),))
    assert read(tmp_path, other + bytes(-len(other) % 32) + bytes(16)).digest != first


WHOLE = header(
    entry("general.architecture", STRING, text("llama")),
    entry("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("b") + text("c")),
    entry("ids", ARRAY, struct.pack("<IQ3I", UINT32, 3, 1, 2, 3)),
    tensors=(tensor("t", (4,)),),
)


@pytest.mark.parametrize("size", range(4, len(WHOLE)))
def test_a_file_that_is_cut_anywhere_is_refused_with_words(tmp_path: Path, size: int) -> None:
    with pytest.raises(ModelRefused, match=r"m.gguf cannot be read: it (is cut short|claims .* bytes left)"):
        read(tmp_path, WHOLE[:size])


HUGE = 1 << 62


def test_tensors_do_not_share_bytes(tmp_path: Path) -> None:
    for offset in (32, 60):  # of a second tensor, while the first has 64 bytes
        data = header(tensors=(tensor("a", (16,)), tensor("b", (16,), offset=offset)))
        with pytest.raises(ModelRefused, match="the tensors a and b have bytes in common"):
            read(tmp_path, data + bytes(200))
    data = header(tensors=(tensor("a", (16,), offset=64), tensor("b", (16,))))
    assert [each.name for each in read(tmp_path, data + bytes(200)).tensors] == ["a", "b"]


def test_numbers_are_finite(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ModelRefused, match=f"k is {value}, which is no size"):
            read(tmp_path, header(entry("k", FLOAT64, struct.pack("<d", value)))).number("k")


LISTED = struct.pack("<IQ", STRING, 1 << 20)
SPARSE = 64 << 30  # bytes that take no room on disk


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            header(entry("k", ARRAY, struct.pack("<IQ", STRING, 1 << 30))),
            r"1,073,741,824 texts in k: at most 2,097,152",
        ),
        (header(entry("k", ARRAY, struct.pack("<IQ", UINT32, 1 << 33))), "8,589,934,592 numbers in k: at most"),
        (header(entry("k", STRING, struct.pack("<Q", 1 << 32))), "header is longer than 128 MiB, with k"),
        (header(*(entry(key, ARRAY, LISTED + bytes(8 << 20)) for key in "abc")), "lists have 3,145,728 texts"),
        (header(counts=(0, 1 << 20)), "1,048,576 values: at most 16,384"),
        (header(counts=(1 << 20, 0)), "1,048,576 tensors: at most 131,072"),
    ],
)
def test_a_sparse_file_is_not_read_for_as_long_as_it_is(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    os.truncate(path, SPARSE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelRefused, match=words):
        GgufHeader.read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "begins with b''"),
        (b"version https://git-lfs.github.com/spec/v1", r"begins with b'vers'.*Git LFS pointer"),
        (header(version=1), "its version is 1; GGUF files of version 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(counts=(0, HUGE)), "claims .* values, and has 0 bytes left"),
        (header(counts=(HUGE, 0)), "claims .* tensors, and has"),
        (header(entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE))), "claims .* texts in k, and has 0 bytes left"),
        (header(entry("k", ARRAY, struct.pack("<IQ", UINT32, HUGE))), "claims .* numbers in k"),
        (header(entry("k", STRING, struct.pack("<Q", HUGE))), "cut short inside k"),
        (header(entry("k", ARRAY, struct.pack("<IQ", STRING, 1) + struct.pack("<Q", HUGE))), "cut short inside k"),
        (header(entry("k", 77, b"")), "k has a value of kind 77"),
        (header(entry("k", ARRAY, struct.pack("<IQ", ARRAY, 0))), "k is a list of values of kind 9"),
        (header(*[entry("k", UINT32, bytes(4))] * 2), "it has k twice"),
        (header(tensors=(tensor("t", (1,)),) * 2), "two tensors of one name"),
        (header(tensors=(tensor("t", (HUGE, 0)),)), "the tensor t has a dimension of 0"),
        (header(tensors=(tensor("t", (1, 1, 1, 1, 1)),)), "t has 5 dimensions"),
        (header(tensors=(tensor("t", (1,), kind=99),)), "t has the type 99"),
        (header(tensors=(tensor("t", (33,), kind=8),)), "rows of 33 values: Q8_0 needs a multiple of 32"),
        (header(tensors=(tensor("t", (HUGE, HUGE)),)), "cut short: the tensor t ends at byte"),
        (header(tensors=(tensor("t", (1,), offset=HUGE),)), "cut short: the tensor t ends at byte"),
        (
            header(entry("general.alignment", UINT32, struct.pack("<I", 0)), tensors=(tensor("t", (1,)),)),
            "power of two",
        ),
        (header(*[entry("\x1b[31m\nred", UINT32, bytes(4))] * 2), r"it has \\x1b\[31m\\nred twice"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelRefused, match=words) as caught:
        read(tmp_path, data)
    assert "\x1b" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000, "nothing is allocated for a claim"
