"""With the real llama-server and real weights: its own bytes come back from blocks, and it goes on from them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.llama_states import StatesBench, run_states_bench
from rekindle_backends.llama.sections import Kind
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama.real_server import LlamaServer
from tests.backends.llama.recording import write_model
from tests.backends.llama.test_transfer import arena_of
from tests.needs import ROOT
from tools.real_models import REAL_MODELS

NUM_CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "2"))
WINDOW = 512  # of Gemma 3 270M
TEXT = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
KINDS: tuple[Kind, Kind] = ("k", "v")
FULL = {
    "f16": ("-fa", "on", "--no-kv-unified"),
    "f16 without flash attention": ("-fa", "off", "--no-kv-unified"),
    "q8_0": ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0", "--no-kv-unified"),
    "q4_0": ("-fa", "on", "-ctk", "q4_0", "-ctv", "q4_0", "--no-kv-unified"),
    "one cache for all slots": ("-fa", "on", "--kv-unified"),
}
WINDOWS = {"f16": FULL["f16"], "one cache for all slots": ("-fa", "off", "--kv-unified")}
in_f16 = pytest.mark.parametrize("gemma", [WINDOWS["f16"]], indirect=True)
in_one_cache = pytest.mark.parametrize("gemma", [WINDOWS["one cache for all slots"]], indirect=True)
# Of log probabilities. In one cache llama-server's own slots differ by up to 0.17 with AVX2 where both compute all.
NOISE = 0.4


@pytest.fixture(params=FULL.values(), ids=FULL)
def smollm2(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaServer]:
    with LlamaServer(REAL_MODELS["smollm2"].path(), tmp_path, "-c", "6144", *request.param) as server:
        yield server


@pytest.fixture(params=FULL.values(), ids=FULL)
def bundled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaServer]:
    with LlamaServer(write_model(tmp_path), tmp_path, "-c", "6144", *request.param) as server:
        yield server


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS)
def gemma(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaServer]:
    with LlamaServer(REAL_MODELS["gemma"].path(), tmp_path, "-c", "6144", *request.param) as server:
        yield server


def test_a_slot_comes_back_from_blocks(smollm2: LlamaServer) -> None:
    ids = smollm2.tokenize(TEXT)[:420]
    smollm2.complete(ids[:330], 8, slot=1)
    file = SlotFile.open(smollm2.save(1, "first"))
    total, shape, blocks = len(file.tokens), file.shape, [6, 2, 0, 4, 1, 7, 3]
    arena, _ = arena_of(shape, 0, 8)
    take(file, arena, blocks, 0, total)
    assert resumable(arena, blocks, total) == total == 337  # the last token that was drawn is not computed
    put(arena, blocks, total, file.tokens, shape, smollm2.folder / "same", 1)
    assert (smollm2.folder / "same").read_bytes() == (smollm2.folder / "first").read_bytes()

    # Another slot goes on as this one does, from all of it and from a part.
    for num_tokens in (total, 200):
        put(arena, blocks, num_tokens, file.tokens, shape, smollm2.folder / "other", 2)
        assert smollm2.restore(2, smollm2.folder / "other") == num_tokens
        prompt = [*file.tokens[:num_tokens], *ids[400:410]]
        restored, hot = smollm2.complete(prompt, 60, slot=2), smollm2.complete(prompt, 60, slot=1)
        assert restored == hot and hot[1] == num_tokens

    # What it computed since is taken alone, and is all there.
    later = SlotFile.open(smollm2.save(2, "later"), shape=shape)
    take(later, arena, blocks, 200, len(later.tokens))
    put(arena, blocks, len(later.tokens), later.tokens, shape, smollm2.folder / "joined", 2)
    assert (smollm2.folder / "joined").read_bytes() == (smollm2.folder / "later").read_bytes()


def test_random_conversations_come_back_from_blocks(smollm2: LlamaServer) -> None:
    come_back(smollm2)


def test_random_conversations_of_the_bundled_model_come_back_from_blocks(bundled: LlamaServer) -> None:
    come_back(bundled)


def come_back(server: LlamaServer) -> None:
    """The file that is put together is llama-server's own, to the last byte, and goes on as the slot does."""
    ids, chosen = server.tokenize(TEXT), random.Random(11)
    for number in range(NUM_CONVERSATIONS):
        begin, num_prompt = chosen.randrange(1000), chosen.randrange(2, 400)
        server.complete(ids[begin : begin + num_prompt], chosen.randrange(1, 30), slot=1)
        file = SlotFile.open(server.save(1, "own"))
        total, shape = len(file.tokens), file.shape
        blocks = chosen.sample(range(8), -(-total // 64))
        arena, _ = arena_of(shape, 0, 8)
        take(file, arena, blocks, 0, total)
        put(arena, blocks, total, file.tokens, shape, server.folder / "same", 1)
        assert (server.folder / "same").read_bytes() == (server.folder / "own").read_bytes(), number
        put(arena, blocks, total, file.tokens, shape, server.folder / "other", 2)
        assert server.restore(2, server.folder / "other") == total
        prompt = [*file.tokens, *ids[:5]]
        restored, hot = server.complete(prompt, 60, slot=2), server.complete(prompt, 60, slot=1)
        assert restored == hot and hot[1] == total, number


@in_one_cache
def test_a_slot_with_windows_of_one_cache_comes_back_from_blocks(gemma: LlamaServer) -> None:
    """It goes on as the slot does, as far as two slots of one cache compute the same: where they part, both next tokens
    are about as likely."""
    ids = gemma.tokenize(TEXT)[:710]
    file, _ = put_in_another_slot(gemma, ids[:700])
    prompt = [*file.tokens, *ids[700:]]
    restored, hot = gemma.scored(prompt, 60, slot=2), gemma.scored(prompt, 60, slot=1)
    assert restored[1] == hot[1] == len(file.tokens)
    pairs = list(zip(restored[0], hot[0], strict=True))
    num_equal = next((at for at, (ours, theirs) in enumerate(pairs) if ours[0] != theirs[0]), len(pairs))
    assert num_equal >= 8
    for (_, ours), (_, theirs) in pairs[: num_equal + 1]:
        assert abs(ours - theirs) <= NOISE


@in_f16
def test_a_slot_with_windows_comes_back_from_blocks(gemma: LlamaServer) -> None:
    ids = gemma.tokenize(TEXT)[:710]
    file, path = put_in_another_slot(gemma, ids[:700])
    prompt = [*file.tokens, *ids[700:]]
    restored, hot = gemma.complete(prompt, 60, slot=2), gemma.complete(prompt, 60, slot=1)
    assert restored == hot and hot[1] == len(file.tokens)

    # A prompt that ends where the file does is computed from its beginning.
    gemma.restore(2, path)
    assert gemma.complete(file.tokens, 1, slot=2)[1] == 0


def put_in_another_slot(gemma: LlamaServer, ids: list[int]) -> tuple[SlotFile, Path]:
    """Compute ids and a few more in slot 1, have them go through blocks into slot 2; return what was saved and put."""
    gemma.complete(ids, 8, slot=1)
    file = SlotFile.open(gemma.save(1, "own"))
    total, blocks = len(file.tokens), list(range(23, -1, -1))
    arena, slots = arena_of(file.shape, WINDOW, 24)
    assert slots is not None and all(slots.take(block) for block in blocks)
    take(file, arena, blocks, 0, total)
    assert resumable(arena, blocks, total) == total and resumable(arena, blocks, total - 1) == 0
    put(arena, blocks, total, file.tokens, file.shape, gemma.folder / "put", 2)
    assert gemma.restore(2, gemma.folder / "put") == total
    return file, gemma.folder / "put"


@in_f16
def test_a_prompt_that_leaves_the_text_finds_the_checkpoint_of_what_was_put(gemma: LlamaServer) -> None:
    """It goes on from the last token in it, which sees the row before the window of the next one."""
    ids = gemma.tokenize(TEXT)[:730]
    file, _ = put_in_another_slot(gemma, ids[:700])
    prompt, other = [*file.tokens, *ids[700:710]], [*file.tokens, *ids[720:]]
    for slot in (1, 2):
        gemma.complete(prompt, 1, slot)
        gemma.complete([*prompt, *ids[:700]], 8, slot)  # takes the cells of the window
    restored, hot = gemma.complete(other, 60, slot=2), gemma.complete(other, 60, slot=1)
    assert restored == hot and hot[1] == len(file.tokens) - 1


@in_f16
def test_a_window_that_was_written_round_is_put_in_order(gemma: LlamaServer) -> None:
    """Its cells are used again once all were: the file has them in another order than the tokens."""
    file, path = put_in_another_slot(gemma, gemma.tokenize(TEXT)[:1300])
    assert (np.diff(file.attention[1].positions) < 0).any()
    put_there = SlotFile.open(path, shape=file.shape)
    for section, (own, other) in enumerate(zip(file.attention, put_there.attention, strict=True)):
        by_position = [np.argsort(each.positions) for each in (own, other)]
        for layer in range(len(file.shape.attention[section].k)):
            for kind in KINDS:
                rows = [each.rows(section, layer, kind) for each in (file, put_there)]
                before, after = (each[order][-WINDOW:] for each, order in zip(rows, by_position, strict=True))
                assert (before == after).all()
    assert gemma.complete([*file.tokens, 5, 6, 7], 1, slot=2)[1] == len(file.tokens)


@in_f16
def test_llama_server_reuses_nothing_of_a_window_as_it_saved_it(gemma: LlamaServer) -> None:
    """Why a row is added; and why there is nothing to resume of a conversation that is not longer than the window."""
    ids = gemma.tokenize(TEXT)
    for num_tokens in (300, 700):
        gemma.complete(ids[:num_tokens], 8, slot=1)
        path = gemma.save(1, "own")
        tokens = SlotFile.open(path).tokens
        gemma.restore(2, path)
        assert gemma.complete([*tokens, 5, 6, 7], 1, slot=2)[1] == 0


def test_what_states_cost_is_measured(tmp_path: Path) -> None:
    """`python -m benchmarks llama-states`: the same program, briefly."""
    shown = (tmp_path / "shown").open("w")
    bench = StatesBench(REAL_MODELS["smollm2"].path(), (100, 200), new=36, repeats=1)
    assert run_states_bench(bench, Console(file=shown, width=300)) == 0
    shown.close()
    rows = (tmp_path / "shown").read_text().splitlines()
    assert [row.split()[1] for row in rows if " MB " in row] == ["100", "200"]
