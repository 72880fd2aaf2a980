"""Recurrent layers on packed sequences: every hybrid family gives the bits of a sequence that runs alone in one piece,
as long as prompts are cut where blocks end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch

from rekindle.cache.blocks.windows import ABSENT, WindowSlots
from rekindle.errors import ModelRefused
from rekindle.kv.arena import KVArena
from rekindle.kv.step_layout import SequenceSpan, StatePlan
from rekindle.model.adapter import StepCache
from rekindle.model.dense_attention import DenseStep
from rekindle.model.loaded import LoadedModel
from rekindle.model.runner import ModelRunner
from rekindle.model.trial import sequence_step
from rekindle.parts import STATE
from tests.model.helpers import in_memory
from tests.tiny_models import HYBRID_KINDS, tiny_model

SIZE = 64
IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 384, 400))


@lru_cache
def hybrid(kind: str) -> LoadedModel:
    """A tiny bf16 model in memory; Mamba's chunks are longer than a block, as those of Granite are."""
    changes = {"mamba_chunk_size": 256} if kind in ("granite-4-h", "falcon-h1") else {}
    return in_memory(tiny_model(kind, torch.bfloat16, **changes), block_tokens=SIZE)


class Runs:
    """Sequences over one arena in which only some blocks have a slot for their state."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 40) -> None:
        self.slots = WindowSlots(STATE, num_slots=num_blocks + 1, num_blocks=num_blocks)
        self.arena = KVArena(loaded.spec.layout, num_blocks, "cpu", [self.slots])
        self.runner = ModelRunner(loaded, self.arena)
        self.free = list(range(num_blocks))

    def table(self, num_tokens: int, *with_state: int) -> list[int]:
        """Blocks for a sequence; those at these indices have a slot, and so has the last."""
        blocks = [self.free.pop() for _ in range(-(-num_tokens // SIZE))]
        for index in {*with_state, len(blocks) - 1}:
            self.slots.take(blocks[index])
        return blocks

    def forward(self, *steps: tuple[torch.Tensor, int, Sequence[int]]) -> list[torch.Tensor]:
        """Run ids from a position on, for each of several tables; the logits of their last rows."""
        launched = self.runner.launch([sequence_step(ids, start, blocks, "last") for ids, start, blocks in steps])
        assert launched.wait() == set()
        return list(launched.logits)

    def states(self, block: int) -> bytes:
        """The state in a block's slot."""
        part = self.arena.layout.state_part
        assert part is not None
        out = np.empty(part.payload_bytes, np.uint8)
        self.arena.read(block, part.index, SIZE, out)
        return out.tobytes()

    def kv(self, blocks: Sequence[int], num_tokens: int) -> list[bytes]:
        """What attention stored of a sequence."""
        out = np.empty(self.arena.layout.parts[0].payload_bytes, np.uint8)
        found = []
        for index, block in enumerate(blocks):
            self.arena.read(block, 0, min(SIZE, num_tokens - index * SIZE), out)
            found.append(out.tobytes())
        return found


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_a_prompt_in_pieces_of_blocks_gives_the_bits_of_one_piece(kind: str) -> None:
    runs, ids = Runs(hybrid(kind)), IDS[:339]
    whole = runs.table(339)
    (expected,) = runs.forward((ids, 0, whole))
    pieces, other = runs.table(339, 0, 2, 4), runs.table(200, 0, 1, 2)
    runs.forward((ids[:64], 0, pieces), (IDS[300:310], 0, other))
    runs.forward((IDS[310:311], 10, other), (ids[64:192], 64, pieces))
    runs.forward((ids[192:320], 192, pieces))
    found = runs.forward((IDS[311:312], 11, other), (ids[320:], 320, pieces))[1]
    assert torch.equal(found, expected)
    assert runs.kv(pieces, 339) == runs.kv(whole, 339)
    assert runs.states(pieces[-1]) == runs.states(whole[-1])


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_states_inside_a_chunk_are_those_at_the_ends_of_their_blocks(kind: str) -> None:
    runs = Runs(hybrid(kind))
    long = runs.table(300, 1, 3)
    runs.forward((IDS[:300], 0, long))
    for index in (1, 3):
        short = runs.table((index + 1) * SIZE)
        runs.forward((IDS[: (index + 1) * SIZE], 0, short))
        assert runs.states(long[index]) == runs.states(short[-1])
    assert not runs.slots.has(long[0]), "nobody asked for that state"


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_streams_that_decode_together_give_the_bits_of_each_alone(kind: str) -> None:
    runs = Runs(hybrid(kind))
    starts = {"a": 70, "b": 128, "c": 5}
    alone = {name: runs.table(start + 3, *range(-(-(start + 3) // SIZE))) for name, start in starts.items()}
    together = {name: runs.table(start + 3, *range(-(-(start + 3) // SIZE))) for name, start in starts.items()}
    for name, start in starts.items():
        for tables in (alone, together):
            runs.forward((IDS[:start], 0, tables[name][: -(-start // SIZE)]))
    for turn in range(3):
        rows = [(IDS[start + turn : start + turn + 1], start + turn, together[name]) for name, start in starts.items()]
        found = runs.forward(*rows)
        for logits, (name, start) in zip(found, starts.items(), strict=True):
            (expected,) = runs.forward((IDS[start + turn : start + turn + 1], start + turn, alone[name]))
            assert torch.equal(logits, expected), (name, turn)
    for name in starts:
        assert [runs.states(block) for block in together[name]] == [runs.states(block) for block in alone[name]]


@pytest.mark.parametrize("kind", ["lfm2", "qwen3.5", "granite-4-h"])
def test_decoding_stays_near_one_piece(kind: str) -> None:
    """In fp64; the recurrences themselves are fp32."""
    loaded = in_memory(tiny_model(kind, torch.float64), block_tokens=SIZE)
    runs = Runs(loaded)
    whole, single = runs.table(90, 0), runs.table(90, 0)
    (expected,) = runs.forward((IDS[:90], 0, whole))
    runs.forward((IDS[:64], 0, single))
    for at in range(64, 90):
        (found,) = runs.forward((IDS[at : at + 1], at, single))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_state_that_is_not_finite_fails_its_sequence_and_is_not_kept() -> None:
    loaded = in_memory(tiny_model("lfm2", torch.float32), block_tokens=SIZE)
    runs = Runs(loaded)
    one, other = runs.table(20), runs.table(20)
    runs.forward((IDS[:9], 0, one), (IDS[:9], 0, other))
    before = [runs.states(table[0]) for table in (one, other)]
    handle = loaded.model.model.layers[2].operator_norm.register_forward_hook(
        lambda module, args, output: output.index_fill(1, torch.tensor([1]), float("nan"))
    )
    steps = [sequence_step(IDS[9:10], 9, one, "last"), sequence_step(IDS[9:10], 9, other, "last")]
    failed = runs.runner.launch(steps).wait()
    handle.remove()
    assert failed == {1}
    assert runs.states(other[0]) == before[1], "the state before the failed pass"
    assert runs.states(one[0]) != before[0]


def test_a_prompt_that_fails_alongside_a_stream_leaves_the_states_of_both_right() -> None:
    """The stream's states are written once, the prompt's not at all, and what is run again gives the same."""
    loaded = in_memory(tiny_model("qwen3.5", torch.float32), block_tokens=SIZE)
    runs = Runs(loaded)
    stream, alone, prompt = runs.table(20), runs.table(20), runs.table(9)
    runs.forward((IDS[:9], 0, stream))
    runs.forward((IDS[:9], 0, alone))
    (expected,) = runs.forward((IDS[9:10], 9, alone))
    handle = loaded.model.model.layers[2].input_layernorm.register_forward_hook(
        lambda module, args, output: output.index_fill(1, torch.arange(1, output.shape[1]), float("nan"))
    )
    steps = [sequence_step(IDS[9:10], 9, stream, "last"), sequence_step(IDS[:9], 0, prompt, "last")]
    launched = runs.runner.launch(steps)
    failed = launched.wait()
    handle.remove()
    assert failed == {1}
    assert torch.equal(launched.logits[0], expected) and runs.states(stream[0]) == runs.states(alone[0])
    assert not any(runs.states(prompt[0])), "nothing of it was written"


def test_a_pass_that_raises_leaves_all_states() -> None:
    loaded = hybrid("qwen3.5")
    runs = Runs(loaded)
    table = runs.table(20)
    runs.forward((IDS[:9], 0, table))
    before = runs.states(table[0])

    def broken(*_: object) -> None:
        raise RuntimeError("no more memory")

    handle = loaded.model.lm_head.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="no more memory"):
        runs.forward((IDS[9:10], 9, table))
    handle.remove()
    assert runs.states(table[0]) == before
    (again,) = runs.forward((IDS[9:10], 9, table))
    assert again.isfinite().all() and runs.states(table[0]) != before


def spans_of(*bounds: tuple[int, int]) -> list[SequenceSpan]:
    return [
        SequenceSpan(list(range(10 * number, 10 * number + 10)), start, end - start, start)
        for number, (start, end) in enumerate(bounds)
    ]


def test_segments_end_where_blocks_have_a_slot() -> None:
    with_slot = {1, 4, 11, 12, 22}

    def rows_of(blocks: np.ndarray) -> np.ndarray:
        return np.array([block + 100 if block in with_slot else ABSENT for block in blocks.tolist()], np.int32)

    plan = StatePlan.build(spans_of((0, 19), (11, 12), (9, 10)), 4, rows_of)
    (_, first, second) = plan.groups
    assert [
        (group.rows, [x.source for x in group.segments], [x.target for x in group.segments])
        for group in (first, second)
    ] == [
        (slice(0, 8), [None], [101]),
        (slice(8, 19), [101], [104]),
    ]
    assert [(x.span, x.row, x.source, x.target) for x in plan.groups[0].segments] == [
        (1, 19, 112, 112),
        (2, 20, 122, 122),
    ]
    assert plan.groups[0].rows == slice(19, 21)


def test_single_rows_that_do_not_follow_each_other_run_together() -> None:
    plan = StatePlan.build(spans_of((5, 6), (0, 3), (6, 7)), 4, lambda blocks: blocks)
    assert [group.rows for group in plan.groups] == [[0, 4], slice(1, 4)]


def without_its_output(module: Callable[..., torch.Tensor]) -> Callable[..., object]:
    return lambda *args, **kwargs: (module(*args, **kwargs), None)


def test_a_recurrent_module_of_another_form_is_refused() -> None:
    loaded = in_memory(tiny_model("lfm2", torch.float32), block_tokens=SIZE)
    split = loaded.model.model.layers[0].conv.forward
    loaded.model.model.layers[0].conv.forward = type(split)(without_its_output(split.own), split.state)
    runs = Runs(loaded)
    with pytest.raises(ModelRefused, match="layer 0 is recurrent and does not give one tensor of its rows"):
        runs.forward((IDS[:9], 0, runs.table(9)))
    cache = StepCache(runs_step := DenseStep())
    with pytest.raises(ModelRefused, match="takes more than its hidden states: gate"):
        runs_step.states = object()
        split(hidden_states=torch.zeros(1, 3, 64), past_key_values=cache, gate=torch.zeros(3))
