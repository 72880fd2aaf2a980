"""Steps that are launched before the last one was waited for: the same replies, and nothing written after an end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle import Constraint
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.compute.cpu.compute import KernelCompute
from rekindle.engine.blocks.prefix_cache import Head
from rekindle.engine.core.purge import HotPurge, wipe
from rekindle.engine.request import Request, State
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import GenerationRequest
from rekindle.kv.arena import KVArena
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from rekindle.store.commands import Purge
from tests.engine.ahead_runner import RunnerElsewhere, StepElsewhere
from tests.engine.conftest import Start
from tests.engine.test_constrained import HELLO, ITEM
from tests.exactness.rig import Rig, load
from tests.tiny_models import tiny_model_dir

PROMPTS = [list(range(10 + 40 * at, 30 + 47 * at)) for at in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp64", tmp_path_factory.mktemp("ahead")), "fp64", "q4h")


def both(model: LoadedModel) -> tuple[Rig, Rig]:
    """A core that computes in turn and one that computes ahead."""
    return Rig(model), Rig(model, runner_type=RunnerElsewhere)


def num_ahead(rig: Rig) -> int:
    assert isinstance(rig.runner, RunnerElsewhere)
    return rig.runner.num_ahead


def ends_at(token: int, rig: Rig, **params: Any) -> Request:
    return rig.request(PROMPTS[0], 20, stop_token_ids=(token,), **params)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.1, "top_p": 0.9, "seed": 5}])
def test_replies_are_those_of_steps_in_turn(model: LoadedModel, params: dict[str, Any]) -> None:
    """A nucleus of more candidates than were ordered draws again: what was computed from the wrong token is dropped."""
    answers = []
    for rig in both(model):
        asked = [rig.request(ids, 12 + 5 * at, logprobs=2, **params) for at, ids in enumerate(PROMPTS)]
        answers.append([(done.token_ids, done.logprobs, done.finish_reason) for done in rig.finish(*asked)])
        assert rig.pool.num_held == 0
    assert answers[0] == answers[1]
    assert num_ahead(rig) >= 20 or "top_p" in params


def test_a_reply_that_ends_leaves_what_others_continue(model: LoadedModel) -> None:
    turn, ahead = both(model)
    tokens = turn.generate(PROMPTS[0], 20).token_ids
    end = next(at for at in range(6, 20) if tokens[at] not in tokens[:at])
    for rig in (turn, ahead):
        done = rig.finish(ends_at(tokens[end], rig), rig.request(PROMPTS[1], 20))
        assert done[0].token_ids == tokens[:end] and done[0].finish_reason == "stop"
    assert num_ahead(ahead) >= 15
    stored = [rig.stored(np.array([*PROMPTS[0], *tokens[: end - 1]], dtype=np.uint32)) for rig in (turn, ahead)]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3}, {"min_tokens": 3}, {"logit_bias": ((7, 2.0),)}])
def test_what_depends_on_the_last_token_is_computed_in_turn(model: LoadedModel, params: dict[str, Any]) -> None:
    turn, ahead = both(model)
    assert turn.generate(PROMPTS[0], 9, **params).token_ids == ahead.generate(PROMPTS[0], 9, **params).token_ids
    assert num_ahead(ahead) == 0


@pytest.mark.parametrize("ends", ["cancelled", "stop"])
def test_blocks_are_released_once_the_step_ahead_has_ended(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    turn, rig = both(model)
    tokens, detach, detached = turn.generate(PROMPTS[0], 20).token_ids, rig.cache.detach, []
    end = next(at for at in range(6, 20) if tokens[at] not in tokens[:at])

    def watched(sequence: Sequence, *, is_remembered: bool = False) -> Head:
        assert isinstance(rig.runner, RunnerElsewhere) and rig.runner.last is not None
        detached.append(rig.runner.last.was_waited_for)
        return detach(sequence, is_remembered=is_remembered)

    monkeypatch.setattr(rig.cache, "detach", watched)
    first, other = ends_at(tokens[end], rig), rig.request(PROMPTS[1], 20)
    while num_ahead(rig) < 3:
        rig.step()
    if ends == "cancelled":
        first.cancelled.set()
        rig.step()
        assert first.state is State.FINISHED
    done, rest = rig.finish(first, other)
    assert done.finish_reason == ends and detached == [True, True]
    assert rest.token_ids == Rig(model).generate(PROMPTS[1], 20).token_ids and rig.pool.num_held == 0


def test_a_purge_leaves_what_running_requests_have_stored(model: LoadedModel) -> None:
    """It overwrites what is behind the stored tokens of their blocks, where a step ahead has written the next one."""
    turn, rig = both(model)
    request, nothing = rig.request(PROMPTS[0], 20), frozenset[BlockHash]()
    while num_ahead(rig) < 3:
        rig.step()
    assert isinstance(rig.runner, RunnerElsewhere) and rig.runner.last is not None
    rig.runner.last.wait()
    wipe(rig.core, HotPurge(Purge("default", "somebody"), nothing, nothing, nothing))
    (done,), tokens = rig.finish(request), turn.generate(PROMPTS[0], 20).token_ids
    assert done.token_ids == tokens and num_ahead(rig) >= 15
    stored = [each.stored(np.array([*PROMPTS[0], *tokens[:-1]], dtype=np.uint32)) for each in (turn, rig)]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("failing", ["launch_after", "wait"])
def test_a_step_ahead_that_fails_is_computed_again_in_turn(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    turn, rig = both(model)
    launch_after = rig.runner.launch_after

    def broken(*given: Any) -> StepElsewhere:
        if failing == "launch_after":
            raise RuntimeError("out of memory")
        return replaced(launch_after(*given))

    def replaced(step: StepElsewhere) -> StepElsewhere:
        monkeypatch.setattr(step, "wait", raising)
        return step

    def raising() -> frozenset[int]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(rig.runner, "launch_after", broken)
    assert rig.generate(PROMPTS[0], 9).token_ids == turn.generate(PROMPTS[0], 9).token_ids


def test_an_engine_that_computes_ahead_gives_the_same_replies(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that end by a grammar, a stop string, an end token or length, of requests that come and go."""
    runners, answers = list[RunnerElsewhere](), []

    def elsewhere(compute: KernelCompute, loaded: LoadedModel, arena: KVArena) -> RunnerElsewhere:
        runners.append(RunnerElsewhere(loaded, arena))
        return runners[-1]

    for where in ("here", "elsewhere"):
        engine = start(speculate="off", store="off", kv="fp32")
        free = engine.chat("ada", HELLO, temperature=0, max_tokens=40)
        stop = free.text[len(free.text) // 2 :][:4]
        asked = [
            GenerationRequest(text="One.", params=SamplingParams(temperature=0, max_tokens=40)),
            GenerationRequest(text="Two.", params=SamplingParams(seed=3, max_tokens=25, logprobs=2)),
            GenerationRequest(text="Two.", params=SamplingParams(temperature=0, max_tokens=60, stop=stop)),
            GenerationRequest(
                text="Describe it.", params=SamplingParams(seed=5, max_tokens=800), constraint=Constraint("json", ITEM)
            ),
        ]
        generations = [engine.submit(each) for each in asked]
        results = [free, *(generation.result() for generation in generations)]
        answers.append([(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in results])
        monkeypatch.setattr(KernelCompute, "runner", elsewhere)
        assert (where == "elsewhere") == any(runner.num_ahead > 20 for runner in runners)
    assert answers[0] == answers[1]
