"""Replicas under Ray Serve: one is killed, and its agents go on at the other with their memory."""

from __future__ import annotations

from pathlib import Path

from rekindle import Engine
from tests.fleet.serving import Fleet, fleet, get, until

FILLER = "".join(f"The weather on day {day} was mild, and nobody saw anything odd in the garden. " for day in range(30))
MOST = 40  # agents until each replica has three of its own: the ring scatters them
BLOCK = 64


def first_words(agent: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"I am {agent}. {FILLER}The copper key is in the attic."}]


def continued(messages: list[dict[str, str]], reply: str, question: str) -> list[dict[str, str]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": question}]


def agents_at(url: str) -> set[str]:
    return {each["id"] for each in get(f"{url}/v1/agents")["data"]}


def talked(running: Fleet) -> dict[str, list[dict[str, str]]]:
    """Let agents say something until each replica has three; what they said, with the question that comes next."""
    talks = {}
    for number in range(MOST):
        agent = f"agent-{number}"
        reply, _ = running.ask(agent, first_words(agent))
        talks[agent] = continued(first_words(agent), reply, "Where is the key?")
        if min(len(agents_at(url)) for url in running.targets().values()) >= 3:
            break
    return talks


def test_agents_of_a_killed_replica_go_on_at_the_other(tmp_path: Path) -> None:
    undisturbed = Engine.from_pretrained(store=tmp_path / "undisturbed", threads=1, hot_bytes="64MiB")
    with undisturbed, fleet(tmp_path) as running:
        talks = talked(running)
        before = running.targets()
        homes = {slot: agents_at(url) for slot, url in before.items()}
        assert sorted(homes) == ["0", "1"] and not homes["0"] & homes["1"]
        until(lambda: exported(before) == len(talks), "all agents in the tier")
        running.kill(before["0"])
        for agent, messages in talks.items():
            wanted = undisturbed.chat(agent, first_words(agent), temperature=0, max_tokens=12)
            reply, report = running.ask(agent, messages)
            assert messages[1]["content"] == wanted.text
            assert report["outcome"] == "extend", (agent, report)
            assert report["reused_tokens"] >= wanted.report.prompt_tokens - BLOCK, "all but one block"
            assert reply == undisturbed.chat(agent, messages, temperature=0, max_tokens=12).text
        assert get(f"{before['1']}/v1/stats")["tier"]["imported_objects"] > 0
        heirs = until(lambda: both(running, other_than=before["0"]), "a replica in place of the killed one")
        assert agents_at(heirs["0"]) >= homes["0"], "what the killed one has saved is warm there"
        for url in heirs.values():
            assert "<title>Rekindle</title>" in get(f"{url}/") and "\nrekindle_" in get(f"{url}/metrics")


def exported(targets: dict[str, str]) -> int:
    tiers = [get(f"{url}/v1/stats")["tier"] for url in targets.values()]
    return sum(tier["exported_heads"] for tier in tiers) if not any(tier["waiting_exports"] for tier in tiers) else 0


def both(running: Fleet, *, other_than: str) -> dict[str, str] | None:
    targets = running.targets()
    return targets if len(targets) == 2 and targets["0"] != other_than else None
