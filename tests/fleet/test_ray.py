"""Replicas under Ray Serve: one is killed, and its agents go on at the other with their memory."""

from __future__ import annotations

import urllib.error
import urllib.request
from itertools import count
from pathlib import Path

import pytest

from rekindle import Engine
from tests.fleet.serving import Fleet, fleet, get, until

FILLER = "".join(f"The weather on day {day} was mild, and nobody saw anything odd in the garden. " for day in range(30))
MOST = 40  # agents until each replica has three of its own: the ring scatters them
BLOCK = 64


def spoken(agent: str, *replies: str) -> list[dict[str, str]]:
    """The messages of an agent's next request after these replies."""
    questions = [f"I am {agent}. {FILLER}The copper key is in the attic.", "Thank you.", "Where is the key?"]
    said = [{"role": "user", "content": questions[0]}]
    for reply, question in zip(replies, questions[1:], strict=False):
        said += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
    return said


def agents_at(url: str, kind: str = "agent") -> set[str]:
    listed = {each["id"] for each in get(f"{url}/v1/agents")["data"]}
    return {each for each in listed if each.startswith(kind)}


def talked(running: Fleet) -> dict[str, list[str]]:
    """Let agents speak twice until each replica has three of them; the replies of each.

    Ray's proxy knows a replica some time after it listens: agents that speak before may move.
    """
    urls = running.targets().values()
    early = (running.ask(f"early-{number}", spoken("early")) for number in count())
    until(lambda: next(early) and all(agents_at(url, "early") for url in urls), "a ring of two replicas")
    replies: dict[str, list[str]] = {}
    for agent in (f"agent-{number}" for number in range(MOST)):
        replies[agent] = []
        for _ in range(2):
            replies[agent].append(running.ask(agent, spoken(agent, *replies[agent]))[0])
        if min(len(agents_at(url)) for url in urls) >= 3:
            break
    return replies


def test_agents_of_a_killed_replica_go_on_at_the_other(tmp_path: Path) -> None:
    undisturbed = Engine.from_pretrained(store=tmp_path / "undisturbed", threads=1, hot_bytes="64MiB")
    with undisturbed, fleet(tmp_path) as running:
        replies = talked(running)
        before = running.targets()
        homes = {slot: agents_at(url) for slot, url in before.items()}
        assert sorted(homes) == ["0", "1"] and not homes["0"] & homes["1"], "an agent stays at one replica"
        until(lambda: is_exported(before), "all turns in the tier")
        running.kill(before["0"])
        for agent, (first, second) in replies.items():
            texts, last = [], None
            for told in ([], [first], [first, second]):
                last = undisturbed.chat(agent, spoken(agent, *told), temperature=0, max_tokens=12)
                texts.append(last.text)
            assert last is not None and texts[:2] == [first, second]
            reply, report = running.ask(agent, spoken(agent, first, second))
            assert (reply, report["outcome"]) == (texts[2], "extend")
            assert report["reused_tokens"] >= last.report.reused_tokens - BLOCK, "all but one block"
        assert get(f"{before['1']}/v1/stats")["tier"]["imported_objects"] > 0
        heirs = until(lambda: both(running, other_than=before["0"]), "a replica in place of the killed one")
        assert agents_at(heirs["0"]) >= homes["0"], "what the killed one has saved is warm there"
        for url in heirs.values():
            assert "<title>Rekindle</title>" in get(f"{url}/") and "\nrekindle_" in get(f"{url}/metrics")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{running.url}/fleet")
    assert not [*(tmp_path / "store").rglob("*-wal")], "replicas that stop close their stores"


def is_exported(targets: dict[str, str]) -> bool:
    """Whether everything is saved, and then in the tier."""
    agents = [each for url in targets.values() for each in get(f"{url}/v1/agents")["data"]]
    if any(each["saved_tokens"] < each["num_tokens"] for each in agents):
        return False
    return not any(get(f"{url}/v1/stats")["tier"]["waiting_exports"] for url in targets.values())


def both(running: Fleet, *, other_than: str) -> dict[str, str] | None:
    targets = running.targets()
    return targets if len(targets) == 2 and targets["0"] != other_than else None
