"""Records of another engine's blocks: canonical, the very bits in native formats, the same codes as ours in 4 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.kv import q4h
from rekindle.kv.arena import KVArena
from rekindle.kv.coded import round_trip
from rekindle_vllm.codec import ENCODED_VALUES, Codec
from rekindle_vllm.names import HeadShape, RecordFormat, record_layout
from rekindle_vllm.packing import BlockShape, learn
from rekindle_vllm.steps import ABSENT
from tests.vllm.backends import BACKENDS, Backend, backend

NUM_BLOCKS, LAYERS, RECORD = 12, 2, 64
SHAPE = BlockShape(32, 2, 32, 32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Engine:
    """Blocks of an engine with two layers, and a codec over them."""

    def __init__(
        self,
        kind: str,
        record_format: RecordFormat,
        dtype: torch.dtype = torch.bfloat16,
        shape: BlockShape = SHAPE,
        kernels: KernelLibrary | None = None,
        encoded_values: int = ENCODED_VALUES,
    ) -> None:
        self.backends = [backend(kind, shape, dtype, NUM_BLOCKS) for _ in range(LAYERS)]
        heads = (HeadShape(shape.heads, shape.k_dim, shape.v_dim),) * LAYERS
        self.layout = record_layout(heads, dtype, record_format, RECORD)
        self.codec = Codec(
            self.layout,
            [learn(made.cache, shape, made.write) for made in self.backends],
            [slice(0, RECORD // shape.tokens)] * LAYERS,
            num_records=3,
            dtype=dtype,
            device=torch.device("cpu"),
            kernels=kernels,
            encoded_values=encoded_values,
        )
        self.values = [made.fill(seed) for seed, made in enumerate(self.backends)]

    def canonical(self, layer: int, blocks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a record of these blocks, each [heads, tokens, dim]."""
        k, v = (side[blocks].transpose(0, 1).flatten(1, 2) for side in self.values[layer])
        return k, v

    def stored(self, record: int) -> KVArena:
        """An arena with this record as its only block."""
        arena = KVArena(self.layout, 1)
        arena.write(0, 0, self.codec.rows[record])
        return arena


def caches(engine: Engine) -> list[torch.Tensor]:
    return [made.cache.clone() for made in engine.backends]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BACKENDS)
def test_native_records_are_canonical_and_come_back_bit_for_bit(kind: str, dtype: str) -> None:
    engine = Engine(kind, "native", DTYPES[dtype])
    assert engine.layout.formats() == {f"{dtype}/{dtype}": LAYERS}
    assert engine.codec.encode([[7, 2], [0, 9]]) == 2
    for record, blocks in enumerate([[7, 2], [0, 9]]):
        for layer in range(LAYERS):
            view, (k, v) = engine.stored(record).layer(layer), engine.canonical(layer, blocks)
            assert torch.equal(view.k[0][0], k) and torch.equal(view.v[0][0], v)
    before = caches(engine)
    for made in engine.backends:
        made.cache.zero_()
    engine.codec.decode([[7, 2], [0, 9]])
    for cache, kept in zip(caches(engine), before, strict=True):
        written = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
        written[[7, 2, 0, 9]] = True
        assert torch.equal(cache[written], kept[written]) and not cache[~written].any()


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_records_in_4_bits_hold_our_codes_and_come_back_rotated(dtype: str, dim: int) -> None:
    engine = Engine("k before v", "q4h", DTYPES[dtype], BlockShape(64, 2, dim, dim))
    assert engine.codec.encode([[3], [1]]) == 2
    expected = []
    for layer in range(LAYERS):
        view, (k, v) = engine.stored(1).layer(layer), engine.canonical(layer, [1])
        for sections, values, group in ((view.k, k, 16), (view.v, v, 32 if dim % 32 == 0 else 16)):
            words, scales, _ = q4h.encode(q4h.rotate(values), group)
            assert torch.equal(sections[0][0], words) and torch.equal(sections[1][0], scales)
        expected.append((round_trip(k, "k"), round_trip(v, "v")))
    engine.codec.decode([[5], [6]])
    for made, (k, v) in zip(engine.backends, expected, strict=True):
        values = learn(made.cache, made.shape, made.write)
        for side, wanted in ((values.k, k), (values.v, v)):
            torch.testing.assert_close(side.read(torch.tensor([6]))[0].float(), wanted, rtol=0.01, atol=1e-5)


def test_the_kernels_write_the_same_records_as_torch() -> None:
    kernels = library.load("auto").library
    assert kernels is not None
    for kind in BACKENDS:
        by_torch, by_kernel = (Engine(kind, "q4h", kernels=chosen) for chosen in (None, kernels))
        groups = [[11, 0], [4, 5], [9, 2]]
        assert by_torch.codec.encode(groups) == by_kernel.codec.encode(groups) == 3
        assert np.array_equal(by_torch.codec.rows, by_kernel.codec.rows)


def test_records_are_the_same_however_many_layers_are_encoded_at_once() -> None:
    rows = []
    for encoded_values in (1, ENCODED_VALUES):
        engine = Engine("heads first", "q4h", encoded_values=encoded_values)
        engine.backends[1].cache[4, 1, 3, 40] = float("nan")  # the second layer's, in another piece than the first's
        assert engine.codec.encode([[0, 1], [2, 3], [4, 5]]) == 2
        rows.append(engine.codec.rows[:2].copy())
    assert np.array_equal(rows[0], rows[1])


def test_a_record_is_the_same_however_the_engine_packs_and_cuts_blocks() -> None:
    rows = []
    for kind, tokens in (("heads first", 16), ("tokens first", 32), ("paired", 64)):
        engine = Engine(kind, "native", shape=BlockShape(tokens, 2, 32, 32))
        k, v = (torch.randn(2, RECORD, 32, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 2))
        per_record = RECORD // tokens
        for made in engine.backends:
            write_tokens(made, k, v)
        engine.codec.encode([list(range(per_record))])
        rows.append(engine.codec.rows[0].copy())
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


def write_tokens(made: Backend, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write K and V of a record's tokens into the first blocks of a backend."""
    tokens = made.shape.tokens
    for block in range(RECORD // tokens):
        part = slice(block * tokens, (block + 1) * tokens)
        made.write(k[:, part].transpose(0, 1), v[:, part].transpose(0, 1), block)


@pytest.mark.parametrize("record_format", ["native", "q4h"])
def test_absent_blocks_of_a_record_stay_as_they_are(record_format: RecordFormat) -> None:
    engine = Engine("tokens first", record_format)
    engine.codec.encode([[0, 1], [2, 3]])
    before = caches(engine)
    engine.codec.decode([[ABSENT, 8], [9, ABSENT]])
    for cache, kept, (k, _) in zip(caches(engine), before, engine.values, strict=True):
        others = torch.ones(NUM_BLOCKS, dtype=torch.bool)
        others[[8, 9]] = False
        assert torch.equal(cache[others], kept[others])
        near = 0.0 if record_format == "native" else 0.5
        torch.testing.assert_close(cache[8][..., :32].float(), k[1].float(), rtol=0, atol=near)
        torch.testing.assert_close(cache[9][..., :32].float(), k[2].float(), rtol=0, atol=near)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_records_that_are_not_finite_have_no_4_bits(bad: float, with_kernels: bool) -> None:
    engine = Engine("heads first", "q4h", kernels=library.load("auto").library if with_kernels else None)
    engine.backends[1].cache[4, 1, 3, 40] = bad
    assert engine.codec.encode([[0, 1], [4, 5], [2, 3]]) == 1
    assert engine.codec.encode([[4, 5]]) == 0
    assert engine.codec.encode([[0, 1], [2, 3]]) == 2
