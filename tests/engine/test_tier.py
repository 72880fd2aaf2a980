"""Replicas that share an object tier: an agent goes on at any of them, with the same reply as where it began."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import ConfigError, NotFound, StoreError
from tests.engine.replicas import SECRET, Replicas, after_a_kill, ask, exported, figures, history, running
from tests.server.scripted import write_scripted_model
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted") / "model")


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Iterator[Replicas]:
    yield from running(model, tmp_path)


def test_an_agent_goes_on_at_another_replica(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    told = history(turns=[first.text, "talk on"])
    here, there = ask(other, told), ask(one, told)
    assert here.report.outcome == there.report.outcome == "extend"
    assert here.report.reused_tokens == there.report.reused_tokens >= first.report.prompt_tokens
    assert here.token_ids == there.token_ids and here.prompt_ids == there.prompt_ids
    other.check()


def test_an_agent_survives_its_replica_killed_at_work(replicas: Replicas) -> None:
    wanted, went_on = after_a_kill(replicas, str(replicas.tier))
    assert went_on.report.outcome == "extend" and went_on.token_ids == wanted.token_ids
    assert went_on.report.reused_tokens >= wanted.report.reused_tokens - 16, "all but one block"


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5", "minicpm3"])
def test_windows_states_and_latents_go_along(kind: str, tmp_path: Path) -> None:
    for replicas in running(tiny_model_dir(kind, "fp32", tmp_path / "models"), tmp_path):
        one, other = replicas.start("one", hot_bytes=16 << 20), replicas.start("other", hot_bytes=16 << 20)
        first = ask(one, history())
        exported(one)
        told = history(turns=[first.text, "talk on"])
        here = ask(other, told)
        assert here.report.reused_tokens >= first.report.prompt_tokens - 32
        assert here.report.reused_tokens >= ask(one, told).report.reused_tokens - 16, "all but one block"
        assert here.token_ids == ask(other, told, "nobody", reuse="off").token_ids
        other.check()


def test_what_agents_share_is_imported_for_a_new_one(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    for agent in ("eve", None):
        found = ask(other, history(turns=["Yes.", f"talk of {agent}"]), agent)
        assert found.report.reused_tokens >= first.report.prompt_tokens - 32
    imported = figures(other)["imported_objects"]
    ask(other, history(turns=["No.", "talk of who"]), "bob")
    assert figures(other)["imported_objects"] == imported, "what is here is not imported again"


def test_only_what_is_missing_is_imported_and_exported(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    ask(one, history(), "eve")
    ask(other, history(), "eve")
    exported(other)
    objects = len(replicas.objects("blocks"))
    first = ask(one, history(), "ada")
    exported(one)
    assert len(replicas.objects("blocks")) <= objects + 1, "blocks of both are one object"
    before = figures(other)["imported_objects"]
    ask(other, history(turns=[first.text, "talk on"]))
    assert figures(other)["imported_objects"] - before <= 2


def test_branches_of_two_replicas_are_both_kept(replicas: Replicas) -> None:
    one, other, third = (replicas.start(name) for name in ("one", "other", "third"))
    first = ask(one, history())
    exported(one)
    here, there = history(turns=[first.text, "talk of the left"]), history(turns=[first.text, "talk of the right"])
    left, right = ask(one, here), ask(other, there)
    exported(one)
    exported(other)
    for said, reply in ((here, left), (there, right)):
        words = [*(each["content"] for each in said[1:]), reply.text, "talk on"]
        went_on = ask(third, history(turns=words))
        assert went_on.report.outcome == "extend"
        assert went_on.report.reused_tokens >= reply.report.prompt_tokens - 16, "all but one block"
    assert len(third.agent("ada").info().branch_infos) >= 2


def test_a_replica_that_is_behind_reads_the_newer_head(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    words = [ask(one, history()).text, "talk on"]
    exported(one)
    ask(other, history(turns=words))  # it knows the agent from here on
    for _ in range(3):
        words += [ask(one, history(turns=words)).text, "talk of what came after all that, in the evening. " * 4]
    exported(one)
    result = ask(other, history(turns=words))
    assert result.report.outcome == "extend" and result.report.computed_tokens < 0.3 * result.report.prompt_tokens


def test_a_forgotten_agent_is_forgotten_everywhere(replicas: Replicas) -> None:
    one, other, third = (replicas.start(name) for name in ("one", "other", "third"))
    first = ask(one, history())
    exported(one)
    told = history(turns=[first.text, "talk on"])
    assert ask(other, told).report.outcome == "extend"
    exported(other)
    objects = len(replicas.objects("blocks"))
    report = one.agent("ada").purge()
    assert len(replicas.objects("blocks")) == objects - report.tier_objects_deleted == 0
    fresh = ask(other, told)
    assert fresh.report.reused_tokens < 16, "what it had is gone, on disk and in memory"
    (branch,) = other.agent("ada").info().branch_infos
    assert branch.num_turns == 1, "what is said after it is a memory of its own"
    exported(other)
    assert ask(third, told).report.outcome == "exact"
    third.agent("ada").delete()
    with pytest.raises(NotFound):
        third.agent("nobody").delete()


def test_an_agent_that_is_only_elsewhere_can_be_purged(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    assert other.agent("ada").purge().slots_freed == 0
    fresh = replicas.start("fresh")
    went_on = ask(fresh, history(turns=[first.text, "talk on"]))
    assert not fresh.components.memory.book.of("default", "ada")[1:], went_on.report


def test_an_agent_that_is_only_elsewhere_can_be_loaded(replicas: Replicas) -> None:
    one, other = replicas.start("one"), replicas.start("other")
    first = ask(one, history())
    exported(one)
    assert other.agent("ada").load().computed_tokens <= 16, "all but a block"
    assert other.agent("ada").info().hot_tokens >= first.report.prompt_tokens - 16
    with pytest.raises(NotFound):
        other.agent("eve").load()


def test_nobody_leaves_no_tombstone(replicas: Replicas) -> None:
    one = replicas.start("one")
    for forget in (one.agent("nobody").delete, one.agent("nobody").purge):
        with pytest.raises(NotFound):
            forget()
    assert not replicas.objects("heads") and not replicas.objects("purged")
    replicas.tier.rename(replicas.directory / "away")
    replicas.tier.write_text("a file where the tier was")
    ask(one, history())
    assert one.flush()
    replicas.tier.unlink()
    (replicas.directory / "away").rename(replicas.tier)
    one.agent("ada").delete()
    assert len(replicas.objects("purged")) == 1, "what waited to be exported is not exported any more"


def damage(path: Path, how: str, others: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    chance = random.Random(f"{how}{path.name}")
    match how:
        case "cut":
            path.write_bytes(data[: chance.randrange(len(data))])
        case "flipped":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case "swapped":
            path.write_bytes(chance.choice([each for each in others if each != path]).read_bytes())
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "random":
            path.write_bytes(chance.randbytes(len(data)))


@pytest.mark.parametrize("folder", ["blocks", "heads"])
def test_no_damage_changes_a_reply(replicas: Replicas, folder: str) -> None:
    """Each object of some agent is damaged in each way; replies are those without reuse."""
    one = replicas.start("one")
    ways = ["cut", "flipped", "swapped", "missing", "empty", "random"]
    texts = [ask(one, history(number), f"agent-{number}").text for number in range(len(ways))]
    exported(one)
    chance, paths = random.Random(folder), replicas.objects(folder)
    for number, path in enumerate(chance.sample(paths, len(paths))):
        if folder == "heads" or number % 2:
            damage(path, ways[number % len(ways)], paths)
    other = replicas.start("other")
    for number, text in enumerate(texts):
        told = history(number, turns=[text, "talk on"])
        reply = ask(other, told, f"agent-{number}")
        assert reply.token_ids == ask(other, told, None, reuse="off").token_ids
    assert figures(other)["bad_objects"] > 0
    other.check()
    exported(other)
    healed = replicas.start("healed")
    reply = ask(healed, history(0, turns=[texts[0], "talk on"]), "agent-0")
    assert reply.report.outcome in ("extend", "exact"), "the next turn has written head and blocks again"


def test_an_old_head_is_a_shorter_memory(replicas: Replicas) -> None:
    one = replicas.start("one")
    words = [ask(one, history()).text, "talk on"]
    exported(one)
    (path,) = replicas.objects("heads")
    old = path.read_bytes()
    words += [ask(one, history(turns=words)).text, "talk of after that"]
    exported(one)
    path.write_bytes(old)
    other = replicas.start("other")
    told = history(turns=words)
    reply = ask(other, told)
    assert reply.token_ids == ask(other, told, None, reuse="off").token_ids
    assert reply.report.reused_tokens > 0.5 * reply.report.prompt_tokens


@pytest.mark.parametrize("note", ["there", "damaged"])
def test_an_old_head_revives_nobody_who_was_purged(replicas: Replicas, note: str) -> None:
    one = replicas.start("one")
    ask(one, history())
    exported(one)
    (path,) = replicas.objects("heads")
    old, blocks = path.read_bytes(), {each: each.read_bytes() for each in replicas.objects("blocks")}
    one.agent("ada").purge()
    for each, data in {path: old, **blocks}.items():
        each.write_bytes(data)
    if note == "damaged":
        replicas.objects("purged")[0].write_bytes(b"")
    other = replicas.start("other")
    with pytest.raises(NotFound):
        other.agent("ada").load()
    ask(other, history(1))
    exported(other)
    if note == "there":
        third = replicas.start("third")
        third.agent("ada").load()
        (branch,) = third.agent("ada").info().branch_infos
        assert branch.num_turns == 1, "what is said after the purge is remembered alone"


def test_a_replica_with_another_secret_or_model_reads_nothing(replicas: Replicas, tmp_path: Path) -> None:
    one = replicas.start("one")
    first = ask(one, history())
    exported(one)
    told = history(turns=[first.text, "talk on"])
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "secret").write_bytes(b"t" * 32)
    other_secret = Replicas(replicas.model, tmp_path / "other-secret")
    other_secret.tier = replicas.tier
    (tmp_path / "other-secret").mkdir()
    other_model = Replicas(tiny_model_dir("llama", "fp32", tmp_path / "models"), tmp_path / "other-secret")
    other_model.tier = replicas.tier
    try:
        engine = other_model.start("model")
        assert ask(engine, told).report.reused_tokens < 16 and figures(engine)["imported_objects"] == 0
        engine = Engine.from_pretrained(
            str(replicas.model), store=stranger, tier=str(replicas.tier), tier_wait_s=30.0, threads=1, block_tokens=16
        )
        with engine:
            assert ask(engine, told).report.reused_tokens < 16 and figures(engine)["imported_objects"] == 0
    finally:
        other_model.close()


def test_a_silent_tier_is_computed_around_and_said(replicas: Replicas) -> None:
    one = replicas.start("one")
    texts = [ask(one, history(number, days=40), f"agent-{number}").text for number in range(4)]
    exported(one)
    fifos = replicas.objects("blocks") + replicas.objects("heads")
    for path in fifos:
        path.unlink()
        os.mkfifo(path)  # who reads it waits for ever
    other = replicas.start("other", tier_wait_s=0.2)
    try:
        for number, text in enumerate(texts):
            told = history(number, turns=[text, "talk on"], days=40)
            reply = ask(other, told, f"agent-{number}")
            assert reply.token_ids == ask(one, told, None, reuse="off").token_ids
        assert figures(other)["failures"] > 0 and figures(other)["imported_objects"] == 0
        assert not figures(other)["is_answering"]
        (problem,) = other.health().problems
        assert "the object tier" in problem and "does not answer (no answer within" in problem
    finally:
        for path in fifos:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets those who wait go
            path.unlink()


def test_what_could_not_be_exported_follows_when_the_tier_is_back(replicas: Replicas) -> None:
    one = replicas.start("one")
    replicas.tier.rename(replicas.directory / "away")
    replicas.tier.write_text("a file where the tier was")
    first = ask(one, history())
    assert one.flush()
    with pytest.raises(StoreError, match="nothing was forgotten: the object tier"):
        one.agent("ada").purge()
    assert one.agent("ada").info().num_tokens, "nothing has changed"
    replicas.tier.unlink()
    (replicas.directory / "away").rename(replicas.tier)
    exported(one)
    other = replicas.start("other")
    assert ask(other, history(turns=[first.text, "talk on"])).report.outcome == "extend"


def test_settings_that_cannot_work_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tier needs a store"):
        Engine.from_pretrained(str(tiny_llama), store="off", tier=str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match="is no directory and none of"):
        Engine.from_pretrained(str(tiny_llama), store=tmp_path / "store", tier="ftp://host/path")
    assert len(SECRET) == 32
