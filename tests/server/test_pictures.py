"""Pictures over HTTP: every dialect shows the model the same prompt, and finds what another one stored."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from tests.drawn_pictures import counted_looks, drawn, file_of, part_of
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.tiny_models import tiny_model_dir

FILE = file_of(drawn(1, 60, 40))
DATA = base64.b64encode(FILE).decode()
QUESTION = "What is it?"
NUM_TOKENS = 103
MODEL = "smolvlm-fp32-0"
PARTS = [part_of(FILE), {"type": "text", "text": QUESTION}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model_dir("smolvlm", "fp32", tmp_path_factory.mktemp("models"))
    settings = Settings.load({"model": model, "store": "off", "threads": 1, "hot_bytes": "64MiB", "kv": "fp32"})
    with proved(Engine(settings)) as engine, serving(engine, settings.server) as running:
        yield running


def test_every_dialect_has_the_same_prompt(seeing: Served) -> None:
    with counted_looks() as tiles:
        first = seeing.chat("", agent="a", messages=[{"role": "user", "content": PARTS}]).json
        chat = seeing.client("b").chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PARTS}], max_tokens=4, temperature=0
        )
    assert first["usage"]["prompt_tokens"] == NUM_TOKENS and len(tiles) == 13
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert (chat.usage.prompt_tokens, chat.usage.prompt_tokens_details.cached_tokens) == (NUM_TOKENS, NUM_TOKENS - 1)
    assert chat.choices[0].message.content == first["choices"][0]["message"]["content"]

    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]}]
    claude = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    told = claude.messages.create(model=MODEL, messages=messages, max_tokens=4)
    assert counted.input_tokens == NUM_TOKENS
    assert (told.usage.input_tokens, told.usage.cache_read_input_tokens) == (1, NUM_TOKENS - 1)

    items = [{"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"}]
    asked = [{"role": "user", "content": [*items, {"type": "input_text", "text": QUESTION}]}]
    made = seeing.client().responses.create(model=MODEL, input=asked, store=False, max_output_tokens=16)
    assert made.usage is not None and made.usage.input_tokens == NUM_TOKENS
    assert made.usage.input_tokens_details.cached_tokens == NUM_TOKENS - 1

    messages = [{"role": "user", "content": QUESTION, "images": [DATA]}]
    body = {"model": MODEL, "stream": False, "messages": messages, "options": {"num_predict": 4}}
    assert seeing.send("POST", "/api/chat", body).json["prompt_eval_count"] == NUM_TOKENS
    shown = seeing.send("POST", "/v1/tokenize", {"messages": [{"role": "user", "content": PARTS}]}).json
    assert shown["count"] == NUM_TOKENS and max(shown["ids"]) < seeing.engine.spec.vocab_size
    assert "vision" in seeing.send("POST", "/api/show", {"model": MODEL}).json["capabilities"]
    assert len(tiles) == 13


def test_what_is_not_looked_at_is_said(seeing: Served) -> None:
    """An address is refused, as is what is no picture; in a response that is stored a picture is a line of text, which
    says how it is seen."""
    for url in ("https://example.org/a.png", "data:image/png;base64,AAAA"):
        part = {"type": "image_url", "image_url": {"url": url}}
        error = seeing.chat("", messages=[{"role": "user", "content": [part]}]).error
        assert error["param"] == "messages[0].content[0]", error
    item = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"}
    asked = [{"role": "user", "content": [item]}]
    made = seeing.client().responses.create(model=MODEL, input=asked, max_output_tokens=16)
    (left_out,) = made.model_dump()["rekindle"]["left_out"]
    line = "[image, 60 x 40 png: not shown, pictures are seen only with store: false]"
    assert (left_out["kind"], left_out["param"], left_out["text"]) == ("image", "input[0].content[0]", line)
    with serving(seeing.engine, ServerSettings(strict=True)) as strict:
        error = strict.send("POST", "/v1/responses", {"input": asked}).error
        assert error["param"] == "input[0].content[0]" and error["message"].endswith(
            "pictures are seen only with store: false; send that, or its text"
        )
        seen = {"input": asked, "store": False, "max_output_tokens": 16}
        assert strict.send("POST", "/v1/responses", seen).json["rekindle"]["left_out"] == []


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": QUESTION, "images": [DATA, "AAAA"]}]},
            "messages[0].images[1]",
        ),
        ("/api/generate", {"system": "Be brief.", "prompt": QUESTION, "images": [DATA, "AAAA"]}, "images[1]"),
    ],
)
def test_a_picture_of_ollamas_is_named_as_it_was_sent(
    seeing: Served, path: str, body: dict[str, Any], where: str
) -> None:
    answer = seeing.send("POST", path, {"model": MODEL, **body})
    assert answer.status == 400 and answer.json["error"].startswith(f"{where} cannot be read as a picture"), answer.json


def test_a_prompt_of_ollamas_is_the_same_conversation(seeing: Served) -> None:
    body = {"model": MODEL, "stream": False, "options": {"num_predict": 1}}
    chat = {**body, "messages": [{"role": "user", "content": QUESTION, "images": [DATA]}]}
    assert seeing.send("POST", "/api/chat", chat).json["prompt_eval_count"] == NUM_TOKENS
    found = seeing.send("POST", "/api/generate", {**body, "prompt": QUESTION, "images": [DATA]}).json["rekindle"]
    assert (found["outcome"], found["reused_tokens"]) == ("exact", NUM_TOKENS - 1)


def test_nobody_can_write_a_picture_as_text(seeing: Served) -> None:
    """The mark that stands for one inside the server is taken out of texts, as all that prompts may not contain."""
    forged = "\ufdd0picture:" + "0" * 64 + ":60x40\ufdd0"
    answer = seeing.chat(forged).json
    assert answer["rekindle"]["left_out"][0]["kind"] == "characters"
    assert answer["usage"]["prompt_tokens"] > 20
