"""The 8-bit format: golden vectors, edges, exactness of its values, and old layouts that it leaves as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle.kv import q8h
from rekindle.kv.coded import round_trip
from rekindle.spec import KVLayout, LayerSpec, group_size

HERE = Path(__file__).parent
CASES = json.loads((HERE / "golden_bytes.json").read_text())


def from_hex(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), "<f4").copy())


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["dim"]))
def test_codes_and_scales_are_the_golden_bytes(case) -> None:
    y = from_hex(case["rotated"])
    codes, scale_bytes, absmax = q8h.encode(y[None], group_size("k", case["dim"], "q8h"))
    assert scale_bytes.numpy().tobytes().hex() == case["scales"]
    assert codes.numpy().tobytes().hex() == case["codes"]
    assert torch.equal(absmax[0], y.abs().unflatten(0, (absmax.shape[1], -1)).amax(1))


def test_the_golden_file_is_what_its_program_writes() -> None:
    from tests.kv import golden

    for case in CASES:
        codes, scales = golden.encode_bytes(from_hex(case["rotated"]).tolist(), group_size("v", case["dim"], "q8h"))
        assert (codes.hex(), scales.hex()) == (case["codes"], case["scales"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_value_is_exact_in_every_compute_dtype(dtype: torch.dtype) -> None:
    scale_bytes = torch.arange(7, 255).to(torch.uint8)[:, None]
    codes = torch.arange(-127, 128).to(torch.int8).expand(len(scale_bytes), 255)
    wanted = torch.ldexp(codes.double(), scale_bytes.double() - 133)
    assert torch.equal(q8h.decode(codes, scale_bytes, dtype).double(), wanted)


@pytest.mark.parametrize("kind", ["k", "v"])
def test_squared_error_on_gaussian_data(kind) -> None:
    x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(4))
    error = float((round_trip(x, kind, "q8h") - x).square().sum() / x.square().sum())
    assert 6e-5 < error < 7.5e-5  # a hundredth of that of Q4H


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_show_and_decode_to_finite_ones(bad: float) -> None:
    y = torch.ones(2, 64)
    y[1, 17] = bad
    codes, scale_bytes, absmax = q8h.encode(y, 32)
    assert absmax.isfinite().tolist() == [[True, True], [False, True]]
    assert q8h.decode(codes, scale_bytes, torch.float32).isfinite().all()


def test_zeros_stay_zeros_and_every_byte_decodes_to_a_finite_number() -> None:
    codes, scale_bytes, _ = q8h.encode(torch.zeros(1, 64), 32)
    assert not codes.any() and not q8h.decode(codes, scale_bytes, torch.float32).any()
    table = q8h.step_table(1, torch.float32, torch.device("cpu"))
    assert table.isfinite().all() and not table[:7].any() and not table[255]


def test_a_vector_is_encoded_the_same_next_to_any_others() -> None:
    y = torch.randn(37, 2, 64, generator=torch.Generator().manual_seed(6))
    codes, scale_bytes, _ = q8h.encode(y, 32)
    for row in (0, 17, 36):
        alone = q8h.encode(y[row : row + 1], 32)
        assert torch.equal(alone[0][0], codes[row]) and torch.equal(alone[1][0], scale_bytes[row])


def test_a_block_takes_its_bytes_and_layouts_of_before_keep_their_digest() -> None:
    def layout(k, v) -> KVLayout:
        return KVLayout(64, (LayerSpec(0, 3, 64, 64, None, k, v),))

    assert layout("q8h", "q8h").token_bytes == 3 * 2 * (64 + 2)
    assert layout("q8h", "q4h").token_bytes == 3 * (64 + 2 + 32 + 2)
    digests = {layout(k, v).digest for k in ("q4h", "q8h") for v in ("q4h", "q8h")}
    assert len(digests) == 4
    assert layout("q4h", "q4h").digest.hex() == "a18cfbf278c52c4217f560913b48f2d99db1bf3e3e2842418ce67ef5c588cc05"


def test_a_rotary_key_and_odd_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="not kept in q8h"):
        LayerSpec(0, 1, 64, 32, None, "q8h", "q8h", latent=True)
    with pytest.raises(ValueError, match="q8h needs a head size divisible by 16"):
        LayerSpec(0, 1, 40, 64, None, "q8h", "q4h")
