"""One copy there and one back: arrays of every dtype and size come through as they were."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rekindle.model.transfer import Readback, joined, packed, parted, to_device, unpacked

kinds = st.sampled_from([np.int64, np.float64, np.float32, np.int32, np.uint8, np.bool_])
several = st.lists(
    kinds.flatmap(lambda kind: arrays(kind, array_shapes(min_side=0, max_side=5))), min_size=1, max_size=5
)


def assert_same(these: list[np.ndarray], those: list[np.ndarray]) -> None:
    for one, other in zip(these, those, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


@given(several)
def test_what_is_packed_and_joined_comes_out_as_it_was(given: list[np.ndarray]) -> None:
    tensors = unpacked(packed(given), given)
    assert_same([tensor.numpy() for tensor in tensors], given)
    assert_same(parted(joined(tensors).numpy(), tensors), given)


def test_a_processor_copies_nothing() -> None:
    array = np.arange(3)
    (tensor,) = to_device([array], torch.device("cpu"))
    (back,) = Readback([tensor]).arrays()
    array[0] = 7
    assert int(tensor[0]) == back[0] == 7
