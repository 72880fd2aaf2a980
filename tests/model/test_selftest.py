"""What the self-test promises: bitwise where bytes agree, close where paths differ by less than the format costs; and
whether rows that decode are the same in any company."""

from __future__ import annotations

import pytest
import torch

from rekindle.model import selftest
from rekindle.model.loaded import LoadedModel
from tests.model.helpers import in_memory
from tests.tiny_models import tiny_model


class CountsRows(torch.nn.Module):
    """A layer whose output depends a little on how many rows are computed with it, as fast kernels' do.

    From `least` rows on: kernels for prompts may be others than those for decoding.
    """

    def __init__(self, inner: torch.nn.Module, size: float, least: int) -> None:
        super().__init__()
        self.inner = inner
        self.size = size
        self.least = least

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self.inner(rows)
        ramp = torch.linspace(-1, 1, result.shape[-1], dtype=result.dtype)
        return result + self.size * (rows.shape[-2] % 7 if rows.shape[-2] >= self.least else 0) * ramp


def uneven(size: float, least: int = 0) -> LoadedModel:
    model = tiny_model("llama", torch.float32)
    model.model.layers[0].mlp = CountsRows(model.model.layers[0].mlp, size, least)
    return in_memory(model, kv="q4h")


def test_paths_of_a_bitwise_model_do_not_diverge_and_formats_do() -> None:
    loaded = in_memory(tiny_model("llama", torch.bfloat16), kv="q4h")
    found = selftest.self_test(loaded)
    assert (found.promise, found.is_steady) == ("bitwise", True)
    paths, formats = selftest.divergences(loaded)
    assert paths == 0 < formats


def test_native_kv_is_measured_against_the_same_yardstick() -> None:
    native = selftest.divergences(in_memory(tiny_model("llama", torch.float32)))[1]
    four_bits = selftest.divergences(in_memory(tiny_model("llama", torch.float32), kv="q4h"))[1]
    assert native == pytest.approx(four_bits, rel=0.5) and native > 0


@pytest.mark.parametrize(("size", "promise"), [(1e-3, "close"), (3.0, "none")])
def test_paths_that_differ_are_close_only_within_a_quarter_of_the_format(size: float, promise: str) -> None:
    found = selftest.self_test(uneven(size))
    assert found.promise == promise, found.finding
    assert "nats" in found.finding and not found.is_steady


def test_rows_that_decode_are_steady_if_no_company_changes_them() -> None:
    """The largest step that decodes has 132 rows in the test, and the chunks of the other paths up to 531."""
    found = selftest.self_test(uneven(1e-3, least=200))
    assert (found.promise, found.is_steady) == ("close", True) and "in any company" in found.finding
    assert not selftest.self_test(uneven(1e-3, least=100)).is_steady
    assert not selftest.self_test(uneven(1e-3, least=10)).is_steady
