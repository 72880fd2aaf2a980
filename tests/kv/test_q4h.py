"""The 4-bit format: golden vectors, edges, error on random data, and the identities that fast kernels rely on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kv import q4h
from rekindle.kv.coded import round_trip
from rekindle.spec import group_size, rotation_size

HERE = Path(__file__).parent
CODES = json.loads((HERE / "golden_codes.json").read_text())
ROTATIONS = json.loads((HERE / "golden_rotation.json").read_text())


def from_hex(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(text), "<f4").copy())


@pytest.mark.parametrize("case", CODES, ids=lambda case: f"{case['kind']}{case['dim']}")
def test_codes_and_scales_are_the_golden_bytes(case):
    y = from_hex(case["rotated"])
    words, scale_bytes, absmax = q4h.encode(y[None], group_size(case["kind"], case["dim"]))
    assert scale_bytes.numpy().tobytes().hex() == case["scales"]
    assert words.numpy().tobytes().hex() == case["words"]
    assert torch.equal(absmax[0], y.abs().unflatten(0, (absmax.shape[1], -1)).amax(1))


@pytest.mark.parametrize("case", ROTATIONS, ids=lambda case: str(case["dim"]))
def test_rotation_is_the_golden_one(case):
    rotated = q4h.rotate(from_hex(case["x"])[None])[0]
    assert rotated.dtype == torch.float32
    assert (rotated.double() - torch.tensor(case["rotated"], dtype=torch.float64)).abs().max() < 1e-6


def test_golden_files_are_what_their_program_writes():
    from tests.kv import golden

    x = from_hex(ROTATIONS[0]["x"]).tolist()
    assert golden.rotation(x) == ROTATIONS[0]["rotated"]
    for case in (CODES[0], CODES[-1]):
        words, scales = golden.encode(from_hex(case["rotated"]).tolist(), group_size(case["kind"], case["dim"]))
        assert (words.hex(), scales.hex()) == (case["words"], case["scales"])


def test_rotation_bits_follow_the_butterflies():
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).numpy()
    y = (x * q4h.sign_values(32).repeat(3).reshape(32, 3).T.reshape(-1)).astype(np.float32).reshape(9, 32)
    half = 1
    while half < 32:
        for start in range(0, 32, 2 * half):
            for i in range(start, start + half):
                first, second = y[:, i].copy(), y[:, i + half].copy()
                y[:, i], y[:, i + half] = first + second, first - second
        half *= 2
    y *= np.float32(1 / math.sqrt(32))
    assert np.array_equal(q4h.rotate(torch.from_numpy(x)).numpy(), y.reshape(3, 96))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_rotation_and_back_is_the_identity(dim):
    x = torch.randn(5, 2, dim, generator=torch.Generator().manual_seed(dim))
    assert (q4h.unrotate(q4h.rotate(x)) - x).abs().max() < 2e-6
    assert torch.allclose(q4h.rotate(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 2, 64), (1, 3, 96), (300, 2, 80)])
def test_a_rotator_gives_the_same_bits(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    rotator = q4h.Rotator(torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(rotator.rotate(x), q4h.rotate(x))
        assert torch.equal(rotator.rotate(x.bfloat16()), q4h.rotate(x.bfloat16()))


@pytest.mark.parametrize("dim", [64, 80, 112, 128])
def test_matrices_rotate_as_the_butterflies_do(dim):
    x = torch.randn(6, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cpu = torch.device("cpu")
    order = q4h.unpacking_order(dim)
    turned = x @ q4h.query_rotation(dim, 0.5, torch.float64, cpu)
    assert (turned - 0.5 * q4h.rotate(x)[:, order]).abs().max() < 1e-6
    back = 2 * turned @ q4h.output_rotation(dim, torch.float64, cpu)
    assert (back - x).abs().max() < 1e-14


@pytest.mark.parametrize(("kind", "bound"), [("k", 0.0064), ("v", 0.0081)])
def test_squared_error_on_gaussian_data(kind, bound):
    x = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(4))
    error = (round_trip(x, kind) - x).square().sum() / x.square().sum()
    assert 0.97 * bound < error < 1.015 * bound


@pytest.mark.parametrize("dim", [32, 80, 96])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_pack_and_unpack(dim, data):
    codes = torch.tensor(data.draw(st.lists(st.integers(0, 15), min_size=dim, max_size=dim)))
    words = q4h.pack(codes[None])
    assert words.shape == (1, dim // 8)
    assert torch.equal(q4h.unpack(words)[0].long(), codes)


def test_a_shift_and_two_masks_give_bf16_pairs():
    codes = torch.randint(0, 16, (40, 8), generator=torch.Generator().manual_seed(5))
    words = q4h.pack(codes).numpy().view(np.uint32)[:, 0]
    for j in range(4):
        shifted = words << 1 if j == 0 else words >> (4 * j - 1)
        pair = torch.from_numpy(((shifted & 0x001E001E) | 0x43004300).astype(np.uint32).view(np.int32))
        as_bf16 = pair.view(torch.bfloat16).view(-1, 2)
        assert torch.equal((as_bf16.float() - 128) / 2, codes[:, 2 * j : 2 * j + 2].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_value_is_exact_in_every_compute_dtype(dtype):
    scale_bytes = torch.tensor([0, *range(8, 0xF8)], dtype=torch.uint8)[:, None]
    words = q4h.pack(torch.arange(16).expand(len(scale_bytes), 16))
    exact = q4h.decode(words, scale_bytes, torch.float64)
    assert torch.equal(q4h.decode(words, scale_bytes, dtype).double(), exact)
    scales = (scale_bytes[:, 0].short() << 7).view(torch.float16).double()
    assert torch.equal(exact, scales[:, None] / 16 * (2 * torch.arange(16) - 15))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_show_and_decode_to_finite_ones(bad):
    y = torch.ones(2, 64)
    y[1, 17] = bad
    words, scale_bytes, absmax = q4h.encode(y, 16)
    assert absmax.isfinite().tolist() == [[True] * 4, [True, False, True, True]]
    assert q4h.decode(words, scale_bytes, torch.float32).isfinite().all()
    whole, whole_scales, _ = q4h.encode(y[:1], 16)
    assert torch.equal(words[:1], whole) and torch.equal(scale_bytes[:1], whole_scales)


def test_every_byte_decodes_to_a_finite_number():
    table = q4h.step_table(1, torch.float32, torch.device("cpu"))
    assert table.isfinite().all() and (table[0xF8:] == 0).all() and table[0] == 0


def test_magnitudes_beyond_the_largest_scale_saturate():
    y = torch.full((1, 16), 1e6)
    y[0, 1::2] = -1e6
    words, scale_bytes, absmax = q4h.encode(y, 16)
    assert scale_bytes.item() == 0xF7 and absmax.isfinite().all()
    assert q4h.decode(words, scale_bytes, torch.float64).abs().unique().tolist() == [57600.0]


def test_zeros_stay_zeros():
    words, scale_bytes, _ = q4h.encode(torch.zeros(1, 64), 32)
    assert not scale_bytes.any()
    assert not q4h.decode(words, scale_bytes, torch.float32).any()


@settings(max_examples=100, deadline=None)
@given(st.floats(2.0**-13, 61440, width=32))
def test_the_scale_reaches_the_largest_value_and_is_the_smallest_that_does(magnitude):
    _, scale_bytes, _ = q4h.encode(torch.full((1, 16), magnitude), 16)
    rounded = float(np.float16(magnitude))
    scale, smaller = ((np.array([scale_bytes.item() - i], np.uint16) << 7).view(np.float16)[0] for i in (0, 1))
    assert smaller < rounded <= scale


def test_a_vector_is_encoded_the_same_beside_any_others():
    x = torch.randn(37, 2, 64, generator=torch.Generator().manual_seed(6))
    words, scale_bytes, _ = q4h.encode(q4h.rotate(x), 16)
    for row in (0, 17, 36):
        alone = q4h.encode(q4h.rotate(x[row : row + 1]), 16)
        assert torch.equal(alone[0][0], words[row]) and torch.equal(alone[1][0], scale_bytes[row])


def test_too_large_a_rotation_is_refused():
    assert rotation_size(1024) == 1024
    with pytest.raises(ValueError, match="at most 512"):
        q4h.rotate(torch.zeros(1, 1024))
