"""Receipts before the imitation: what a slot had is named by hashes, verified from what was read of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.config import ServerSettings
from tests.backends.llama.test_slot_memory import Talk, front, kept
from tests.server.conftest import Served, serving
from tests.server.test_receipts import verified

__all__ = ["kept"]
pytestmark = pytest.mark.usefixtures("program")


def receipt_of_a_turn(served: Served, talk: Talk, count: int) -> dict[str, Any]:
    """Have the agent go on with so many tokens; the receipt of that."""
    prompt = [*talk.ids["a"], *talk.more(count)]
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "rekindle": {"return_ids": True}}
    answer = served.send("POST", "/v1/completions", body, x_agent_id="a")
    assert answer.status == 200, answer.body
    talk.ids["a"] = [*prompt, *answer.json["rekindle"]["completion_ids"]]
    found: dict[str, Any] = served.send("GET", f"/v1/receipts/{answer.json['id']}").json
    assert found["choices"][0]["read"]["tokens"] == answer.json["rekindle"]["reused_tokens"]
    return found


def test_what_a_slot_had_is_verified_from_the_blocks_that_were_read_of_it(
    gguf: Path, tmp_path: Path, kept: str
) -> None:
    talk = Talk(gguf, tmp_path / "log")
    with front(gguf, tmp_path / "store") as engine, serving(engine, ServerSettings()) as served:
        talk.turn(engine, "a", 290)
        shown = [receipt_of_a_turn(served, talk, count) for count in (40, 2, 60)]
    for found in shown:
        identity, (choice,) = found["identity"], found["choices"]
        assert (identity["backend"], identity["holds"], list(identity["kv"])) == ("llama.cpp", "kv", ["u8/u8"])
        assert choice["read"]["tokens"] > 280 and choice["read"]["hash"] is not None and choice["checked"] is None
        assert verified(tmp_path, found, "store") == (
            0,
            f"{found['id']}: verified, {choice['read']['tokens']} tokens that were read\n",
        )
    inside = [found["choices"][0]["read"]["tokens"] % 64 for found in shown]
    assert all(inside), "each of them ended inside of a block"
    forged = shown[0] | {"choices": [shown[0]["choices"][0] | {"read": shown[1]["choices"][0]["read"]}]}
    assert verified(tmp_path, forged, "store")[0] == 1
