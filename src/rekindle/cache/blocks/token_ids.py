"""Token ids as callers pass them, as arrays and as bytes.

Owns what counts as ids, and their only encoding: consecutive u32 little-endian, as they are hashed, compared and
stored.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import ndarray

TokenIds = npt.NDArray[np.uint32]
Ids = TokenIds | npt.NDArray[np.integer[Any]] | Sequence[int]  # all values in 0..MAX_ID

MAX_ID = 2**32 - 1
_U32 = np.dtype("<u4")


def token_ids(ids: Ids) -> TokenIds:
    """Return ids as an array u32 [n], the argument itself if it is one; ValueError for anything but ids."""
    given: Any = ids
    if type(given) is ndarray and given.dtype is _U32 and given.ndim == 1:
        return given
    try:
        return np.frombuffer(encoded_ids(ids), _U32)
    except TypeError as error:
        raise ValueError(str(error)) from None


def id_bytes(ids: Ids) -> bytes:
    """Return the encoding by which ids are hashed, compared and stored; ValueError for anything but ids."""
    given: Any = ids
    try:  # nearly always an array; checking its type would cost a twentieth of a `BlockPool.find`
        if given.dtype is _U32 and given.ndim == 1:
            data: bytes = given.tobytes()
            return data
    except AttributeError:
        pass
    return token_ids(ids).tobytes()


def encoded_ids(ids: object) -> bytes:
    """As `id_bytes`, for any object: TypeError for anything but ids, ValueError for an id outside u32."""
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview)):
        return _pack(ids)
    if hasattr(ids, "__array__"):
        return _array_bytes(np.asarray(ids))
    raise TypeError(f"token ids are a sequence of ints or an integer array [n], not {type(ids).__name__}")


def _pack(ids: Sequence[int]) -> bytes:
    """Encode as u32: the array module converts ints in C, in a third of the time numpy takes for a list."""
    try:
        packed = array("I", ids)
    except OverflowError:
        raise ValueError(f"ids lie in 0..{MAX_ID}, {_first_outside(ids)} does not") from None
    except TypeError as error:
        raise TypeError(f"token ids are ints only: {error}") from None
    assert packed.itemsize == 4, f"an unsigned int has {packed.itemsize} bytes here"
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_outside(ids: Sequence[object]) -> object:
    return next((id_ for id_ in ids if isinstance(id_, int) and not 0 <= id_ <= MAX_ID), "one of these")


def _array_bytes(ids: npt.NDArray[Any]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"an array of ids has integers and one dimension, not {ids.dtype} {list(ids.shape)}")
    outside = ids[(ids < 0) | (ids > MAX_ID)] if ids.dtype.itemsize > 4 or ids.dtype.kind == "i" else ids[:0]
    if outside.size:
        raise ValueError(f"ids lie in 0..{MAX_ID}, {outside[0]} does not")
    return ids.astype("<u4", copy=False).tobytes()
