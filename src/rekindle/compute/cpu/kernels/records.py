"""Records of blocks read and verified by the kernels: many in one call, without Python's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.library import Choice, KernelLibrary
from rekindle.store.files.shards import ReadRecords, RecordAt


class _Record(ctypes.Structure):
    """`rk_record` of native/rekindle.h."""

    _fields_ = (
        ("header", ctypes.c_char_p),
        ("payload", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "header_bytes", "payload_bytes", "padding_bytes")),
        ("file", ctypes.c_int32),
        ("crc", ctypes.c_uint32),
    )


class RecordKernel:
    """Reads records, as `ReadRecords`."""

    def __init__(self, kernels: KernelLibrary) -> None:
        self._read = kernels.function("rk_read_records", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)

    def __call__(self, wanted: Sequence[RecordAt]) -> int:
        records = (_Record * len(wanted))(*map(_filled, wanted))
        return int(self._read(records, len(wanted)))


def _filled(at: RecordAt) -> _Record:
    payload = at.payload
    assert payload.flags.c_contiguous and payload.flags.writeable, "a payload is read into memory of its own"
    size = len(at.header), payload.nbytes, at.padding_bytes
    return _Record(at.header, payload.ctypes.data, at.offset, *size, at.file, at.crc)


def record_reader(choice: Choice) -> ReadRecords | None:
    """What reads records by the kernels of this setting; None where there are none: Python reads them."""
    found = library.load(choice).library
    return None if found is None else RecordKernel(found)
