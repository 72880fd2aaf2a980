"""The scripted model: what it says is well formed, comes back as the same ids, and depends on all of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.coding_day.bench import write_model
from benchmarks.coding_day.model_script import Script, State
from benchmarks.coding_day.script import script_of
from benchmarks.coding_day.templates import TEMPLATES, Behaviour, behaviour
from benchmarks.coding_day.texts import Texts
from rekindle import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from rekindle.text.template import ChatTemplate

TEXTS = Texts(0)


def asking(*texts: str) -> list[dict[str, str]]:
    """A prompt of the user with these texts."""
    said = "\n".join([TEXTS.task(0), *texts])
    return [{"role": "system", "content": TEXTS.instructions(rules=20)}, {"role": "user", "content": said}]


@pytest.fixture(scope="module", params=[*(each.name for each in TEMPLATES), "reserialised-arguments"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Behaviour, Engine]]:
    chosen = behaviour(request.param)
    directory = write_model(chosen, tmp_path_factory.mktemp("model") / chosen.name, seed=0)
    with Engine.from_pretrained(str(directory), store="off", hot_bytes="64MiB", threads=1) as engine:
        yield chosen, engine
        engine.check()


def follows(script: Script, ids: dict[str, int], state: str, before: str, token: int) -> str | None:
    """The state of a token that may come in `state`; None where it may not."""
    known = script.states[state]
    allowed = known.followers() if known.place is not None else known.after.get(before, known.then)
    for name in sorted(allowed):
        pieces = script.states[name].pieces
        if token in [ids[piece] for piece in pieces] or (name == "cue" and token == ids["cue"]):
            return name
    return None


def test_replies_keep_to_the_script(served: tuple[Behaviour, Engine]) -> None:
    chosen, engine = served
    assert engine.promise == "bitwise"
    script = script_of(chosen)
    ids = {piece: one_token(engine, piece) for state in script.states.values() for piece in state.pieces}
    for number in range(4):
        prompt = asking(*(TEXTS.result("Read", {}, n) for n in range(number)))
        reply = engine.chat(f"a{number}", prompt, temperature=0, max_tokens=1000)
        ids["cue"] = reply.prompt_ids[-1]
        state, before = "cue", ""
        for token in reply.token_ids:
            after = follows(script, ids, state, before, token)
            assert after is not None, (state, before, engine.encoder.decode([token]), reply.text)
            state, before = after, state
        assert reply.finish_reason == "stop"
        assert any(piece in script.ends for name in script.states[state].then for piece in script.states[name].pieces)


def one_token(engine: Engine, piece: str) -> int:
    (token,) = engine.encoder.encode(engine.encoder.render_text(piece))
    return int(token)


def test_replies_come_back_as_the_same_ids(served: tuple[Behaviour, Engine]) -> None:
    _, engine = served
    for number in range(6):
        prompt = asking(TEXTS.result("Grep", {}, number))
        reply = engine.chat(None, prompt, temperature=0, max_tokens=1000)
        ids = [*reply.prompt_ids, *reply.token_ids]
        assert engine.encoder.canonical_tokens(np.asarray(ids, dtype=np.uint32)) == len(ids)


def test_replies_differ_from_prompt_to_prompt(served: tuple[Behaviour, Engine]) -> None:
    _, engine = served
    replies = set()
    for number in range(6):
        prompt = asking(TEXTS.result("Read", {}, number))
        replies.add(engine.chat(None, prompt, temperature=0, max_tokens=1000).text)
    assert len(replies) >= 3


def test_one_wrong_block_changes_what_is_said(served: tuple[Behaviour, Engine]) -> None:
    """What a session proves by equal replies: were the KV of a block another block's, the replies would not be."""
    _, engine = served
    size, differ = engine.spec.layout.block_tokens, []
    for number in range(2):
        prompt = normalise_messages(asking(TEXTS.result("Read", {}, number)))
        ids = [int(token) for token in engine.encoder.encode(engine.encoder.render_chat(prompt))]
        good = spoken(engine, ids)
        for block in range(1, len(ids) // size - 1, 3):
            # The same prompt, but for one block of it that holds another's tokens: the reply must hear of it.
            wrong = [*ids[: block * size], *ids[(block - 1) * size : block * size], *ids[(block + 1) * size :]]
            differ.append(spoken(engine, wrong) != good)
    assert sum(differ) >= len(differ) / 5, differ


def spoken(engine: Engine, ids: list[int]) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=1000)
    return engine.submit(GenerationRequest(token_ids=tuple(ids), params=params, reuse="off")).result().token_ids


@pytest.mark.parametrize("chosen", TEMPLATES, ids=lambda each: each.name)
def test_no_piece_stands_in_a_template(chosen: Behaviour) -> None:
    """What a template spells is a control token, and those have no text where they stand in content."""
    script = script_of(chosen)
    literals = ChatTemplate({"default": chosen.template}, {}).literals()
    assert not [piece for piece in script.pieces() for text in literals if piece in text]


def test_a_piece_stands_in_one_state() -> None:
    script = Script(
        {"cue": State((), ("a",)), "a": State((" x",), ("b",)), "b": State((" x",))}, ("\n",), ("<e>",), ("<e>",)
    )
    with pytest.raises(AssertionError, match="twice"):
        script.pieces()


def test_the_same_seed_writes_the_same_model(tmp_path: Path) -> None:
    first, second = (write_model(behaviour("dated"), tmp_path / name, seed=1) for name in "ab")
    for file in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
