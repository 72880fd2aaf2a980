"""GET /overview: all that the page draws, in one answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.server.answers.advice import ADVICE
from tests.proofs import proved
from tests.server.conftest import Served, serving

SYSTEM = {"role": "system", "content": "You keep the ledger of the mill. " + "Every sack is counted twice. " * 20}
LOOKS = 100  # that agents may take; one is looked at each time, and one that has changed since comes first
KEYS = {"team": "one-key", "other": "other-key"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store: Path = tmp_path_factory.mktemp("store")
    flags = {"store": store, "threads": 1, "hot_bytes": "64MiB", "api_keys": KEYS, "admin_key": "boss"}
    settings = Settings.load(flags)
    with proved(Engine(settings)) as engine, serving(engine, settings.server) as running:
        yield running


def tell(served: Served, agent: str, text: str, *, key: str = "one-key", system: str = SYSTEM["content"]) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    assert served.chat("", key=key, agent=agent, messages=messages).status == 200


def overview(served: Served, key: str = "one-key") -> Any:
    answer = served.send("GET", "/overview", key=key)
    assert answer.status == 200
    return answer.json


def all_known(served: Served) -> Any:
    """The overview, once the branches of all are in it: a busy engine is asked for one agent at a time."""
    found = overview(served)
    for _ in range(LOOKS):
        if all(agent["branch_infos"] for agent in found["agents"]):
            return found
        found = overview(served)
    raise AssertionError(found)


def test_agents_come_with_branches_requests_and_the_last_miss(served: Served) -> None:
    tell(served, "ada", "The copper key is in the attic.")
    tell(served, "ada", "The copper key is in the attic.")
    tell(served, "bo", "Mira owns the silver bell.")
    found = all_known(served)
    assert found["num_agents"] == len(found["agents"]) == 2
    agents = {agent["id"]: agent for agent in found["agents"]}
    (branch,) = agents["ada"]["branch_infos"]
    assert branch["shared_with"] == ["bo"]
    assert branch["shared_tokens"] > found["block_tokens"]
    again, first = agents["ada"]["requests"]
    assert (again["outcome"], first["outcome"]) == ("exact", "miss")
    kept = served.send("GET", f"/v1/receipts/{again['receipt']}", key="one-key").json["choices"][again["choice"]]
    assert kept["read"]["tokens"] == again["reused_tokens"]
    assert again["first_token_ms"] > 0
    assert again["reused_tokens"] + again["computed_tokens"] == again["prompt_tokens"]
    assert agents["ada"]["last_miss"] is None, "of a first turn nothing can be stored"


def test_a_miss_is_explained_with_both_texts_and_what_to_do(served: Served) -> None:
    for minute in (14, 15):
        tell(served, "dee", "Hello.", system=f"It is 4 March 2026, 10:{minute}. {SYSTEM['content']}")
    (dee,) = [agent for agent in overview(served)["agents"] if agent["id"] == "dee"]
    miss = dee["last_miss"]
    assert miss["explanation"]["cause"] == "date_line"
    assert "10:14" in miss["explanation"]["stored"]
    assert "10:15" in miss["explanation"]["sent"]
    assert miss["advice"] == ADVICE["date_line"]


def test_a_request_that_failed_is_told(served: Served) -> None:
    assert served.chat("x " * 6000, key="one-key", agent="eve").status == 400
    tell(served, "eve", "Hello.")
    (eve,) = [agent for agent in overview(served)["agents"] if agent["id"] == "eve"]
    assert [request["error"] is None for request in eve["requests"]] == [True, False]
    assert eve["requests"][1]["error"]["status"] == 400


def test_each_key_sees_its_own_namespace(served: Served) -> None:
    tell(served, "zoe", "Hello.", key="other-key")
    assert [agent["id"] for agent in overview(served, "other-key")["agents"]] == ["zoe"]
    assert "zoe" not in [agent["id"] for agent in overview(served)["agents"]]
    assert overview(served, "other-key")["namespace"] == "other"


def test_the_last_hour_and_what_it_saved_are_the_namespaces_own(served: Served) -> None:
    before = overview(served)
    for _ in range(2):
        tell(served, "fay", "Where is the brass bell?")
    tell(served, "gil", "Hello.", key="other-key")
    found = overview(served)

    def grown(outcome: str, field: str) -> int:
        grown: int = found["hour"][outcome][field] - before["hour"].get(outcome, {}).get(field, 0)
        return grown

    assert grown("exact", "requests") == 1 and found["hour"]["exact"]["first_token_ms"] > 0
    exact = next(agent for agent in found["agents"] if agent["id"] == "fay")["requests"][0]
    assert grown("exact", "prompt_tokens") == exact["prompt_tokens"]
    assert grown("exact", "reused_tokens") == exact["reused_tokens"]
    assert found["saved"]["reused_tokens"] >= before["saved"]["reused_tokens"] + exact["reused_tokens"]


def test_bytes_of_the_tiers_are_for_admins(served: Served) -> None:
    tell(served, "hal", "The iron gate is by the mill.")
    assert overview(served)["memory"] is None
    memory, stats = overview(served, key="boss")["memory"], served.send("GET", "/v1/stats", key="boss").json
    assert memory["hot_bytes"] == stats["hot_bytes"] > memory["hot_used"] > 0
    assert memory["disk_bytes"] == stats["store"]["disk_bytes"] >= memory["disk_used"] > 0
    assert memory["waiting_saves"] is not None
    assert (memory["checked"], memory["differed"]) == (stats["num_checked"], stats["num_differed"]) == (0, 0)


def test_what_was_written_to_the_disk_is_for_admins(served: Served) -> None:
    tell(served, "cy", "The brass bell is in the mill.")
    assert overview(served)["written"] is None
    written = overview(served, key="boss")["written"]
    assert written["a_day"] is None and written["today"] >= written["a_turn"] > 0
