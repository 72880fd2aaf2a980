"""A front of a llama-server that answers as its script says: what it is sent, what is refused, what is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle.text.prompt import PromptEncoder
from rekindle_backends.served import PROBE
from tests.backends.foreign import Foreign, event, foreign, last_event
from tests.backends.test_memory import LONG, asked, text_of
from tests.server.conftest import Answer, Served
from tests.server.scripted import serving

PROPS = {"total_slots": 2, "model_path": "/m.gguf", "default_generation_settings": {"n_ctx": 1024}, "build_info": "b1"}
NEUTRAL = {
    "stream": True,
    "return_tokens": True,
    "return_progress": True,
    "cache_prompt": True,
    "n_cache_reuse": 0,
    "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_last_n": 0,
    "logit_bias": [],
    "ignore_eos": False,
    "mirostat": 0,
    "dynatemp_range": 0.0,
    "min_keep": 0,
}
ONE = event(1, 5) + last_event(1)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODY = {"messages": [{"role": "user", "content": "talk"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def encoder(scripted_model: Path) -> PromptEncoder:
    return PromptEncoder.from_dir(scripted_model)


@pytest.fixture(scope="module")
def tokens(encoder: PromptEncoder) -> list[int]:
    """Ids of the text by which tokenizers are compared."""
    return encoder.encode(encoder.render_text(PROBE, add_leading=False)).tolist()


@contextmanager
def fronted(model: Path, store: Path | str = "off", **more: Any) -> Iterator[tuple[Foreign, Served]]:
    """A llama-server that answers so, and a front of it."""
    with (
        foreign(**{"props": PROPS, "max_model_len": 1024, **more}) as backend,
        serving(model=str(model), store=str(store), backend=f"llama.cpp={backend.url}") as front,
    ):
        yield backend, front


def chat(front: Served, **more: Any) -> Answer:
    return front.send("POST", "/v1/chat/completions", BODY | more)


def id_of(encoder: PromptEncoder, piece: bytes) -> int:
    """The id of the token with these bytes."""
    vocabulary = encoder.vocabulary
    return next(each for each in range(vocabulary.size) if vocabulary.shown(each) == piece)


def test_what_it_is_sent_is_neutral(scripted_model: Path, tokens: list[int]) -> None:
    body = event(0, 0, prompt_progress={"cache": 3, "processed": 4}) + event(1, 5) + last_event(1, cached=3)
    with fronted(scripted_model, body=body, tokens=tokens) as (backend, front):
        assert front.engine.max_context == 1024 and "its tokenizer is the same" in front.engine.notes[0]
        answer = chat(front, n=2, seed=-1).json
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        prompt = backend.asked[0].pop("prompt")
        assert prompt == backend.asked[1].pop("prompt") and len(prompt) == answer["usage"]["prompt_tokens"]
        assert {body.pop("seed") for body in backend.asked} == {(1 << 32) - 2, 0}
        assert backend.asked == [NEUTRAL | {"n_predict": 5}] * 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25}, {"top_k": 3, "top_p": 0.5, "min_p": 0.25}),
        ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5, "repeat_last_n": 1024}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5, "repeat_last_n": 64}),
        ({"frequency_penalty": -1}, {"frequency_penalty": -1, "repeat_last_n": 64}),
        ({"logit_bias": {"7": -100, "9": 1.5}}, {"logit_bias": [[7, -100.0], [9, 1.5]]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"grammar": 'root ::= "a" | "b"'}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ],
)
def test_what_is_passed_on(scripted_model: Path, given: dict[str, Any], sent: dict[str, Any]) -> None:
    with fronted(scripted_model, body=ONE) as (backend, front):
        assert chat(front, seed=3, **given).status == 200
        ((_, body),) = [(each.pop("prompt"), each) for each in backend.asked]
        expected = {**NEUTRAL, "n_predict": 5, "seed": 3, **sent}
        assert body == expected | {"temperature": given.get("temperature", 1.0)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"min_tokens": 2}, "min_tokens: llama-server cannot"),
        ({"repetition_penalty": 1.5, "presence_penalty": 1}, "repetition_penalty: not together with presence_penalty"),
        ({"structured_outputs": {"regex": "a+"}}, "takes JSON schemas, choices and GBNF only"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "not in Lark's"),
    ],
)
def test_what_is_refused(scripted_model: Path, given: dict[str, Any], says: str) -> None:
    with fronted(scripted_model, body=ONE) as (backend, front):
        answer = chat(front, **given)
        assert answer.status == 400 and says in answer.error["message"] and not backend.asked


def test_ends_are_found_here(scripted_model: Path, encoder: PromptEncoder) -> None:
    ids = [id_of(encoder, piece) for piece in (b"It is", b" in the", b" attic")]
    body = b"".join(event(number + 1, token_id) for number, token_id in enumerate(ids)) + last_event(3)
    with fronted(scripted_model, body=body) as (backend, front):
        by_text = chat(front, stop=" attic").json["choices"][0]
        by_token = chat(front, stop_token_ids=[ids[2]]).json["choices"][0]
        assert by_text["message"]["content"] == by_token["message"]["content"] == "It is in the"
        assert by_text["finish_reason"] == by_token["finish_reason"] == "stop"
        assert not {"stop", "stop_token_ids"} & {*backend.asked[0], *backend.asked[1]}


def test_log_probabilities(scripted_model: Path, encoder: PromptEncoder) -> None:
    said = {"id": 5, "logprob": -0.5, "top_logprobs": [{"id": 7, "logprob": -0.25}, {"id": 5, "logprob": -0.5}]}
    with fronted(scripted_model, body=event(1, 5, completion_probabilities=[said]) + last_event(1)) as (backend, front):
        (first,) = chat(front, logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
        assert first["logprob"] == -0.5 and [each["logprob"] for each in first["top_logprobs"]] == [-0.25, -0.5]
        assert backend.asked[0]["n_probs"] == 2
        assert chat(front, logprobs=True).status == 200 and backend.asked[1]["n_probs"] == 1


@pytest.mark.parametrize(
    ("text", "drafts", "is_certain"),
    [("€", False, True), ("\ufffd€", False, False), ("€", True, False), ("€", None, False)],
)
def test_what_is_certain_is_remembered(
    scripted_model: Path, encoder: PromptEncoder, tmp_path: Path, text: str, drafts: bool | None, is_certain: bool
) -> None:
    before = [id_of(encoder, piece) for piece in (b"It is", b" in the", b" attic")]
    gap = [id_of(encoder, piece) for piece in (b"\xe2", b"\x82", b"\xac")]
    after = [id_of(encoder, piece) for piece in (b" of the", b" house.")]
    num = len(before) + (2 if text == "€" else 3)  # that were drawn, before the last part of the character
    events = [event(at + 1, token_id) for at, token_id in enumerate(before)]
    events += [event(num + 1, gap[-1], text), event(num + 2, after[0]), event(num + 3, after[1])]
    body = b"".join(events) + last_event(num + 3)
    with fronted(scripted_model, tmp_path, drafts=drafts, body=body) as (_, front):
        first = asked(front, "ada", LONG)
        assert text_of(first) == f"It is in the attic{text} of the house."
        second = asked(front, "ada", LONG, text_of(first), "talk on")["rekindle"]
        known = [*first["rekindle"]["prompt_ids"], before[0]]  # what comes next may be joined with the last of them
        assert second["prompt_ids"][: len(known)] == known
        stored = [*known, *before[1:], *gap, *after]
        assert (second["prompt_ids"][: len(stored)] == stored) == is_certain
        assert (after[0] in second["prompt_ids"]) == is_certain  # which encoding does not give


@pytest.mark.parametrize("drafts", [True, None])
def test_what_an_older_build_drafts_is_delivered_and_remembered(
    scripted_model: Path, encoder: PromptEncoder, tmp_path: Path, drafts: bool | None
) -> None:
    """It counts all tokens of a draft before it sends one after the other."""
    pieces = [b"It is", b" in the", b" attic", b" of the", b" house."]
    ids = [id_of(encoder, piece) for piece in pieces]
    counts = [1, 4, 4, 4, 5]
    events = [event(num, each, piece.decode()) for num, each, piece in zip(counts, ids, pieces, strict=True)]
    with fronted(scripted_model, tmp_path, drafts=drafts, body=b"".join(events) + last_event(5)) as (_, front):
        first = asked(front, "ada", LONG)
        assert text_of(first) == "It is in the attic of the house."
        stored = [*first["rekindle"]["prompt_ids"], *ids]
        second = asked(front, "ada", LONG, text_of(first), "talk on")["rekindle"]
        assert second["prompt_ids"][: len(stored)] == stored


def test_a_reply_that_ends_inside_a_character(scripted_model: Path, encoder: PromptEncoder, tmp_path: Path) -> None:
    body = event(1, id_of(encoder, b"It is"), "It is") + last_event(3)
    with fronted(scripted_model, tmp_path, body=body) as (_, front):
        first = asked(front, "ada", LONG)
        assert text_of(first) == "It is" and first["choices"][0]["finish_reason"] == "length"
        second = asked(front, "ada", LONG, "It is", "talk on")["rekindle"]
        stored = [*first["rekindle"]["prompt_ids"], *first["rekindle"]["completion_ids"]]
        assert second["prompt_ids"][: len(stored)] == stored


def test_a_client_that_leaves_ends_the_request_there(scripted_model: Path) -> None:
    with fronted(scripted_model, hangs=True, body=event(1, 5) + event(2, 6)) as (backend, front):
        client = front.client()
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(iter(stream))
        stream.close()
        assert backend.left.wait(60)


@pytest.mark.parametrize(
    ("status", "body", "expected", "says"),
    [
        (503, b'{"error": {"code": 503, "message": "Loading model"}}', 503, "Loading model"),
        (400, b'{"error": {"code": 400, "message": "Failed to initialize samplers"}}', 400, "Failed to initialize"),
        (200, b'data: {"error": {"code": 500, "message": "out of memory"}}\n\n', 502, "out of memory"),
        (200, event(1, 5), 502, "broke off"),
        (200, event(1, 5) + last_event(1, "none"), 502, "ended the reply early: none"),
    ],
)
def test_errors(scripted_model: Path, status: int, body: bytes, expected: int, says: str) -> None:
    with fronted(scripted_model, status=status, body=body) as (_, front):
        answer = chat(front)
        assert answer.status == expected and says in answer.error["message"], answer.body


def test_a_prompt_that_its_slots_have_no_room_for_is_too_long_in_every_dialect(scripted_model: Path) -> None:
    """As when it was started again with shorter slots than this front was told of; longer ones are refused here."""
    said = {"code": 400, "message": "it exceeds the available context size", "type": "exceed_context_size_error"}
    body = json.dumps({"error": {**said, "n_prompt_tokens": 600, "n_ctx": 512}}).encode()
    with fronted(scripted_model, status=400, body=body) as (_, front):
        for found in ("600 tokens > 511 maximum", f"tokens > {front.engine.max_context - 1} maximum"):
            text = "talk " * (1 if "600" in found else 5000)
            more = {"messages": [{"role": "user", "content": text}]}
            openai, anthropic = chat(front, **more), front.send("POST", "/v1/messages", {**more, "max_tokens": 5})
            assert (openai.status, openai.error["code"]) == (400, "context_length_exceeded"), openai.body
            assert openai.error["param"] == "messages" and found in openai.error["message"]
            assert (anthropic.status, anthropic.json["error"]["type"]) == (400, "invalid_request_error")
            said_there = anthropic.json["error"]["message"]
            assert said_there.startswith("prompt is too long: ") and found in said_there and "backend" in said_there


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"props": None}, r"does not answer as a llama-server does \(status 404\): no reason given"),
        ({"props": {"total_slots": 1}}, "does not answer as a llama-server does"),
        ({"tokens": [1, 2, 3]}, "another tokenizer"),
        ({"returns_ids": False}, "returns no token ids"),
        ({"first": '{"error": {"message": "no such thing"}}'}, "no such thing"),
        ({"prompt_token_ids": [1]}, "changed the token ids of a prompt"),
    ],
    ids=str,
)
def test_an_unfit_server_at_the_start(scripted_model: Path, state: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), fronted(scripted_model, **state):
        pass


def test_what_is_said_of_it_as_another_server(scripted_model: Path) -> None:
    with (
        foreign(props=PROPS, tokens=[1], first=json.dumps({"content": "a"})) as backend,
        pytest.raises(ConfigError, match=r"write llama\.cpp=URL"),
        serving(model=str(scripted_model), store="off", backend=f"openai={backend.url}"),
    ):
        pass
