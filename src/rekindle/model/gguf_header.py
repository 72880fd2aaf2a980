"""The header of a GGUF file: its values by key, and the table of its tensors. No tensor is read.

Owns the container's layout (versions 2 and 3, little-endian) and the sizes of GGML's types. Nothing that a file claims
is believed: counts and lengths are compared with the bytes that are left before anything is allocated, every tensor has
to end inside the file and to have its bytes for itself, and names appear in errors with their control characters
escaped. A file can be sparse, so its length bounds nothing: how long a header may be, and how much it may list, is
bounded here. Does not know what keys mean.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import ModelRefused

Value = str | bool | int | float | list[str] | np.ndarray

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {  # kinds of values: (struct, numpy)
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    7: ("<?", "?"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT, MOST_DIMENSIONS = 32, 4
MOST_KEY_CHARS = 200  # of a name in an error
LEAST_VALUE_BYTES, LEAST_TENSOR_BYTES = 13, 24  # of an entry in the header: an empty name and the smallest value
# Gemma's 262,144 tokens with their merges take 19 MB; a mixture with a tensor for each expert has 46,000 tensors.
MOST_HEADER_BYTES, MOST_TEXTS, MOST_VALUES, MOST_TENSORS = 128 << 20, 1 << 21, 1 << 14, 1 << 17
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """How values are stored: `block_bytes` for each `block_values` of a row."""

    name: str
    block_values: int
    block_bytes: int


# By the number in a file, as ggml.h lists them.
TYPES: Mapping[int, TensorType] = {
    number: TensorType(name, values, size)
    for number, name, values, size in (
        *((0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22)),
        *((7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84)),
        *((11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210)),
        *((15, "Q8_K", 256, 292), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98)),
        *((19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82)),
        *((23, "IQ4_XS", 256, 136), (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8)),
        *((28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54)),
        *((35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18)),
    )
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: `shape` as in torch, the slowest dimension first; its bytes are [begin, end) of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    begin: int
    end: int

    @property
    def num_values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What is before the tensors: arrays of numbers as numpy's, of texts as lists. `digest`: of all these bytes."""

    path: Path
    values: Mapping[str, Value]
    tensors: tuple[TensorEntry, ...]
    digest: str

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read it, 0.2 s for 262,144 tokens; ModelRefused if the file is none, is cut short or contradicts itself."""
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise unreadable(path, f"it begins with {start!r} where a GGUF file has {MAGIC!r} (a Git LFS pointer?)")
            size = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), min(size, MOST_HEADER_BYTES), access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()

    def text(self, key: str) -> str | None:
        """The text under a key; None if there is none. ModelRefused if it is of another kind, as below."""
        return self._of_kind(key, str, "a text")

    def number(self, key: str) -> float | None:
        """The number under a key, which is finite."""
        value: float | None = self._of_kind(key, (int, float), "a number")
        if value is not None and not math.isfinite(value):
            raise unreadable(self.path, f"{shown(key)} is {value}, which is no size and no factor")
        return value

    def texts(self, key: str) -> list[str] | None:
        """The list of texts under a key."""
        return self._of_kind(key, list, "a list of texts")

    def numbers(self, key: str) -> np.ndarray | None:
        """The list of numbers under a key."""
        return self._of_kind(key, np.ndarray, "a list of numbers")

    def tensor(self, name: str) -> TensorEntry | None:
        """The tensor of a name; None if there is none."""
        return next((each for each in self.tensors if each.name == name), None)

    def floats(self, tensor: TensorEntry) -> np.ndarray:
        """The values of a tensor of F32, flat; ModelRefused for other types."""
        if tensor.type.name != "F32":
            raise unreadable(self.path, f"the tensor {shown(tensor.name)} is {tensor.type.name} where F32 is expected")
        return np.fromfile(self.path, dtype="<f4", count=tensor.num_values, offset=tensor.begin)

    def _of_kind(self, key: str, kind: type | tuple[type, ...], words: str) -> Any:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise unreadable(self.path, f"{shown(key)} is not {words}")
        return value


class _Reader:
    """A position in the first bytes of a file that has `size` of them."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._end = len(data)
        self._at = len(MAGIC)
        self._num_texts = 0  # in all lists

    def header(self) -> GgufHeader:
        """Read everything before the tensors' bytes."""
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            why = "it is big-endian" if version in {each << 24 for each in VERSIONS} else f"its version is {version}"
            raise unreadable(self._path, f"{why}; GGUF files of version 2 and 3 are read, little-endian")
        num_tensors = self._count(LEAST_TENSOR_BYTES, "tensors", most=MOST_TENSORS)
        num_values = self._count(LEAST_VALUE_BYTES, "values", most=MOST_VALUES)
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._text("a key")
            if key in values:
                raise unreadable(self._path, f"it has {shown(key)} twice")
            values[key] = self._value(key)
        table = [self._tensor() for _ in range(num_tensors)]
        end = self._at
        if len({name for name, *_ in table}) < num_tensors:
            raise unreadable(self._path, "it has two tensors of one name")
        first = self._first_byte(values)
        tensors = tuple(self._placed(each, first) for each in table)
        self._check_apart(tensors)
        return GgufHeader(self._path, values, tensors, hashlib.blake2b(self._data[:end], digest_size=32).hexdigest())

    def _first_byte(self, values: Mapping[str, Value]) -> int:
        """Where the tensors' bytes begin."""
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise unreadable(self._path, "general.alignment is not a power of two")
        return -(-self._at // alignment) * alignment

    def _check_apart(self, tensors: tuple[TensorEntry, ...]) -> None:
        """Refuse bytes that are in two tensors: thousands of them could be one, each as large as the file."""
        placed = sorted(tensors, key=lambda each: each.begin)
        for one, next_one in pairwise(placed):
            if next_one.begin < one.end:
                raise unreadable(
                    self._path, f"the tensors {shown(one.name)} and {shown(next_one.name)} have bytes in common"
                )

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and offset."""
        name = self._text("a tensor's name")
        num_dimensions = self._number("<I", f"the shape of {shown(name)}")
        if num_dimensions > MOST_DIMENSIONS:
            raise unreadable(self._path, f"the tensor {shown(name)} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q", f"the shape of {shown(name)}") for _ in range(num_dimensions))
        if 0 in shape:
            raise unreadable(self._path, f"the tensor {shown(name)} has a dimension of 0")
        return name, shape[::-1], self._number("<I", "a type"), self._number("<Q", "an offset")

    def _placed(self, entry: tuple[str, tuple[int, ...], int, int], first: int) -> TensorEntry:
        name, shape, number, offset = entry
        kind = TYPES.get(number)
        if kind is None:
            raise unreadable(self._path, f"the tensor {shown(name)} has the type {number}, which is not known here")
        row = shape[-1] if shape else 1
        if row % kind.block_values:
            raise unreadable(
                self._path,
                f"the tensor {shown(name)} has rows of {row} values: {kind.name} needs a multiple of "
                f"{kind.block_values}",
            )
        begin = first + offset
        end = begin + math.prod(shape) // kind.block_values * kind.block_bytes
        if end > self._size:
            raise unreadable(
                self._path,
                f"it is cut short: the tensor {shown(name)} ends at byte {end:,}, and the file has {self._size:,}",
            )
        return TensorEntry(name, shape, kind, begin, end)

    def _value(self, key: str) -> Value:
        kind = self._number("<I", f"the kind of {shown(key)}")
        if kind == STRING:
            return self._text(shown(key))
        if kind in NUMBERS:
            return self._number(NUMBERS[kind][0], shown(key))
        if kind != ARRAY:
            raise unreadable(self._path, f"{shown(key)} has a value of kind {kind}, which is not known here")
        kind = self._number("<I", f"the kind of {shown(key)}")
        if kind == STRING:
            self._num_texts += (count := self._count(_LENGTH.size, f"texts in {shown(key)}", most=MOST_TEXTS))
            if self._num_texts > MOST_TEXTS:
                raise unreadable(self._path, f"its lists have {self._num_texts:,} texts: {MOST_TEXTS:,} are read")
            return self._texts(count, key)
        if kind not in NUMBERS:
            raise unreadable(self._path, f"{shown(key)} is a list of values of kind {kind}, which is not known here")
        dtype = np.dtype(NUMBERS[kind][1])
        count = self._count(dtype.itemsize, f"numbers in {shown(key)}")
        return np.frombuffer(self._taken(count * dtype.itemsize, shown(key)), dtype)

    def _texts(self, count: int, key: str) -> list[str]:
        """`count` texts: a vocabulary has hundreds of thousands, so nothing is called for each."""
        data, at, size, length_at = self._data, self._at, self._end, _LENGTH.unpack_from
        found = []
        for _ in range(count):
            begin = at + 8
            if begin > size:
                raise self._too_short(shown(key))
            at = begin + length_at(data, at)[0]
            if at > size:
                raise self._too_short(shown(key))
            found.append(data[begin:at])
        self._at = at
        return [text.decode("utf-8", "replace") for text in found]

    def _text(self, what: str) -> str:
        return self._taken(self._number("<Q", what), what).decode("utf-8", "replace")

    def _count(self, least_bytes: int, what: str, *, most: int = MOST_HEADER_BYTES) -> int:
        """A number of things that take at least so many bytes each, of which `most` are read."""
        count = self._number("<Q", f"the number of {what}")
        if count * least_bytes > self._size - self._at:
            raise unreadable(
                self._path, f"it claims {count:,} {what}, and has {self._size - self._at:,} bytes left: it is damaged"
            )
        if count > most:
            raise unreadable(self._path, f"it has {count:,} {what}: at most {most:,} are read")
        return int(count)

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self._taken(struct.calcsize(form), what))[0]

    def _taken(self, count: int, what: str) -> bytes:
        begin, end = self._at, self._at + count
        if end > self._end:
            raise self._too_short(what)
        self._at = end
        return self._data[begin:end]

    def _too_short(self, what: str) -> ModelRefused:
        if self._end < self._size:
            return unreadable(self._path, f"its header is longer than {MOST_HEADER_BYTES >> 20} MiB, with {what}")
        return unreadable(self._path, f"it is cut short inside {what}, at byte {self._size:,}")


def shown(name: str) -> str:
    """A name from a file for display: no control character, no more than it needs."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)[
        :MOST_KEY_CHARS
    ]


def unreadable(file: Path, why: str) -> ModelRefused:
    """The refusal of a file, with what helps."""
    return ModelRefused(f"{file} cannot be read: {why}; name the original model, from which it was made")
