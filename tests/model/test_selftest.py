"""What the self-test promises: bitwise where bytes agree, close where paths differ by less than the format costs."""

from __future__ import annotations

import pytest
import torch

from rekindle.model import selftest
from rekindle.model.loaded import LoadedModel
from tests.model.helpers import in_memory
from tests.tiny_models import tiny_model


class CountsRows(torch.nn.Module):
    """A layer whose output depends a little on how many rows are computed with it, as fast kernels' do."""

    def __init__(self, inner: torch.nn.Module, size: float) -> None:
        super().__init__()
        self.inner = inner
        self.size = size

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self.inner(rows)
        ramp = torch.linspace(-1, 1, result.shape[-1], dtype=result.dtype)
        return result + self.size * (rows.shape[-2] % 7) * ramp


def uneven(size: float) -> LoadedModel:
    model = tiny_model("llama", torch.float32)
    model.model.layers[0].mlp = CountsRows(model.model.layers[0].mlp, size)
    return in_memory(model, kv="q4h")


def test_paths_of_a_bitwise_model_do_not_diverge_and_formats_do() -> None:
    loaded = in_memory(tiny_model("llama", torch.bfloat16), kv="q4h")
    assert selftest.self_test(loaded)[0] == "bitwise"
    paths, formats = selftest.divergences(loaded)
    assert paths == 0 < formats


def test_native_kv_is_measured_against_the_same_yardstick() -> None:
    native = selftest.divergences(in_memory(tiny_model("llama", torch.float32)))[1]
    four_bits = selftest.divergences(in_memory(tiny_model("llama", torch.float32), kv="q4h"))[1]
    assert native == pytest.approx(four_bits, rel=0.5) and native > 0


@pytest.mark.parametrize(("size", "promise"), [(1e-3, "close"), (3.0, "none")])
def test_paths_that_differ_are_close_only_within_a_quarter_of_the_format(size: float, promise: str) -> None:
    said, finding = selftest.self_test(uneven(size))
    assert said == promise, finding
    assert "nats" in finding
