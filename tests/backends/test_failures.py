"""A backend that is away, busy, silent, wrong or strange: a clear error each time, nothing hangs, health says so."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from rekindle.errors import ConfigError
from rekindle.harness.client import free_port
from tests.backends.conftest import Pair, fronting
from tests.backends.foreign import Foreign, chunk, foreign, usage
from tests.server.conftest import Answer, Served
from tests.server.scripted import serving

SENT = set("model prompt stream stream_options return_token_ids max_tokens temperature top_p".split())
SENT |= {"presence_penalty", "frequency_penalty"}
BODY = {"messages": [{"role": "user", "content": "talk"}], "max_tokens": 5}


def over(model: Path, backend: Foreign, **flags: Any) -> Any:
    """A front over a foreign server, without a store."""
    return serving(model=str(model), store="off", backend=f"vllm={backend.url}", **flags)


def chat(front: Served, **more: Any) -> Answer:
    return front.send("POST", "/v1/chat/completions", BODY | more)


def test_a_foreign_server_is_enough(scripted_model: Path) -> None:
    body = chunk([5]) + chunk([6, 7]) + chunk([8], "length") + usage(3)
    with foreign(body=body) as backend, over(scripted_model, backend, backend_key="sesame") as front:
        answer = front.send("POST", "/v1/chat/completions", BODY, x_agent_id="ada").json
        assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 4
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        (sent,) = backend.asked
        assert sent["kv_transfer_params"] == {"namespace": "default", "agent": "ada"} and sent["cache_salt"]
        assert sent["top_k"] == 0 and sent["repetition_penalty"] == 1.0  # else vLLM takes the model's own
        assert set(backend.keys) == {"Bearer sesame"}
        assert "whether its tokenizer is the same is not known" in " ".join(front.engine.notes)


def test_what_a_server_is_sent_that_is_not_vllm(scripted_model: Path) -> None:
    with (
        foreign(body=chunk([5], "length") + usage(0)) as backend,
        serving(model=str(scripted_model), store="off", backend=f"openai={backend.url}/v1") as front,
    ):
        assert chat(front, n=2, seed=7, top_p=0.5).status == 200
        assert {body.pop("seed") for body in backend.asked} == {7, 8}
        assert backend.asked[0] == backend.asked[1] and set(backend.asked[0]) == SENT


def test_counts_of_reuse_are_those_of_the_last_chunk_and_of_the_prompt(scripted_model: Path) -> None:
    counted = {"usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    body = chunk([5], **counted) + chunk([6], "length") + usage(1_000_000)
    with foreign(body=body) as backend, over(scripted_model, backend) as front:
        usage_of = chat(front, max_tokens=2).json["usage"]  # the reply ends here before the last chunk comes
        assert usage_of["prompt_tokens_details"]["cached_tokens"] == usage_of["prompt_tokens"] > 3
        assert front.engine.stats().reused_tokens == usage_of["prompt_tokens"]
        (sent,) = backend.asked
        assert sent["kv_transfer_params"] == {"namespace": "default"}  # nobody said who asks


def test_namespaces_have_salts_of_their_own(scripted_model: Path) -> None:
    keys = {"api_key": "one", "api_keys": {"other": "two"}}
    with foreign(body=chunk([5], "length") + usage(0)) as backend, over(scripted_model, backend, **keys) as front:
        for key in ("one", "two", "one"):
            assert front.send("POST", "/v1/chat/completions", BODY, key=key).status == 200
        first, other, again = (body["cache_salt"] for body in backend.asked)
        assert first == again != other


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected", "says"),
    [
        (429, {"Retry-After": "7"}, b'{"error": {"message": "slow down"}}', 503, "slow down"),
        (503, {}, b"", 503, "the backend is busy"),
        (500, {}, b'{"message": "out of memory"}', 502, "out of memory"),
        (400, {}, b'{"error": {"message": "bad top_k"}}', 400, "bad top_k"),
        (401, {}, b"", 502, "REKINDLE_BACKEND_KEY"),
        (200, {}, b"", 502, "broke off"),
        (200, {}, chunk([5]), 502, "broke off"),
        (200, {}, chunk([1 << 40], "length") + usage(0), 502, "which the model does not have"),
        (200, {}, b"data: nonsense\n\n", 502, "no chunk of a completion"),
        (200, {}, b'data: {"error": {"message": "it burns"}}\n\n', 502, "it burns"),
        (200, {}, chunk([5], "abort") + usage(0), 502, "ended the reply early: abort"),
    ],
)
def test_a_refusal(
    scripted_model: Path, status: int, headers: dict[str, str], body: bytes, expected: int, says: str
) -> None:
    with foreign(status=status, headers=headers, body=body) as backend, over(scripted_model, backend) as front:
        answer = chat(front)
        assert answer.status == expected and says in answer.error["message"], answer.body
        if status == 429:
            assert answer.headers["retry-after"] == "7"
        if status == 401:
            assert any("REKINDLE_BACKEND_KEY" in problem for problem in front.engine.health().problems)
        backend.status, backend.body = 200, chunk([5], "length") + usage(0)
        assert chat(front).status == 200


def test_a_silent_backend_is_given_up(scripted_model: Path) -> None:
    with (
        foreign(hangs=True, body=chunk([5])) as backend,
        over(scripted_model, backend, silence_s=0.3) as front,
    ):
        answer = chat(front)
        assert answer.status == 503 and "sent nothing for 0.3 s" in answer.error["message"]
        assert backend.left.wait(60)


def test_a_line_that_never_ends_is_silence(scripted_model: Path) -> None:
    with (
        foreign(body=chunk([5]), repeats=b"x") as backend,
        over(scripted_model, backend, silence_s=0.5) as front,
    ):
        answer = chat(front)
        assert answer.status == 503 and "sent nothing for 0.5 s" in answer.error["message"]
        assert backend.left.wait(60)


def test_lines_that_say_nothing_are_no_silence(scripted_model: Path) -> None:
    beats = [b": waiting\n\n"] * 3
    with (
        foreign(body=b"".join(beats) + chunk([5], "length") + usage(0)) as backend,
        over(scripted_model, backend) as it,
    ):
        assert chat(it).status == 200


def test_an_error_without_an_end_is_not_read_to_its_end(scripted_model: Path) -> None:
    with foreign(status=500, repeats=b"x" * (4 << 20)) as backend, over(scripted_model, backend) as front:
        answer = chat(front)
        assert answer.status == 502 and "status 500 and more than 16 MiB" in answer.error["message"]
        assert backend.left.wait(60)


def test_an_error_that_cannot_be_parsed(scripted_model: Path) -> None:
    with foreign(status=500, body=b"[" * 100_000) as backend, over(scripted_model, backend) as front:
        answer = chat(front)
        assert answer.status == 502 and "status 500: [[[" in answer.error["message"]


def test_a_timeout_of_ours_ends_the_request_there(scripted_model: Path) -> None:
    with foreign(hangs=True) as backend, over(scripted_model, backend, request_timeout_s=0.3) as front:
        answer = chat(front)
        assert answer.status == 503 and "request_timeout_s" in answer.error["message"]
        assert backend.left.wait(60)


def test_a_client_that_leaves_ends_the_request_there(scripted_model: Path) -> None:
    body = chunk([5]) + chunk([6])
    with foreign(hangs=True, body=body) as backend, over(scripted_model, backend, ping_s=0.1) as front:
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="unused", max_retries=0)
        stream = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        next(iter(stream))
        stream.close()
        assert backend.left.wait(60)


def test_a_backend_that_goes_away_and_comes_back(scripted_model: Path) -> None:
    body = chunk([5], "length") + usage(0)
    with ExitStack() as stack:
        with foreign(body=body) as backend:
            front = stack.enter_context(over(scripted_model, backend))
            assert chat(front).status == 200 and front.engine.health().ok
        answer = chat(front)
        assert answer.status == 503 and answer.headers["retry-after"] == "2"
        assert "cannot be reached" in answer.error["message"]
        ready = front.send("GET", "/health/ready")
        assert ready.status == 503 and ready.json["status"] == "unavailable"
        with foreign(body=body, url=backend.url):
            assert chat(front).status == 200 and front.engine.health().ok


def test_no_server_at_the_start(scripted_model: Path) -> None:
    away = Foreign(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"no server answers at .*; start it first"), over(scripted_model, away):
        pass


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            {"takes_ids": False},
            r"\(status 404\): text input must be of type `str`\. For servers that take text alone.* GGUF",
        ),
        ({"returns_ids": False}, "returns no token ids"),
        ({"tokens": [1, 2, 3]}, "another tokenizer"),
        ({"models": "[" * 100_000}, "lists no models"),
        ({"models": '{"data": [{"id": ["x"]}, {"id": {}}, 3]}'}, "lists no models"),
        ({"models": "x" * (17 << 20)}, "more than 16 MiB"),
        *(
            ({"first": odd}, "returns no token ids")
            for odd in ("[1]", '{"choices": "abc"}', '{"choices": [1]}', "{" * 9999)
        ),
    ],
    ids=lambda each: str(each)[:60],
)
def test_an_unfit_backend_at_the_start(scripted_model: Path, state: dict[str, Any], says: str) -> None:
    with foreign(**state) as backend, pytest.raises(ConfigError, match=says), over(scripted_model, backend):
        pass


def test_a_model_that_is_not_there(pair: Pair, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"'other' is not served at .*; it has scripted"),
        fronting(pair.model, pair.backend, tmp_path, backend_model="other"),
    ):
        pass


@pytest.mark.parametrize(
    "address", ["vllm:", "vllm=", "sglang=http://x", "vllm=ftp://x", "vllm=http://u:p@x", "http://x"]
)
def test_addresses_that_are_none(scripted_model: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="backend: "), serving(model=str(scripted_model), backend=address):
        pass


def test_log_probabilities_that_do_not_come_are_an_error(scripted_model: Path) -> None:
    with foreign(body=chunk([5], "length") + usage(0)) as backend, over(scripted_model, backend) as front:
        answer = chat(front, logprobs=True)
        assert answer.status == 502 and "no log probabilities" in answer.error["message"]


def test_a_context_that_nobody_names(scripted_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(scripted_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    with foreign(max_model_len=None) as backend:
        with pytest.raises(ConfigError, match="max_context: neither"), over(model, backend):
            pass
        with over(model, backend, max_context=512) as front:  # which has no weights
            assert front.engine.max_context == 512
    with foreign(max_model_len=300) as backend, over(scripted_model, backend) as front:
        assert front.engine.max_context == 300
