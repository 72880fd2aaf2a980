"""What of each turn's prompt is computed again, on six kinds of templates, and that a session says where it must be.

The model is scripted (`benchmarks/coding_day/scripted`): it thinks and answers in the form of each template, with words
that depend on the KV of the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.coding_day.model_script import Script, State
from benchmarks.coding_day.script import script_of
from benchmarks.coding_day.scripted import write_scripted_model
from benchmarks.coding_day.templates import TEMPLATES, Behaviour, behaviour
from benchmarks.coding_day.texts import Texts
from rekindle import Engine
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator, SessionInfo
from tests.proofs import proved
from tests.sessions.service.held import SPACE, holding, of_kind, settings_in, told

TEXTS = Texts(0)
EXTENDS = {
    "append": True,
    "strip-thinking": False,
    "move-tools": True,
    "dated": True,
    "open-thinking": False,
    "channels": False,
}
NAMES = ("Ada", "Ben", "Cleo")
ROUNDS = 2
RULES = 5  # some 200 tokens that all are told first, hardly more than a turn brings
FEW = 20  # tokens between the words that were taken in and the reply: the last word, which may go on, and the cue
SPELLED_ANEW = 2  # at the end of a reply: a blank that is trimmed, a word that may have gone on
ALIKE = 1.6  # by how much the share that is lost may differ from what the session says, whose sample is another one
SHORT_REASONING = 8  # words, of those that a script has
Turn = Mapping[str, Any]


@dataclass(frozen=True)
class Held:
    """A session of some rounds, in which everybody has taken in what was said before the next one speaks."""

    info: SessionInfo
    turns: Sequence[Turn]

    @property
    def later(self) -> Sequence[Turn]:
        """All turns but the first of each."""
        return self.turns[len(NAMES) :]

    @property
    def pairs(self) -> list[tuple[Turn, Turn]]:
        """Each speaker's turns, each with the one before."""
        return [pair for name in NAMES for pair in pairwise(each for each in self.turns if each["speaker"] == name)]


def talking(script: Script) -> Script:
    """The same model without tools: it thinks shortly where it thinks at all, and answers."""
    thoughts = [name for name in script.states if name.startswith("reasoning ")]
    states = dict(script.states)
    if thoughts:
        states[thoughts[SHORT_REASONING]] = replace(states[thoughts[SHORT_REASONING]], then=(thoughts[-1],))
    if "channel" in states:  # an answer behind a thought, which ends three tokens before the channel is named
        states["channel"] = State(("<|channel|>",), ("analysis", "final"), {thoughts[-1]: ("final",)}, place=3)
        states["message"] = replace(states["message"], after={"analysis": ("reasoning 0",), "final": ("answer 0",)})
    tools = ("sentence ", "name ", "to ", "result ", "call", "commentary")
    kept: dict[str, State] = {}
    waiting = ["cue"]
    while waiting:
        name = waiting.pop()
        state = states[name]
        then = tuple(each for each in state.then if not each.startswith(tools))
        after = {before: then for before, then in state.after.items() if not before.startswith("result ")}
        kept[name] = replace(state, then=then, after=after, place=state.place if after else None)
        waiting += [each for each in kept[name].followers() if each not in kept]
    return replace(script, states=kept, tail="")


@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda behaviour: behaviour.name)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Behaviour, Held]:
    shown: Behaviour = request.param
    return shown, held(tmp_path_factory, shown)


def held(tmp_path_factory: pytest.TempPathFactory, shown: Behaviour, **changes: Any) -> Held:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(
        directory / "model", talking(script_of(shown)), template=shown.template, corpus=TEXTS.corpus()
    )
    agents = tuple(Participant(name, f"{name} likes short words.") for name in NAMES)
    sampling = (("max_tokens", 64), ("temperature", 0))
    plan = Plan(agents, setting=TEXTS.instructions(rules=RULES), sampling=sampling, **changes)
    with proved(Engine(settings_in(directory / "store", model=str(model), min_reuse_tokens=1))) as engine:
        return holding(engine, lambda coordinator: talked(coordinator, plan))


async def talked(coordinator: Coordinator, plan: Plan) -> Held:
    info = await coordinator.create(SPACE, plan)
    turns: list[Turn] = []
    for _ in range(ROUNDS * len(NAMES)):
        await coordinator.settle(SPACE, info.id)
        turns += of_kind(await told(coordinator.turn(SPACE, info.id)), "turn_complete")
    assert len(turns) == ROUNDS * len(NAMES) and all(turn["text"] for turn in turns)
    return Held(coordinator.show(SPACE, info.id), turns)


def computed_again(before: Turn, after: Turn) -> int:
    """Tokens of a speaker's last prompt and reply that were computed again for its next prompt."""
    num_computed = after["rekindle"]["computed_tokens"] + after["taken_in_tokens"]
    num_new = after["rekindle"]["prompt_tokens"] - before["rekindle"]["prompt_tokens"] - before["num_tokens"]
    return int(num_computed - num_new)


def at_their_turns(held: Held) -> list[int]:
    """What each turn computed of its prompt when it began."""
    return [turn["rekindle"]["computed_tokens"] for turn in held.later]


def test_every_behaviour_is_known() -> None:
    assert set(EXTENDS) == {each.name for each in TEMPLATES}


def test_who_listened_computes_a_few_tokens(played: tuple[Behaviour, Held]) -> None:
    shown, held = played
    assert all(bool(turn["thought"]) == shown.thinking for turn in held.turns)
    assert max(at_their_turns(held)) <= FEW, at_their_turns(held)
    assert all(turn["taken_in_tokens"] > FEW for turn in held.later), "there was more to be computed than that"


def test_what_the_template_makes_impossible_is_lost_and_no_more(played: tuple[Behaviour, Held]) -> None:
    shown, held = played
    again = [computed_again(*pair) for pair in held.pairs]
    layout = held.info.layout
    assert layout.extends == EXTENDS[shown.name] == (layout.why is None), layout
    if layout.extends:
        assert max(again) <= SPELLED_ANEW and layout.lost_share == 0, (again, layout)
    else:
        shares = [computed_again(*pair) / pair[1]["rekindle"]["prompt_tokens"] for pair in held.pairs]
        assert layout.lost_share / ALIKE <= min(shares) and max(shares) <= layout.lost_share * ALIKE, (shares, layout)


def test_another_layout_would_be_noticed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cue behind the history, which is gone in the next prompt."""
    cued = held(tmp_path_factory, behaviour("append"), layout="trailing_cue")
    assert min(at_their_turns(cued)) > FEW, at_their_turns(cued)
    assert min(computed_again(*pair) for pair in cued.pairs) > SPELLED_ANEW
