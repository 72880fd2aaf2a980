"""With the real llama-server and tiny models with recurrent layers or windows: it goes on from ends of turns."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rekindle import Engine
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama.real_server import LlamaServer
from tests.backends.llama.reasoning import Reasoned
from tests.backends.llama.test_transfer import arena_of
from tests.backends.llama.tiny_hybrids import CONTEXT, HYBRIDS, WINDOWED, write


@pytest.fixture(params=HYBRIDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.gguf"
    write(request.param, path)
    return path


def drawn(count: int, seed: int = 7) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(300, 3000, count)]


def test_an_earlier_turn_comes_back_from_later_rows_and_its_state(model: Path, tmp_path: Path) -> None:
    flags = ("-c", str(2 * CONTEXT), "-np", "2", "-t", "1")
    with LlamaServer(model, tmp_path, *flags) as server:
        server.complete(drawn(230), 8, slot=0)
        early = SlotFile.open(server.save(0, "early"))
        cut, shape = len(early.tokens), early.shape
        assert cut == 237 and early.state is not None and early.state.num_tokens == cut
        prompt = [*early.tokens.tolist(), *drawn(90, seed=8)]
        hot = server.complete(prompt, 30, slot=0)
        assert hot[1] == cut
        late = SlotFile.open(server.save(0, "late"), shape=shape)
    arena, slots = arena_of(shape, 0, 8)
    blocks = [6, 2, 0, 4, 1, 7, 3, 5]
    assert slots is not None and slots.take(blocks[3]) and slots.take(blocks[5])
    take(early, arena, blocks, 0, 192)  # the block in which the turn ended has its rows from the later file
    take(late, arena, blocks, 192, len(late.tokens))
    assert resumable(arena, blocks, len(late.tokens)) == len(late.tokens)
    assert resumable(arena, blocks, len(late.tokens) - 1) == 0
    take(early, arena, blocks, cut, cut)
    with LlamaServer(model, tmp_path, *flags) as server:
        put(arena, blocks, cut, late.tokens, shape, tmp_path / "same", 0)
        assert (tmp_path / "same").read_bytes() == (tmp_path / "early").read_bytes()
        put(arena, blocks, cut, late.tokens, shape, tmp_path / "other", 1)
        assert server.restore(1, tmp_path / "other") == cut
        assert server.complete(prompt, 30, slot=1) == hot
        # A prompt that leaves the text one token before has nothing to go on from.
        server.restore(1, tmp_path / "other")
        assert server.complete([*prompt[: cut - 1], *drawn(9)], 1, slot=1)[1] == 0


def front(model: Path, folder: Path) -> Engine:
    """Rekindle before a llama-server with one slot; its store is in a folder."""
    flags, store = f"-np 1 -c {CONTEXT} -t 1", str(folder / "store")
    return Engine(model=str(model), backend="llama.cpp", backend_flags=flags, store=store, hot_bytes=64 << 20)


def asked(engine: Engine, plain: LlamaServer, agent: str, ids: list[int], most: int) -> tuple[list[int], int]:
    """The reply to an agent, which is compared with another server's, and how many tokens were computed for it."""
    result = engine.agent(agent).generate(np.array(ids, np.uint32), max_tokens=most, temperature=0, ignore_eos=True)
    wanted, _ = plain.complete(ids, most, slot="ab".index(agent))
    assert [*result.token_ids] == wanted, f"{agent} got another reply"
    return wanted, len(ids) - result.report.hot_tokens - result.report.warm_tokens


@pytest.mark.parametrize("model", [*HYBRIDS, *WINDOWED], indirect=True)
def test_turns_compute_what_is_new(model: Path, tmp_path: Path) -> None:
    """Two agents in one slot, their turns compared with those of a server with a slot for each."""

    def turn(engine: Engine, agent: str, count: int, seed: int, most: int = 10) -> int:
        """One more turn of an agent; return how many tokens were computed."""
        ids = [*texts[agent], *drawn(count, seed)]
        reply, computed = asked(engine, plain, agent, ids, most)
        texts[agent] = [*ids, *reply]
        return computed

    texts: dict[str, list[int]] = {"a": [], "b": []}
    with LlamaServer(model, tmp_path, "-c", str(2 * CONTEXT), "-np", "2", "-t", "1") as plain:
        with front(model, tmp_path) as engine:
            for number, agent in enumerate("ab"):
                turn(engine, agent, 200, number, most=70)
            ends = dict(texts)
            assert [turn(engine, agent, 70, 3) for agent in "ab"] == [71] * 2
            assert engine.flush()
            ours = [each for each in psutil.Process().children(recursive=True) if each.name() == "llama-server"]
            (server,) = (
                each for each in ours if f"{tmp_path}/" not in each.cmdline()
            )  # the other one's slots are there
            server.send_signal(signal.SIGKILL)
            time.sleep(0.3)
            until = time.monotonic() + 60
            while not engine.health().computes:
                assert time.monotonic() < until, "it was not started again"
                time.sleep(0.05)
            assert [turn(engine, agent, 70, 4) for agent in "ab"] == [71] * 2
        with front(model, tmp_path) as engine:
            assert [turn(engine, agent, 70, 5) for agent in "ab"] == [71] * 2
            engine.check()
            # The first turn's end, which both have left; rows of a window that far back are not kept.
            for agent in "ab" if model.stem in HYBRIDS else "":
                ids = np.array([*ends[agent], *drawn(20, 6)], np.uint32)
                report = engine.agent(agent).generate(ids, max_tokens=1, temperature=0).report
                assert report.hot_tokens + report.warm_tokens == len(ends[agent]) - 1


def test_prompts_go_on_from_where_reasoning_began(model: Path, tmp_path: Path) -> None:
    """Two agents in one slot, with tools between messages; replies are compared as above."""
    agents = {name: Reasoned(drawn(2, seed=1)) for name in "ab"}

    def turns(engine: Engine, kind: str, seed: int) -> list[int]:
        """A turn of both; return how many tokens each computed that all later prompts have already."""
        found = []
        for name, agent in agents.items():
            new = drawn(200 if seed == 2 else 20, 10 * seed + ord(name))
            known = len(agent.before) if kind == "message" else len(agent.prompt) + len(agent.turns[-1][1])
            ids = agent.message(new) if kind == "message" else agent.result(new)
            reply, computed = asked(engine, plain, name, ids, 80)
            agent.replied(reply)
            found.append(computed - (len(ids) - known))
        return found

    with LlamaServer(model, tmp_path, "-c", str(2 * CONTEXT), "-np", "2", "-t", "1") as plain:
        with front(model, tmp_path) as engine:
            for seed, kind in enumerate(("message", "message", "result", "result", "message"), 2):
                over = turns(engine, kind, seed)
                assert over == ([0, 0] if seed == 2 else [1, 1]), kind
        with front(model, tmp_path) as engine:
            for seed, kind in enumerate(("message", "result", "message"), 7):
                assert turns(engine, kind, seed) == [1, 1], kind
