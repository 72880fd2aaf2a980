"""What one tenant keeps and uses takes nothing from another: sessions, responses, pins, tokens of a day, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import MiB, ServerSettings, Settings
from rekindle.server.gate.limits import MEMORY_BYTES, kept_bytes
from rekindle.server.gate.quotas import DAY_S, USAGE_FILE, Quotas, Tokens
from rekindle.server.responses.stored import MAX_BYTES
from rekindle.store.files.veil import Veil
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.sessions.http.coordinating import SESSIONS, Session

TENANTS = ServerSettings(api_keys={"a": "key-a", "b": "key-b"})  # and the namespace "default"
SESSION_BYTES = MiB // 3  # of each


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = {"store": tmp_path_factory.mktemp("store"), "threads": 1, "hot_bytes": "64MiB", "disk_bytes": "8MiB"}
    more = {"api_keys": dict(TENANTS.api_keys)}
    with proved(Engine(Settings.load({**flags, **more}))) as engine:
        with serving(engine, TENANTS) as running:
            yield running
        engine.check()


LONG = "The copper key is in the warehouse. " * 389  # 14,004 bytes, which fit the context


def create(served: Served, key: str, persona: str) -> Any:
    body = {"agents": [{"name": "Ada", "persona": persona}, {"name": "Bo", "agent": f"bo-{key}"}]}
    return served.send("POST", SESSIONS, body, key=key)


def refused(answer: Any) -> str:
    assert answer.status == 400 and answer.error["code"] == "quota_exceeded", answer.body
    message: str = answer.error["message"]
    return message


def test_sessions_of_a_namespace_have_so_many_bytes_and_others_have_theirs(served: Served) -> None:
    made = []
    while (answer := create(served, "key-a", LONG)).status == 200:
        made.append(Session(served, answer.json["id"], "key-a"))
    assert len(made) in range(20, 26)
    message = refused(answer)
    assert f"namespace 'a' has {len(made)} sessions of" in message and "it may have 0.3 MB: delete some" in message
    assert "'b'" not in message
    other = create(served, "key-b", LONG)
    assert other.status == 200, "another tenant has its own room"

    first = made[0]
    assert first.send("POST", "/messages", {"text": LONG}).status == 400
    assert first.send("POST", "/messages", {"text": "A word more."}).status == 200
    while (answer := first.send("POST", "/messages", {"text": "z" * 700})).status == 200:
        pass
    refused(answer)
    assert len(first.get("/messages")["data"]) > 1, "what is there can be read"
    fork = first.send("POST", "/agents/Ada/fork", {"target": "Cleo", "persona": "z" * 2_000})
    refused(fork)
    assert Session(served, other.json["id"], "key-b").send("POST", "/messages", {"text": "Hi."}).status == 200

    assert made[-1].send("DELETE", "").status == 200
    assert first.send("POST", "/messages", {"text": "z" * 700}).status == 200
    assert create(served, "key-a", "short").status == 200


def test_what_is_kept_lies_within_the_disk_budget(served: Served, tmp_path: Path) -> None:
    stats = served.engine.stats().store
    assert stats is not None and stats["disk_bytes"] == 8 * MiB
    assert kept_bytes(served.engine, TENANTS) == SESSION_BYTES
    assert kept_bytes(served.engine, ServerSettings()) == MiB


def test_without_a_disk_they_have_a_part_of_memory() -> None:
    with Engine(Settings.load({"store": "off", "threads": 1, "hot_bytes": "16MiB"})) as engine:
        assert kept_bytes(engine, TENANTS) == MEMORY_BYTES // 3 <= MAX_BYTES


def test_a_pin_beyond_the_tenants_part_is_refused_and_others_can_pin(served: Served) -> None:
    answers = []
    for number in range(30):
        agent = f"a{number}"
        assert served.chat(f"Remember what number {number} says. " * 40, key="key-a", agent=agent).status == 200
        answers.append(served.send("POST", f"/v1/agents/{agent}/pin", key="key-a"))
        if answers[-1].status != 200:
            break
    assert "pinned agents of namespace 'a' may have" in refused(answers[-1]) and len(answers) > 1
    assert served.chat("Remember me. ", key="key-b", agent="mine").status == 200
    assert served.send("POST", "/v1/agents/mine/pin", key="key-b").status == 200
    assert served.send("DELETE", "/v1/agents/a0/pin", key="key-a").status == 200
    assert served.send("POST", f"/v1/agents/a{len(answers) - 1}/pin", key="key-a").status == 200


def test_tokens_of_a_day_run_out_for_their_namespace_alone_and_over_restarts(served: Served) -> None:
    settings = ServerSettings(
        api_keys=TENANTS.api_keys, generated_tokens_per_day=10, computed_tokens_per_day=10**6, admin_key="root"
    )
    file = served.engine.settings.store.own_directory() / USAGE_FILE
    file.unlink(missing_ok=True)
    short = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 4}
    with serving(served.engine, settings) as running:
        first = running.chat("Say it.", key="key-a", ignore_eos=True)
        assert [first.headers[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining")] == ["10", "10"]
        streamed = running.chat("Say it.", key="key-a", ignore_eos=True, stream=True)
        assert streamed.headers["x-ratelimit-remaining-tokens"] == "6"
        over = running.chat("Say it.", key="key-a", ignore_eos=True)  # what has begun ends
        assert (over.status, over.headers["x-ratelimit-remaining-tokens"]) == (200, "2")
        refused = running.chat("Say it.", key="key-a")
        assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
        assert "namespace 'a' has used 12 of the 10 tokens of replies" in refused.error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= DAY_S
        messages = running.send("POST", "/v1/messages", short, key="key-a")
        assert messages.status == 429 and messages.json["error"]["type"] == "rate_limit_error"
        assert messages.headers["anthropic-ratelimit-output-tokens-remaining"] == "0"
        assert int(messages.headers["anthropic-ratelimit-input-tokens-remaining"]) < 10**6
        assert messages.headers["anthropic-ratelimit-output-tokens-reset"].endswith("T00:00:00Z")
        assert running.send("POST", "/v1/messages/count_tokens", short, key="key-a").status == 200
        assert running.send("POST", "/api/chat", {**short, "model": "pocket"}, key="key-a").status == 429
        assert running.send("GET", "/v1/agents", key="key-a").status == 200
        assert running.chat("Say it.", key="key-b", ignore_eos=True).status == 200
        figures = running.send("GET", "/metrics", key="root").body.decode()
        assert 'rekindle_tokens_used_today{kind="generated",namespace="a"} 12.0' in figures
        assert 'rekindle_tokens_per_day{kind="generated",namespace="a"} 10.0' in figures
    with serving(served.engine, settings) as again:
        assert again.chat("Say it.", key="key-a").status == 429
    file.write_text("{")
    with serving(served.engine, settings) as anew:
        assert anew.chat("Say it.", key="key-a").status == 200
    assert file.with_name(f"{USAGE_FILE}.damaged").exists()


def used(served: Served) -> list[int]:
    """What a namespace has used today: computed, generated."""
    figures = served.send("GET", "/metrics", key="root").body.decode()
    kinds = ("computed", "generated")
    found = (re.search(rf'used_today{{kind="{kind}",namespace="a"}} (\d+)', figures) for kind in kinds)
    return [int(each[1]) if each else 0 for each in found]


def test_listeners_and_turns_that_are_left_count_too(tmp_path: Path) -> None:
    settings = replace(TENANTS, computed_tokens_per_day=10**6, admin_key="root")
    flags = {"store": tmp_path, "threads": 1, "hot_bytes": "64MiB"}
    plan = {"agents": [{"name": "Ada"}, {"name": "Bo"}], "setting": LONG[:2000], "sampling": {"ignore_eos": True}}
    with proved(Engine(Settings.load(flags))) as engine, serving(engine, settings) as running:
        talk = Session(running, running.send("POST", SESSIONS, plan, key="key-a").json["id"], "key-a")
        (turn,) = talk.post("/turn", {"speaker": "Ada"})["turns"]
        running.until_idle()
        heard = sum(each["taken_in_tokens"] for each in talk.get("")["agents"])
        computed, generated = used(running)
        assert computed == turn["rekindle"]["computed_tokens"] + heard > heard > 100
        with talk.stream("POST", "/turn/stream", {"speaker": "Bo"}) as events:
            for kind, _ in events:
                if kind == "token":
                    break
        running.until_idle()
        assert used(running)[1] > generated, "what was said until then"


def test_an_encrypted_store_names_no_tenant(tmp_path: Path) -> None:
    flags = {"store": tmp_path, "store_key": "2b" * 32, "threads": 1, "hot_bytes": "64MiB"}
    settings = replace(TENANTS, api_keys={"acme-corp": "key-a"}, generated_tokens_per_day=8)
    with proved(Engine(Settings.load(flags))) as engine:
        file = engine.settings.store.own_directory() / USAGE_FILE
        with serving(engine, settings) as running:
            assert running.chat("Say it.", key="key-a", ignore_eos=True).headers["x-ratelimit-remaining-tokens"] == "8"
        with serving(engine, settings) as running:
            answer = running.chat("Say it.", key="key-a", ignore_eos=True)
            assert answer.headers["x-ratelimit-remaining-tokens"] == "4"
    assert file.is_file()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"acme-corp" in path.read_bytes()]


def test_usage_that_was_in_the_clear_is_read_once_and_sealed(tmp_path: Path) -> None:
    now, file = 20_000.75 * DAY_S, tmp_path / USAGE_FILE
    file.write_text('{"day": 20000, "namespaces": {"acme-corp": [31, 8]}}', "utf-8")
    for more, found in ((0, 31), (1, 32), (1, 33)):
        quotas = Quotas(lambda _: Tokens(), file, clock=lambda: now, veil=Veil(b"k" * 32, USAGE_FILE))
        quotas.start()
        quotas.spend("acme-corp", more, 0)
        assert quotas.used() == {"acme-corp": Tokens(found, 8)}
        quotas.close()
        assert b"acme-corp" not in file.read_bytes()
    other = Quotas(lambda _: Tokens(), file, clock=lambda: now, veil=Veil(b"o" * 32, USAGE_FILE))
    assert other.used() == {} and file.with_name(f"{USAGE_FILE}.damaged").is_file()


def test_a_day_ends_at_midnight(tmp_path: Path) -> None:
    now = 20_000.75 * DAY_S
    limits = {"a": Tokens(computed=100), "b": Tokens()}
    quotas = Quotas(limits.__getitem__, tmp_path / USAGE_FILE, clock=lambda: now)
    quotas.spend("a", computed=100, generated=7)
    quotas.spend("b", computed=100, generated=7)
    assert quotas.headers("b", "openai") == {} and quotas.problem("b") is None
    assert quotas.headers("a", "openai")["x-ratelimit-reset-tokens"] == "6h0m0s"
    problem = quotas.problem("a")
    assert problem is not None and problem.retry_after_s == DAY_S / 4
    quotas.start()
    quotas.close()
    now += DAY_S / 4
    after = Quotas(lambda _: Tokens(computed=100), tmp_path / USAGE_FILE, clock=lambda: now)
    for each in (quotas, after):
        assert each.problem("a") is None and each.used() == {}
