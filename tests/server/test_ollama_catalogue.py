"""What Ollama's clients ask about models, through the official one: what is listed is what can be used."""

from __future__ import annotations

import re

import ollama
import pytest

from rekindle.config import ServerSettings
from rekindle.server.border import UNMANAGED
from rekindle.server.ollama.models import OllamaModelCard, OllamaRunning, OllamaTags
from rekindle.server.ollama.routes import rounded
from tests.server.conftest import Served, serving

SAID = [{"role": "user", "content": "Hello!"}]


def test_the_listed_name_can_be_shown_and_talked_to(served: Served) -> None:
    client = ollama.Client(host=served.url)
    (listed,) = client.list().models
    assert listed.model == "pocket:latest" and listed.digest is not None and len(listed.digest) == 64
    assert (listed.size or 0) > 1 << 20 and listed.details is not None
    assert (listed.details.format, listed.details.family) == ("safetensors", "llama")
    reply = client.chat(model=listed.model, messages=SAID, options={"num_predict": 1})
    assert (reply.model, reply.eval_count) == ("pocket:latest", 1)
    card = client.show(listed.model)
    assert card.details == listed.details and card.capabilities == ["completion", "tools"]
    assert card.modelinfo is not None and card.template == served.engine.encoder.template.sources["default"]
    family = card.modelinfo["general.architecture"]
    assert card.modelinfo[f"{family}.context_length"] == served.engine.max_context
    assert card.modelinfo[f"{family}.block_count"] == 8
    size = rounded(card.modelinfo["general.parameter_count"])
    assert listed.details.parameter_size == size and re.fullmatch(r"7\.\dM", size)
    (loaded,) = client.ps().models
    assert (loaded.model, loaded.digest, loaded.context_length) == (listed.model, listed.digest, 4096)
    assert (loaded.size or 0) >= (listed.size or 0) + served.engine.stats().hot_bytes and loaded.size_vram == 0
    assert loaded.expires_at is not None and loaded.expires_at.year == 9999


def test_answers_are_as_described(served: Served) -> None:
    OllamaTags.model_validate(served.send("GET", "/api/tags").json)
    OllamaRunning.model_validate(served.send("GET", "/api/ps").json)
    for body in ({"model": "pocket"}, {"name": "pocket:latest", "verbose": True}, {"model": "default", "system": ""}):
        OllamaModelCard.model_validate(served.send("POST", "/api/show", body).json)
    assert re.fullmatch(r"\d+\.\d+\.\d+", served.send("GET", "/api/version").json["version"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "llama3.2"}, 404, 'model "llama3.2" not found, try pulling it first'),
        ({"name": 'a "b'}, 404, 'model "a \\"b" not found'),
        ({"model": 5}, 400, "model"),
        ([], 400, "object"),
        (b"", 400, "not JSON"),
    ],
)
def test_what_cannot_be_shown_is_an_error_in_ollamas_shape(
    served: Served, body: object, status: int, words: str
) -> None:
    answer = served.send("POST", "/api/show", body)
    assert (answer.status, set(answer.json)) == (status, {"error"}) and words in answer.json["error"]


@pytest.mark.parametrize("name", UNMANAGED)
def test_models_are_not_managed_and_what_to_do_is_said(served: Served, name: str) -> None:
    path = "/api/blobs/sha256:12" if name == "blobs" else f"/api/{name}"
    answer = served.send("DELETE" if name == "delete" else "POST", path, {"model": "llama3.2"})
    assert answer.status == 400 and f"{name} is not served here, where pocket:latest is" in answer.json["error"]
    assert UNMANAGED[name] in answer.json["error"]


def test_the_official_client_reads_the_refusals(served: Served) -> None:
    client = ollama.Client(host=served.url)
    for ask in (lambda: client.pull("llama3.2"), lambda: client.delete("pocket"), lambda: client.embed("pocket", "Hi")):
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        assert caught.value.status_code == 400 and "pocket" in caught.value.error


def test_a_served_name_with_a_tag_gets_no_other(served: Served) -> None:
    with serving(served.engine, ServerSettings(served_model_name="hub/house:1b")) as running:
        assert running.send("GET", "/api/tags").json["models"][0]["name"] == "hub/house:1b"
        for name, status in (("hub/house:1b", 200), ("hub/house:latest", 404), ("hub/house", 404), ("pocket", 200)):
            assert running.send("POST", "/api/show", {"model": name}).status == status
    with serving(served.engine, ServerSettings(served_model_name="host:80/house")) as running:
        assert running.send("GET", "/api/tags").json["models"][0]["name"] == "host:80/house:latest"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (7_100_000, "7.1M"), (8_190_000_000, "8.2B"), (10**12, "1.0T")]
)
def test_numbers_of_parameters_are_rounded(count: int, text: str) -> None:
    assert rounded(count) == text
