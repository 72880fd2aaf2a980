"""Thirty agents, twenty rounds, and memory for a few of them: nothing is lost, nothing leaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle_sessions.machine.types import Topology
from rekindle_sessions.service.coordinator import Coordinator
from tests.proofs import proved
from tests.sessions.service.held import SPACE, holding, of_kind, plan_of, settings_in, told
from tests.tiny_models import tiny_model_dir

NUM_AGENTS, NUM_ROUNDS = 30, 20
ALL_HEAR = 7  # of so many rounds one; in the others one listens
CONTEXT = 4096


def short(engine: Engine) -> tuple[tuple[str, Any], ...]:
    """Sampling of replies that have two letters: what a random model says otherwise may be nothing that is heard."""
    letters = (engine.encoder.encode(engine.encoder.render_text(letter)) for letter in "abcd")
    biases = tuple((int(ids[0]), 100.0) for ids in letters)
    return (("max_tokens", 2), ("temperature", 0), ("ignore_eos", True), ("logit_bias", biases))


@pytest.mark.timeout(600)
def test_crowd_in_a_small_pool(tmp_path: Path) -> None:
    names = [f"A{number}" for number in range(NUM_AGENTS)]

    async def play(coordinator: Coordinator) -> None:
        info = await coordinator.create(SPACE, plan_of(*names, sampling=short(engine)))
        for number in range(NUM_ROUNDS):
            topology: Topology = "round_robin" if number == 10 else "broadcast"
            to = None if number % ALL_HEAR == 0 else (names[number],)  # what all hear makes every prompt longer
            events = await told(coordinator.round(SPACE, info.id, topology=topology, to=to))
            assert not of_kind(events, "turn_failed")
            assert sorted(each["speaker"] for each in of_kind(events, "turn_complete")) == sorted(names)
        said = coordinator.messages(SPACE, info.id)
        assert [each.number for each in said] == list(range(1 + NUM_AGENTS * NUM_ROUNDS))
        heard = coordinator.messages(SPACE, info.id, hears=names[1])
        assert len(heard) == 1 + 3 * NUM_AGENTS + 17 + (NUM_AGENTS - 1)  # its own words, and what was for it alone
        assert engine.stats().num_evictions > 0

    model = tiny_model_dir("llama", "fp32", tmp_path, max_position_embeddings=CONTEXT, num_hidden_layers=2)
    with proved(Engine(settings_in(tmp_path / "store", model=str(model), hot_bytes="5MiB", block_tokens=64))) as engine:
        holding(engine, play, tmp_path / "sessions.db")
        engine.check()
