"""Small arrays between host and device: everything that goes there in one copy, everything that comes back in one.

On a card each copy from the device waits for all that was launched before it, and each copy to it costs a launch. On a
processor arrays and tensors share their memory and nothing is copied.

    arrays  --packed-->  bytes on the host    --one copy-->  --unpacked-->  tensors
    tensors --joined-->  bytes on the device  --one copy-->  --parted-->    arrays
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED = 16  # bytes, at which packed arrays begin


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors of the same shapes and dtypes; the host does not wait for the copy.

    On a processor they are views: the arrays must stay as they are.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    whole = packed(arrays)
    whole = whole.pin_memory() if device.type == "cuda" else whole
    return unpacked(whole.to(device, non_blocking=True), arrays)


class Readback:
    """Tensors of one device on their way to the host: one copy, which begins when this is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._whole: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if any(tensor.device.type != "cpu" for tensor in tensors):
            whole = joined(tensors)
            self._whole = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=whole.device.type == "cuda")
            self._whole.copy_(whole, non_blocking=True)
            if whole.device.type == "cuda":
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(whole.device))

    def arrays(self) -> list[np.ndarray]:
        """The tensors as arrays, on a processor views of them. Waits until they are computed, not for what is later."""
        if self._whole is None:
            return [tensor.numpy() for tensor in self._tensors]
        if self._event is not None:
            self._event.synchronize()
        return parted(self._whole.numpy(), self._tensors)


def packed(arrays: Sequence[np.ndarray]) -> Tensor:
    """The bytes of arrays, uint8, each from the next multiple of `ALIGNED` on."""
    starts = _starts(arrays)
    whole = np.zeros(max(starts[-1], ALIGNED), dtype=np.uint8)  # nothing at all has no stride to be viewed by
    for array, start in zip(arrays, starts, strict=False):
        whole[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(whole)


def unpacked(whole: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Tensors like the `packed` arrays, over these bytes."""
    return [
        whole[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for array, start in zip(arrays, _starts(arrays), strict=False)
    ]


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
    starts: list[int] = np.cumsum([0, *sizes]).tolist()
    return starts


def _dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, array.dtype)).dtype


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, uint8, one after the other."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def parted(whole: np.ndarray, tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Arrays like the `joined` tensors, from these bytes."""
    arrays, start = [], 0
    for tensor in tensors:
        kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        end = start + tensor.numel() * kind.itemsize
        arrays.append(np.frombuffer(whole[start:end].tobytes(), kind).reshape(tensor.shape))
        start = end
    return arrays
