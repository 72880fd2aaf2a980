"""The container format GGUF, version 3, as llama.cpp defines it: metadata, a table of tensors, their aligned data.

Owns the bytes of a file and of one tensor in each type. Does not know models. Needs numpy alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

GgufType = Literal["bf16", "f16", "f32", "q8_0"]
Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

VERSION, ALIGNMENT = 3, 32
TENSOR_TYPES: Mapping[GgufType, int] = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
FILE_TYPES: Mapping[GgufType, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
Q8_GROUP = 32  # values that share a scale
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its shape as in torch, its type, and where its fp32 values come from when it is written."""

    name: str
    shape: tuple[int, ...]
    kind: GgufType
    values: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data, without padding."""
        count = int(np.prod(self.shape))
        return count + count // Q8_GROUP * 2 if self.kind == "q8_0" else count * (4 if self.kind == "f32" else 2)


def write_file(path: Path, metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> None:
    """Write the file; one tensor's values are in memory at a time."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _typed(value))
        offset = 0
        for tensor in tensors:
            dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            file.write(_text(tensor.name) + dimensions + struct.pack("<IQ", TENSOR_TYPES[tensor.kind], offset))
            offset += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        _pad(file)
        for tensor in tensors:
            data = encoded(tensor.values(), tensor.kind)
            assert len(data) == tensor.num_bytes, f"{tensor.name} has {len(data)} bytes, not {tensor.num_bytes}"
            file.write(data)
            _pad(file)


def encoded(values: np.ndarray, kind: GgufType) -> bytes:
    """Return fp32 values as a tensor's data; `q8_0` needs a multiple of 32 columns (ValueError)."""
    if kind == "bf16":
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest, ties to even
        return bytes((nearest >> 16).astype("<u2").tobytes())
    if kind == "q8_0":
        return _q8_0(values)
    return bytes(values.astype("<f2" if kind == "f16" else "<f4").tobytes())


def _q8_0(values: np.ndarray) -> bytes:
    """Encode groups of 32 values of a row: a scale in fp16, then the values as int8."""
    if values.shape[-1] % Q8_GROUP:
        raise ValueError(f"q8_0 takes rows of a multiple of {Q8_GROUP} values, not {values.shape[-1]}")
    groups = values.reshape(-1, Q8_GROUP)
    scales = np.abs(groups).max(axis=1) / np.float32(127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    blocks = np.empty(len(groups), dtype=[("scale", "<f2"), ("codes", "i1", Q8_GROUP)])
    blocks["scale"] = scales
    scaled = groups * inverse[:, None]
    blocks["codes"] = np.trunc(scaled + np.copysign(np.float32(0.5), scaled))  # halves away from zero, as C's roundf
    return blocks.tobytes()


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<I", ARRAY) + _listed(value)


def _listed(items: Iterable[str] | Iterable[int] | Iterable[float]) -> bytes:
    texts = [item for item in items if isinstance(item, str)]
    numbers = [item for item in items if not isinstance(item, str)]
    if any(isinstance(item, float) for item in numbers):
        return struct.pack(f"<IQ{len(numbers)}f", FLOAT32, len(numbers), *numbers)
    if numbers:
        return struct.pack(f"<IQ{len(numbers)}i", INT32, len(numbers), *numbers)
    return struct.pack("<IQ", STRING, len(texts)) + b"".join(map(_text, texts))


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
