"""With the real llama-server and a tiny model whose window is no multiple of a block: nothing is lost at any length."""

from __future__ import annotations

from pathlib import Path

from rekindle_backends.llama.layout import BLOCK_TOKENS
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama.real_server import LlamaServer
from tests.backends.llama.test_real_states import drawn
from tests.backends.llama.test_transfer import arena_of
from tests.backends.llama.tiny_hybrids import CONTEXT, WINDOW, write


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
