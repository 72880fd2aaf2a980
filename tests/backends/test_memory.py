"""What a front remembers: texts as the ids they were computed with, found by text, kept on disk, forgotten for good."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.cli.receipt import receipt_lines
from rekindle.errors import ConfigError
from rekindle.store import admin
from tests.backends.conftest import Pair, fronting
from tests.backends.foreign import chunk, foreign, usage
from tests.server.conftest import Served
from tests.server.scripted import serving
from tests.server.test_receipts import verified

LONG = "talk of the sea, the wind and the lamps " * 8


def asked(served: Served, agent: str, *turns: str, **more: Any) -> dict[str, Any]:
    """The answer to a conversation: what the user and the assistant said in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"messages": messages, "temperature": 0, "rekindle": {"return_ids": True}, **more}
    answer = served.send("POST", "/v1/chat/completions", body, x_agent_id=agent)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_turn_continues_the_last_one_with_its_ids(pair: Pair) -> None:
    first = asked(pair.front, "ada", LONG)
    said = first["rekindle"]
    assert said["outcome"] == "miss" and said["reused_tokens"] == 0
    second = asked(pair.front, "ada", LONG, text_of(first), "talk on")["rekindle"]
    stored = [*said["prompt_ids"], *said["completion_ids"]]
    assert second["prompt_ids"][: len(stored)] == stored
    assert second["outcome"] == "extend" and second["source"] == "own" and second["explanation"] is None
    assert second["reused_tokens"] == len(stored)


def test_a_receipt_says_that_blocks_hold_ids_alone(scripted_model: Path, computing: Served, tmp_path: Path) -> None:
    with fronting(scripted_model, computing, tmp_path / "store") as front:
        first = asked(front, "ada", LONG)
        second = asked(front, "ada", LONG, text_of(first), "talk on")
        found = front.send("GET", f"/v1/receipts/{second['id']}").json
    identity, (choice,) = found["identity"], found["choices"]
    assert (identity["backend"], identity["holds"], identity["kv"]) == ("vllm", "ids", {})
    assert choice["read"]["tokens"] == second["rekindle"]["reused_tokens"] and choice["is_whole"]
    code, said = verified(tmp_path, found, "store")
    assert code == 0 and "by their ids alone, their KV is vllm's" in said
    lines = list(receipt_lines(found, time.time()))
    assert lines[1].endswith(", computed by vllm") and "no KV here, blocks hold token ids alone" in lines[2]


def test_another_beginning_is_explained(pair: Pair) -> None:
    asked(pair.front, "eve", LONG)
    asked(pair.front, "eve", LONG, "Something else that nobody said", "talk on")
    (report, _) = pair.front.engine.agent("eve").why()
    assert report.outcome == "diverge" and report.explanation is not None
    assert report.explanation.cause == "text_differs" and report.explanation.message_index == 1


def test_texts_outlast_the_front(scripted_model: Path, computing: Served, tmp_path: Path) -> None:
    with fronting(scripted_model, computing, tmp_path) as front:
        first = asked(front, "bob", LONG)
        assert front.engine.flush()
        assert front.send("GET", "/v1/agents/bob").json["saved_tokens"] > 0
    with fronting(scripted_model, computing, tmp_path) as front:
        assert front.engine.num_warm_agents == 1
        second = asked(front, "bob", LONG, text_of(first), "talk on")["rekindle"]
        assert second["outcome"] == "extend" and second["reused_tokens"] >= first["usage"]["prompt_tokens"]
        front.engine.agent("bob").fork("cy")
        third = asked(front, "cy", LONG, text_of(first), "talk more")["rekindle"]
        assert third["source"] == "own" and third["reused_tokens"] >= first["usage"]["prompt_tokens"]
        assert front.engine.agent("cy").rewind(1) < third["prompt_tokens"]
        report = front.engine.agent("bob").purge()
        assert report.slots_freed >= 0 and {each.agent for each in front.engine.agents()} == {"cy"}
    with fronting(scripted_model, computing, tmp_path) as front:
        assert {each.agent for each in front.engine.agents()} == {"cy"}
    (store,) = admin.list_stores(tmp_path)
    assert store.num_agents == 1


def test_a_text_takes_few_bytes(pair: Pair) -> None:
    engine, text = pair.front.engine, "talk of salt and of bread " * 30
    said = text_of(asked(pair.front, "eli", text))
    engine.flush()
    before = engine.stats().store
    second = asked(pair.front, "eli", text, said, "talk on")["rekindle"]
    engine.flush()
    store = engine.stats().store
    assert before is not None and store is not None and store["used_bytes"] == 4096 * store["num_blocks"]
    num_new = second["prompt_tokens"] - second["reused_tokens"] + len(second["completion_ids"])
    assert second["prompt_tokens"] > 5 * 64 > num_new  # what both turns share is stored once
    assert 0 <= store["num_blocks"] - before["num_blocks"] <= -(-num_new // 64)
    info = engine.agent("eli").info()
    assert (info.hot_tokens, info.warm_tokens) == (0, 0) and info.saved_tokens == info.num_tokens


def test_another_tokenizer_finds_nothing(scripted_model: Path, tmp_path: Path) -> None:
    model, body = tmp_path / scripted_model.name, chunk([5], "length") + usage(0)
    shutil.copytree(scripted_model, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with foreign(body=body) as backend:
        for directory, num_found in ((scripted_model, 0), (model, 0), (scripted_model, 1)):
            flags = {"store": str(tmp_path / "texts"), "backend": f"vllm={backend.url}"}
            with serving(model=str(directory), **flags) as front:
                assert front.engine.num_warm_agents == num_found
                asked(front, "gus", LONG)


@pytest.mark.parametrize("path", ["load", "offload"])
def test_what_moves_kv_is_refused(pair: Pair, path: str) -> None:
    asked(pair.front, "dot", "talk briefly")
    answer = pair.front.send("POST", f"/v1/agents/dot/{path}")
    assert answer.status == 400 and "server that computes" in answer.error["message"]


@pytest.mark.parametrize(
    ("setting", "value"), [("kv", "bf16"), ("speculate", "off"), ("hot_bytes", "1GiB"), ("tier", "/tmp/tier")]
)
def test_settings_of_what_computes_are_refused(pair: Pair, tmp_path: Path, setting: str, value: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"{setting}: another server computes"),
        fronting(pair.model, pair.backend, tmp_path, **{setting: value}),
    ):
        pass


def test_another_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="another tokenizer"),
        serving(store=str(tmp_path), backend=f"openai={pair.backend.url}"),
    ):
        pass


def test_texts_go_from_an_engine_to_a_front_and_back(pair: Pair, scripted_model: Path, tmp_path: Path) -> None:
    settings = {"model": str(scripted_model), "threads": 1, "hot_bytes": "16MiB"}
    with serving(store=str(tmp_path / "own"), **settings) as own:
        first = asked(own, "eva", LONG)
        data = own.send("GET", "/v1/agents/eva/export").body
    with fronting(scripted_model, pair.backend, tmp_path / "front") as front:
        came = front.send("POST", "/v1/agents/eva/import", data).json
        assert (came["kv_tokens"], came["without_kv"]) == (0, "another server computes here, and has its own")
        assert came["saved_tokens"] == came["num_tokens"] == first["usage"]["total_tokens"]
    with fronting(scripted_model, pair.backend, tmp_path / "front") as front:
        second = asked(front, "eva", LONG, text_of(first), "talk on")["rekindle"]
        stored = [*first["rekindle"]["prompt_ids"], *first["rekindle"]["completion_ids"]]
        assert second["prompt_ids"][: len(stored)] == stored
        (branch,) = front.send("GET", "/v1/agents/eva").json["branch_infos"]
        assert branch["num_turns"] == 2, "the branch went on that was imported"
        back = front.send("GET", "/v1/agents/eva/export").body
    assert len(back) < len(data) // 4, "a front has no KV"
    with serving(store=str(tmp_path / "back"), **settings) as own:
        came = own.send("POST", "/v1/agents/eva/import", back).json
        assert came["kv_tokens"] == 0 and "is not what computes here" in came["without_kv"]
        ids = [*second["prompt_ids"], *second["completion_ids"]]
        words = (LONG, text_of(first), "talk on", "It is in the attic of the house.", "talk more")
        assert asked(own, "eva", *words)["rekindle"]["prompt_ids"][: len(ids)] == ids
