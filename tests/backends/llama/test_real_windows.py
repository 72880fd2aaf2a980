"""With the real llama-server and a tiny model whose window is no multiple of a block: nothing is lost at any length."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle_backends.llama.layout import BLOCK_TOKENS
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slots import BACK_TOKENS
from rekindle_backends.llama.states import FEW
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama.real_server import LlamaServer
from tests.backends.llama.test_real_states import drawn
from tests.backends.llama.test_transfer import arena_of
from tests.backends.llama.tiny_hybrids import CONTEXT, WINDOW, write

NOISE = 2e-4  # of log probabilities, as the slot that went back has its window's cells in another order


def test_a_window_goes_on_wherever_in_a_block_it_ends(tmp_path: Path) -> None:
    """Of each length of a conversation over a whole block, and up to one that its window just leaves: to the last digit
    of each log probability, as no cell of a window was used again yet (see `benchmarks.llama_cuts`)."""
    write("gemma3", tmp_path / "tiny.gguf")
    with LlamaServer(tmp_path / "tiny.gguf", tmp_path, "-c", str(3 * CONTEXT), "--no-kv-unified") as server:
        for number in (*range(WINDOW - 1, WINDOW + 3), *range(200, 200 + BLOCK_TOKENS + 1)):
            server.erase(1)
            server.complete(drawn(number - 2, seed=number), 3, slot=1)
            file = SlotFile.open(server.save(1, "own"))
            assert len(file.tokens) == number
            blocks = [5, 1, 0, 4, 2]
            arena, slots = arena_of(file.shape, WINDOW, 6)
            assert slots is not None and all(slots.take(block) for block in blocks)
            take(file, arena, blocks, 0, number)
            assert resumable(arena, blocks, number) == (number if number > WINDOW else 0), number
            if number <= WINDOW:
                continue
            put(arena, blocks, number, file.tokens, file.shape, tmp_path / "put", 2)
            assert server.restore(2, tmp_path / "put") == number
            prompt = [*file.tokens.tolist(), *drawn(9)]
            hot, restored = server.scored(prompt, 12, slot=1), server.scored(prompt, 12, slot=2)
            assert restored == hot and hot[1] == number, number


def test_a_slot_goes_back_to_the_end_of_a_prompt(tmp_path: Path) -> None:
    """Its windows there and those at the end of the reply are in the same blocks, and both are gone on from."""
    write("gemma3", tmp_path / "tiny.gguf")
    with LlamaServer(tmp_path / "tiny.gguf", tmp_path, "-c", str(3 * CONTEXT), "--no-kv-unified") as server:
        for number in (WINDOW + 5, 130, 160):
            server.erase(1)
            prompt, blocks = drawn(number, seed=number), [5, 1, 0, 4, 2]
            server.complete(prompt, WINDOW + 20, slot=1)
            end = SlotFile.open(server.save(1, "end"))
            assert server.go_back(prompt[:-BACK_TOKENS], slot=1) >= number - BACK_TOKENS - FEW
            back = SlotFile.open(server.save(1, "back"))
            arena, slots = arena_of(end.shape, WINDOW, 6)
            assert slots is not None and all(slots.take(block) for block in blocks)
            take(back, arena, blocks, len(back.tokens), len(back.tokens))
            take(end, arena, blocks, 0, len(end.tokens))
            assert resumable(arena, blocks, number) == number - BACK_TOKENS
            assert resumable(arena, blocks, len(end.tokens)) == len(end.tokens)
            put(arena, blocks, number - BACK_TOKENS, end.tokens, end.shape, tmp_path / "put", 2)
            server.restore(2, tmp_path / "put")
            parted = [*prompt[:-BACK_TOKENS], *drawn(9)]
            hot, restored = server.scored(parted, 12, slot=1), server.scored(parted, 12, slot=2)
            assert restored[1] == hot[1] == number - BACK_TOKENS
            for (token, scored), (wanted, is_wanted) in zip(restored[0], hot[0], strict=True):
                assert token == wanted and scored == pytest.approx(is_wanted, abs=NOISE), number
