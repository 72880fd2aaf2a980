"""Scenario files: what is wrong is said with line and path, all at once; what is right means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import BadRequest, NotFound
from rekindle_sessions.scenes.scenario import Scenario, ScenarioInvalid, find, load, shipped

GOOD = """\
name: duel
title: A duel about {{ prize }}
about: Two rivals.
variables: {prize: the crown, days: 2, sharp: false, share: 0.5}
setting: You fight for {{ prize }}.
agents:
  - name: Ada
    role: the first
    knows: [One fact., "Two: {{ prize }}."]
  - {name: Bo, persona: You are calm., life: permanent, identity: duel/bo}
phases:
  - name: talk
    say: Begin, {{ agents | join(' and ') }}.
    rounds: "{{ days }}"
  - name: vote
    decide: {question: "Who wins {{ prize }}?", options: [Ada, Bo, "{{ prize }}"]}
  - name: game
    game:
      question: Round {{ round }} of {{ rounds }}, after {{ decisions.vote.outcome }}.
      moves: [up, down]
      rounds: 3
      payoffs:
        up: {up: [1, 1], down: [0, 2.5]}
        down: {up: [2.5, 0], down: [-1, -1]}
outcome:
  - said: {agent: Ada, contains: crown}
    text: "{{ held }} of {{ of }}; {{ scores.Ada }}"
    otherwise: no
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "duel.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(ScenarioInvalid) as caught:
        load(written(folder, text))
    return [(each.line, each.place, each.message) for each in caught.value.problems]


def good(folder: Path, given: dict[str, str] | None = None) -> Scenario:
    return load(written(folder, GOOD), given)


def test_a_file_means_what_it_says(tmp_path: Path) -> None:
    scene = good(tmp_path)
    ada, bo = scene.plan.participants
    assert (scene.title, scene.plan.setting) == ("A duel about the crown", "You fight for the crown.")
    assert (ada.persona, ada.role, ada.agent) == ("One fact. Two: the crown.", "the first", None)
    assert (bo.persona, bo.agent) == ("You are calm.", "duel/bo")
    talk, vote, game = scene.phases
    assert (talk.rounds, talk.agents, talk.audience) == (2, ("Ada", "Bo"), None)
    assert vote.vote is not None and vote.vote.question.options == ("Ada", "Bo", "the crown")
    assert game.game is not None and game.game.payoffs[("up", "down")] == (0, 2.5)
    assert game.game.points(("down", "up")) == (2.5, 0)
    assert game.game.points(("down", None)) == (0, 0)


def test_variables_are_given_as_text_and_keep_their_kind(tmp_path: Path) -> None:
    scene = good(tmp_path, {"prize": "a goat", "days": "5", "sharp": "True", "share": "1"})
    assert scene.variables == {"prize": "a goat", "days": 5, "sharp": True, "share": 1.0}
    assert (scene.title, scene.phases[0].rounds) == ("A duel about a goat", 5)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("price", "1", "no variable 'price': prize=the crown, days=2"),
        ("days", "many", "days must be a whole number, not 'many'"),
        ("sharp", "1", "sharp must be true or false"),
        ("share", "x", "share must be a number"),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, name: str, value: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said) as caught:
        good(tmp_path, {name: value})
    assert caught.value.param == name


def test_a_value_out_of_bounds_is_a_mistake_at_its_place(tmp_path: Path) -> None:
    with pytest.raises(ScenarioInvalid, match=r"duel.yaml:14: phases\[0\].rounds: must be from 0 to 1000, not -1"):
        good(tmp_path, {"days": "-1"})


MISTAKES = [
    ("name: duel", "nome: duel\nname: duel", 1, "nome", "is not known here: name, title"),
    ("name: duel\n", "", 1, "", "needs 'name'"),
    ("name: duel", "name: duel\nname: twice", 2, "name", "is given twice"),
    ("name: duel", "name: [a]", 1, "name", "must be a text, not a list"),
    ("name: duel", "name:", 1, "name", "must be a text, not nothing"),
    ("name: duel", "name: ' '", 1, "name", "is empty"),
    ("variables: {prize", "variables: {class: 1, prize", 4, "variables.class", "a variable's name has"),
    ("variables: {prize", "variables: {scores: 1, prize", 4, "variables.scores", "'scores' has a meaning of its own"),
    ("variables: {prize", "variables: {day: 2020-01-01, prize", 4, "variables.day", "must be a text, a number, true"),
    ("for {{ prize }}.", "for {{ price }}.", 5, "setting", "nothing is called 'price' here: days, prize"),
    ("for {{ prize }}.", "'for {{ prize'", 5, "setting", "the template cannot be read: unexpected"),
    ("for {{ prize }}.", "{{ prize.crowd.size }}", 5, "setting", "the template fails"),
    ("- name: Ada", "- nom: Ada\n    name: Ada", 7, "agents[0].nom", "is not known here: name, role"),
    ("{name: Bo,", "{name: Ada,", 10, "agents[1].name", "the name 'Ada' is taken"),
    ("{name: Bo,", "{name: 'Bo: x',", 10, "agents[1].name", "cannot be a name"),
    ("life: permanent, identity: duel/bo", "life: permanent", 10, "agents[1]", "needs an identity"),
    ("life: permanent, identity: duel/bo", "identity: x", 10, "agents[1].identity", "add life: permanent"),
    ("life: permanent,", "life: eternal,", 10, "agents[1].life", "'eternal' is no life: ephemeral, permanent"),
    ("knows: [One fact.,", "knows: [{file: no.md},", 9, "agents[0].knows[0].file", "no.md cannot be read"),
    ("knows: [One fact.,", "knows: [{file: ../up.md},", 9, "agents[0].knows[0].file", "lies outside of the scenario's"),
    ("agents:\n", "topology: ring\nagents:\n", 6, "topology", "'ring' is no topology: turn_by_turn, round_robin"),
    ("agents:\n", "topology: moderated\nagents:\n", 6, "topology", "needs a moderator"),
    ("agents:\n", "moderator: Cy\nagents:\n", 6, "moderator", "'Cy' is no agent: Ada, Bo"),
    ("agents:\n", "sampling: {heat: 1}\nagents:\n", 6, "sampling.heat", "is not known here: max_tokens"),
    ("agents:\n", "sampling: {top_p: 7}\nagents:\n", 6, "sampling.top_p", "top_p must lie in (0, 1]"),
    ("- name: talk", "- name: talk\n    agents: [Ada, Cy]", 13, "phases[0].agents[1]", "'Cy' is no agent: Ada, Bo"),
    ("- name: talk", "- name: talk\n    agents: [Ada, Ada]", 13, "phases[0].agents[1]", "'Ada' is named twice"),
    ("- name: talk", "- name: talk\n    agents: []", 13, "phases[0].agents", "is empty"),
    ("- name: talk", "- name: talk\n    topology: moderated", 13, "phases[0].topology", "needs the scene's moderator"),
    ("- name: talk", "- name: talk\n    topology: turn_by_turn\n    turns: 2", 14, "phases[0].turns", "must be a list"),
    ("- name: talk", "- name: talk\n    turns: [Cy]", 13, "phases[0].turns[0]", "'Cy' is no agent of this phase"),
    ("- name: talk", "- name: talk\n    whisper: [{from: Ada}]", 13, "phases[0].whisper[0]", "needs 'to'"),
    (
        "- name: talk",
        "- name: talk\n    whisper: [{from: Bo, to: Bo}]",
        13,
        "phases[0].whisper[0]",
        "Bo cannot whisper",
    ),
    ("- name: talk", "- name: talk\n    ask: [{to: Bo}]", 13, "phases[0].ask[0]", "needs 'text'"),
    ("- name: talk", "- name: talk\n    ask: Bo", 13, "phases[0].ask", "must be a list, not 'Bo'"),
    ("- name: game", "- name: talk", 17, "phases[2]", "there are two phases named 'talk'"),
    ('    rounds: "{{ days }}"', "    rounds: some", 14, "phases[0].rounds", "must be a whole number, not 'some'"),
    (
        "    say: Begin, {{ agents | join(' and ') }}.\n    rounds: \"{{ days }}\"\n",
        "",
        12,
        "phases[0]",
        "nothing happens",
    ),
    ("say: Begin,", "say: '{{ decisions.vote.outcome }}'  #", 13, "phases[0].say", "decisions has no 'vote' here"),
    ("say: Begin,", "say: \"{{ scores['Cy'] }}\"  #", 13, "phases[0].say", "scores has no 'Cy' here: it has Ada, Bo"),
    ('options: [Ada, Bo, "{{ prize }}"]', "options: [Ada]", 16, "phases[1].decide.options", "2 to 26 options"),
    ('options: [Ada, Bo, "{{ prize }}"]', "mode: vote, options: [Ada, Bo]", 16, "phases[1].decide.mode", "no mode"),
    (', options: [Ada, Bo, "{{ prize }}"]', "", 16, "phases[1].decide", "needs 'options'"),
    ("options: [Ada,", "mode: coordinator, options: [Ada,", 16, "phases[1].decide", "coordinator"),
    ("options: [Ada,", "threshold: 0.2, options: [Ada,", 16, "phases[1].decide.threshold", "above 0.5"),
    ("options: [Ada,", "open: maybe, options: [Ada,", 16, "phases[1].decide.open", "must be true or false"),
    (", down: [0, 2.5]}", "}", 23, "phases[2].game.payoffs.up", "has no row for 'down' of Bo"),
    (
        "down: [0, 2.5]",
        "down: [0]",
        23,
        "phases[2].game.payoffs.up.down",
        "must have 2 numbers, one for each of Ada, Bo",
    ),
    ("down: [0, 2.5]", "down: [0, x]", 23, "phases[2].game.payoffs.up.down[1]", "must be a number, not 'x'"),
    (
        "down: [0, 2.5]",
        "left: [0, 2], down: [0, 2]",
        23,
        "phases[2].game.payoffs.up.left",
        "is not known here: up, down",
    ),
    ("moves: [up, down]", "moves: [up, UP]", 20, "phases[2].game.moves", "differ by more than case"),
    ("moves: [up, down]", "moves: [up, down]\n      default: left", 21, "phases[2].game.default", "'left' is no move"),
    ("said: {agent: Ada,", "said: {agent: Cy,", 26, "outcome[0].said.agent", "'Cy' is no agent"),
    ("said: {agent: Ada,", "said: {phase: tea, agent: Ada,", 26, "outcome[0].said.phase", "'tea' is no phase"),
    (
        "said: {agent: Ada, contains: crown}",
        "decided: {phase: talk}",
        26,
        "outcome[0].decided.phase",
        "phase that decides",
    ),
    ("said: {agent: Ada, contains: crown}", "scored: {agent: Ada}", 26, "outcome[0].scored", "needs at_least"),
    ("  - said: {agent: Ada, contains: crown}\n    text", "  - text", 27, "outcome[0].otherwise", "is never said"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "place", "said"), MISTAKES, ids=[f"{m[3]}-{m[4][:16]}" for m in MISTAKES]
)
def test_a_mistake_is_said_with_its_line_and_path(
    tmp_path: Path, old: str, new: str, line: int, place: str, said: str
) -> None:
    assert old in GOOD
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    assert [each[:2] for each in found] == [(line, place)], found
    assert said in found[0][2]


def test_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("rounds: 3", "rounds: 0").replace("agent: Ada, contains", "agent: Cy, contains")
    text = text.replace("role: the first", "rule: the first")
    with pytest.raises(ScenarioInvalid) as caught:
        load(written(tmp_path, text))
    first, *lines = str(caught.value).splitlines()
    path = tmp_path / "duel.yaml"
    assert first == "duel.yaml cannot be played: 3 mistakes"
    assert [line.strip().split(": ")[:2] for line in lines] == [
        [f"{path}:8", "agents[0].rule"],
        [f"{path}:21", "phases[2].game.rounds"],
        [f"{path}:26", "outcome[0].said.agent"],
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("a: [1", r"duel.yaml:\d+: this is not YAML: while parsing a flow sequence"),
        ("a: 1\n---\nb: 2", "this is not YAML: expected a single document"),
        ("- 1", "must be names with values, not a list"),
        ("name: \x00", "this is not YAML"),
        ("? [a]\n: b", "a name must be a word"),
    ],
)
def test_what_is_no_scene_at_all_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ScenarioInvalid, match=said):
        load(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ScenarioInvalid, match="cannot be read"):
        load(tmp_path / "none.yaml")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: \xe9")
    with pytest.raises(ScenarioInvalid, match="cannot be read"):
        load(path)


def test_a_text_cannot_reach_into_python(tmp_path: Path) -> None:
    found = problems(tmp_path, GOOD.replace("for {{ prize }}.", "{{ prize.__class__.__mro__ }}"))
    assert found[0][1] == "setting"


def test_documents_lie_beside_the_scene(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("A long {{ text }}.\n")
    scene = load(written(tmp_path, GOOD.replace("knows: [One fact.,", "knows: [One fact., {file: long.md},")))
    assert scene.plan.participants[0].persona == "One fact. Two: the crown.\n\nA long {{ text }}."


def test_a_game_of_three_has_three_levels(tmp_path: Path) -> None:
    text = GOOD.replace("{name: Bo,", "{name: Cy}\n  - {name: Bo,")
    found = problems(tmp_path, text)
    assert {place for _, place, _ in found} == {
        f"phases[2].game.payoffs.{a}.{b}" for a in ("up", "down") for b in ("up", "down")
    }


def test_turns_in_a_number_go_round(tmp_path: Path) -> None:
    text = GOOD.replace('rounds: "{{ days }}"', "turns: 3")
    assert load(written(tmp_path, text)).phases[0].turns == ("Ada", "Bo", "Ada")


def test_sampling_is_changed_from_outside(tmp_path: Path) -> None:
    scene = good(tmp_path).with_sampling(seed=7, max_tokens=None)
    assert dict(scene.plan.sampling) == {"seed": 7}
    with pytest.raises(BadRequest, match="max_tokens"):
        scene.with_sampling(max_tokens=0)


def test_scenes_are_found_by_name_or_path(tmp_path: Path) -> None:
    assert find(str(written(tmp_path, GOOD))) == tmp_path / "duel.yaml"
    assert find("gossip") in shipped()
    with pytest.raises(NotFound, match="no scenario 'gosip': committee, dilemma, gossip, router are shipped"):
        find("gosip")
    with pytest.raises(NotFound, match="no file"):
        find("scenes/none.yaml")


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_scenes_are_whole(path: Path) -> None:
    scene = load(path)
    assert scene.name == path.stem
    assert scene.title and scene.about and scene.models and scene.outcome


@pytest.mark.parametrize(
    "text",
    [
        "name: x\nabout: " + "[" * 5_000 + "]" * 5_000,
        "name: x\nabout: " + "{a: " * 3_000 + "1" + "}" * 3_000,
        "name: x\nabout:\n" + "".join(" " * depth + "-\n" for depth in range(1, 200)),
    ],
    ids=["lists", "maps", "blocks"],
)
def test_what_lies_too_deep_is_a_mistake_with_its_line(tmp_path: Path, text: str) -> None:
    ((line, _, message),) = problems(tmp_path, text)
    assert line is not None
    assert line > 1
    assert "more than 50 deep" in message


@pytest.mark.parametrize(
    "text", ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "{{ 'a' * 4000000000 }}"]
)
def test_a_text_that_would_not_end_is_a_mistake_with_its_line(tmp_path: Path, text: str) -> None:
    found = problems(tmp_path, GOOD.replace("A duel about {{ prize }}", f'"{text}"'))
    assert [(line, place) for line, place, _ in found] == [(2, "title")]
    assert "more work than a template may do" in found[0][2]
