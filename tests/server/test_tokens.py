"""Token ids over HTTP as vLLM and llama.cpp give them, and counts of a response's prompt."""

from __future__ import annotations

import pytest

from tests.server.conftest import Served

SAID = [{"role": "user", "content": "Where is the copper key?"}]


def test_tokenize_as_vllm(served: Served) -> None:
    ours = served.send("POST", "/v1/tokenize", {"text": "copper key"}).json
    theirs = served.send("POST", "/tokenize", {"prompt": "copper key", "return_token_strs": True}).json
    assert (theirs["tokens"], theirs["count"]) == (ours["ids"], ours["count"])
    assert "".join(theirs["token_strs"]) == "copper key" and theirs["max_model_len"] == served.engine.max_context
    assert served.send("POST", "/tokenize", {"prompt": "copper key"}).json["token_strs"] is None
    chat = served.send("POST", "/tokenize", {"messages": SAID, "model": "default"}).json
    assert chat["tokens"] == served.send("POST", "/v1/tokenize", {"messages": SAID}).json["ids"]
    cut = served.send("POST", "/tokenize", {"messages": SAID, "add_generation_prompt": False}).json["tokens"]
    assert cut == chat["tokens"][: len(cut)] and len(cut) < len(chat["tokens"])


def test_tokenize_as_llama_cpp(served: Served) -> None:
    answer = served.send("POST", "/tokenize", {"content": "copper key", "add_special": False}).json
    assert set(answer) == {"tokens"}
    back = served.send("POST", "/detokenize", answer).json
    assert back == {"prompt": "copper key", "content": "copper key"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, object], param: str) -> None:
    answer = served.send("POST", path, body)
    assert answer.status in (400, 404) and answer.error["param"] == param


def test_the_tokenizers_configuration(served: Served) -> None:
    found = served.send("GET", "/tokenizer_info").json
    assert found["eos_token"] == "<|im_end|>" and "<|im_start|>" in found["chat_template"]


def test_prompts_of_responses_are_counted(served: Served) -> None:
    body = {"input": "Where is the copper key?", "instructions": "Be brief."}
    count = served.send("POST", "/v1/responses/input_tokens", body).json
    answer = served.send("POST", "/v1/responses", {**body, "max_output_tokens": 1, "store": False}).json
    assert count == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    assert served.client().responses.input_tokens.count(input="Hello!").input_tokens > 3
    assert served.send("POST", "/v1/responses/input_tokens", {"input": 3}).status == 400
