"""Words of a script, said by a real llama-server under a grammar: kept over kills, and sent again to a plain one."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.backends.llama.real_server import executable
from tests.backends.llama.recording import write_model
from tools.real_clients.comparison import Comparison
from tools.real_clients.replay import replay
from tools.real_clients.script import Call, Reply, Script
from tools.real_clients.session import KILLS, TURNS, Front, turns_of, write

CONTEXT = 2048
FACTS = " ".join(f"Lamp {at} is green." for at in range(40))
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_words_are_the_scripts_before_and_after_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = executable()
    assert found
    monkeypatch.setenv("LLAMA_SERVER", found)
    model = write_model(tmp_path)
    replies = [Reply("I look.", [Call("look", {"at": 'a "x"'})]), Reply("It is green."), Reply("It still is.")]
    (tmp_path / "script.json").write_text(Script({"day": replies}).dumps(), "utf-8")
    front = Front(tmp_path, model, "-t 1", context=CONTEXT)
    messages = [{"role": "system", "content": FACTS}, {"role": "user", "content": "Which colour? step:day"}]
    with closing(front):
        front.rest()
        for number, kind in enumerate((None, "llama-server", "both")):
            if kind is not None:
                front.kill(both=kind == "both")
            url = f"http://127.0.0.1:{front.port}/v1/chat/completions"
            body = {"messages": messages, "tools": [TOOL], "max_tokens": 64}
            answer = httpx.post(url, json=body, headers={"X-Agent-ID": "ada"}, timeout=300)
            message = answer.raise_for_status().json()["choices"][0]["message"]
            assert message["content"].strip() == replies[number].text
            messages += [message, {"role": "tool", "tool_call_id": "1", "content": f"Green, {number}."}]
            if calls := message.get("tool_calls"):
                messages[-1]["tool_call_id"] = calls[0]["id"]
                assert json.loads(calls[0]["function"]["arguments"]) == {"at": 'a "x"'}
            front.rest()
        turns = turns_of(front.requests())
    write(tmp_path / TURNS, turns)
    write(tmp_path / KILLS, {1: "llama-server", 2: "both"})
    replay("ids", tmp_path, model, "-t 1", most=None, context=CONTEXT)
    replay("requests", tmp_path, model, "-t 1", most=None, context=CONTEXT)
    read = Comparison.read("ada", tmp_path)
    assert [each.place for each in read.asked] == [0, 1, 2]
    for arm, least in (("rekindle", 0), ("ids", 300), ("requests", 300)):
        cold, *later = [read.computed(arm, each) for each in read.asked]
        assert cold is not None and cold > 300
        assert all(each is not None and least <= each for each in later), (arm, later)
    assert not read.more()
