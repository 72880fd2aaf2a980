"""A session against lists of words: rounds of all kinds, whispers, votes, forks, rewinds and merges in any order.

Everything that is said carries a mark of its own, so that it is known of every context and every prompt which of these
words it holds. The model says which it should hold, in which order: no whisper for others, nothing twice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.errors import BadRequest, Conflict
from rekindle.text.messages import Message
from rekindle_sessions.machine.contexts import SILENCE
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.decisions import Decision, Mode, Question
from rekindle_sessions.machine.rounds import RoundRequest
from rekindle_sessions.machine.types import (
    TOPOLOGIES,
    Audience,
    Decided,
    Directive,
    Entry,
    Event,
    Forked,
    Hear,
    Merged,
    MessagePosted,
    Participant,
    Plan,
    Prelude,
    Rewound,
    RoundBegun,
    RoundComplete,
    RoundDropped,
    Speak,
    Topology,
    Turn,
    TurnEnded,
    TurnFailed,
    Utterance,
    VoteBegun,
)

NAMES = ("Ann", "Bo", "Bob", "Ann B")  # some begin like others
FORKS = ("Cy", "Di")
OUTSIDERS = ("Host", "Zed")
OPTIONS = ("Red", "Green", "Red wine")
MARK = re.compile(r"w\d+w")
Key = tuple[str, int]  # of something that was said: by turn, by number, or brought along

somebody = st.sampled_from([*NAMES, *FORKS, *NAMES[:2] * 3])  # the first two are always there
anybody = st.sampled_from([*NAMES, *FORKS, *OUTSIDERS, ""])
several = st.lists(somebody, max_size=4).map(tuple)
audiences = st.one_of(st.none(), several)


@dataclass
class Memory:
    """What one participant should hold. `late` is what it hears while it speaks (None: it does not).

    `num_brought` it had when it came in, and told who it is: these it never forgets.
    """

    keys: list[Key] = field(default_factory=list)
    own: set[Key] = field(default_factory=set)
    num_brought: int = 0
    late: list[Key] | None = None

    def take(self, key: Key) -> None:
        (self.keys if self.late is None else self.late).append(key)

    def knows(self, key: Key) -> bool:
        return key in self.keys or key in (self.late or [])


@dataclass
class ModelRound:
    """The round that should be under way: who has yet to begin, who speaks, whose words are to come out."""

    waiting: list[tuple[str, Audience]]
    together: bool
    picks: int = 0
    candidates: tuple[str, ...] = ()
    to: Audience = None
    speaking: dict[int, Turn] = field(default_factory=dict)
    unpublished: list[int] = field(default_factory=list)
    seated: list[Turn] = field(default_factory=list)  # whose turn is not over, as others before it are not
    ended: dict[int, bool] = field(default_factory=dict)  # by turn: whether anything was said


@dataclass
class ModelVote:
    """The vote that should be under way, and what was answered in its last round."""

    question: Question
    voters: tuple[str, ...]
    num_rounds: int = 0
    sent: dict[str, tuple[str, ...]] = field(default_factory=dict)
    own: list[tuple[str, ...]] = field(default_factory=list)  # the coordinator's


class SessionMachine(RuleBasedStateMachine):
    """`spoken` and `verbatim`: the marks that others, and the speaker itself, hold of what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = (f"w{number}w" for number in count())
        self.spoken: dict[Key, set[str]] = {}
        self.verbatim: dict[Key, set[str]] = {}
        self.nothing_left: set[Key] = set()
        self.systems: dict[str, set[str]] = {}
        self.memories: dict[str, Memory] = {}
        self.reached: dict[str, list[int]] = {}
        self.round: ModelRound | None = None
        self.vote: ModelVote | None = None
        self.events: list[Event] = []
        self.directives: list[list[Directive]] = []
        self.had_turn: list[Turn] = []
        self.prompts: dict[str, tuple[Message, ...]] = {}
        self.contexts: dict[str, tuple[Entry, ...]] = {}
        self.num_utterances = 1
        self.num_decisions = 0

    @initialize(
        num=st.integers(2, 4), topology=st.sampled_from(TOPOLOGIES), returns=st.booleans(), is_moderated=st.booleans()
    )
    def open(self, num: int, topology: Topology, returns: bool, is_moderated: bool) -> None:
        people = tuple(Participant(name, persona=f"You keep {next(self.marks)}.") for name in NAMES[:num])
        moderator = people[0].name if is_moderated or topology == "moderated" else None
        self.plan = Plan(people, topology, moderator=moderator)
        self.preludes: dict[str, Prelude] = {}
        for each in people:
            self.memories[each.name] = Memory()
            self.systems[each.name] = set(MARK.findall(each.persona))
        if returns:
            self.bring_along(people[-1].name)
        self.session = Coordination(self.plan, self.preludes)
        for name, memory in self.memories.items():
            memory.take(("number", 0))
            memory.num_brought = len(memory.keys)
            self.reached[name] = [0]
        self.spoken["number", 0] = self.verbatim["number", 0] = set()
        if returns:  # told again who it is, as its first words stay what they were
            told = self.session.context(people[-1].name)[-1].text
            self.systems[people[-1].name] |= set(MARK.findall(told))

    def bring_along(self, name: str) -> None:
        heard, said, system = next(self.marks), next(self.marks), next(self.marks)
        entries = (Entry("heard", heard, "Host", number=0), Entry("said", said, name, turn=1))
        self.preludes[name] = Prelude(f"You are {name} and keep {system}.", entries)
        self.systems[name] = {system}
        self.memories[name] = Memory([("brought", 0), ("brought", 1)], {("brought", 1)})
        for number, mark in enumerate((heard, said)):
            self.spoken["brought", number] = self.verbatim["brought", number] = {mark}

    # Events go in here: accepted exactly where the model says so, and refused without a trace.

    def send(self, event: Event, is_possible: bool) -> list[Directive] | None:
        before = self.session.snapshot()
        try:
            done = self.session.apply(event)
        except (BadRequest, Conflict):
            assert not is_possible, f"{event} was refused"
            assert self.session.snapshot() == before
            return None
        assert is_possible, f"{event} was accepted"
        self.events.append(event)
        self.directives.append(done)
        return done

    def follow(self, done: Sequence[Directive]) -> None:
        """Let the model do what is to be done, if it is what the model expects."""
        for each in done:
            match each:
                case Hear(utterance, listeners):
                    self.hear(utterance, listeners)
                case Speak(turn):
                    self.begin(turn)
                case RoundComplete():
                    self.complete()
                case Decided(decision):
                    self.decide(decision)
        if self.round is not None:
            assert self.round.speaking, "somebody should speak now"

    def hear(self, utterance: Utterance, listeners: tuple[str, ...]) -> None:
        assert utterance.number == self.num_utterances
        self.num_utterances += 1
        key = key_of(utterance.turn, utterance.number)
        if utterance.turn is not None and self.round is not None:
            ended = self.round.unpublished.pop(0)
            assert ended == utterance.turn, "words are published in the order of the seats"
        if key not in self.spoken:  # the host's; consensus tells no marks here, as ballots in it bear none
            self.spoken[key] = self.verbatim[key] = set(MARK.findall(utterance.text))
            assert utterance.by == "Host"
        assert set(MARK.findall(utterance.text)) == self.spoken[key]
        meant = self.memories if utterance.to is None else utterance.to
        expected = [name for name in self.memories if name in meant and name != utterance.by and utterance.text]
        assert list(listeners) == [name for name in expected if not self.memories[name].knows(key)]
        for name in listeners:
            self.memories[name].take(key)
        for name in {*expected, utterance.by} & {*self.memories}:
            self.reached[name].append(utterance.number)

    def begin(self, turn: Turn) -> None:
        assert self.round is not None
        if turn.purpose == "pick":
            assert (turn.speaker, turn.to) == (self.plan.moderator, ())
            self.round.picks -= 1
            assert self.round.picks >= 0
        else:
            assert (turn.speaker, turn.to) == self.round.waiting.pop(0)
        assert self.round.together or not self.round.speaking
        self.round.speaking[turn.number] = turn
        self.round.unpublished.append(turn.number)
        self.round.seated.append(turn)
        memory = self.memories[turn.speaker]
        assert memory.late is None
        memory.late = []

    def complete(self) -> None:
        assert self.round is not None
        assert not (self.round.speaking or self.round.waiting or self.round.unpublished or self.round.picks)
        self.round = None
        if self.vote is not None:
            self.vote.num_rounds += 1
            if not self.is_decided(self.vote):
                self.ask_again(self.vote)

    def is_decided(self, vote: ModelVote) -> bool:
        if vote.question.mode == "consensus":
            named = {each for each in vote.sent.values() if each}
            return len(named) == 1 or vote.num_rounds == vote.question.max_rounds
        return vote.question.mode != "coordinator" or vote.num_rounds == 2

    def ask_again(self, vote: ModelVote) -> None:
        coordinator = vote.question.coordinator
        self.expect_ballots(vote, (coordinator,) if coordinator else vote.voters)

    def expect_ballots(self, vote: ModelVote, voters: tuple[str, ...]) -> None:
        hear = {*vote.voters, vote.question.coordinator} & {*self.memories}
        everybody = tuple(self.memories)
        public = None if hear == {*everybody} else tuple(name for name in everybody if name in hear)
        to = public if vote.question.is_open else ()
        self.round = ModelRound([(voter, to) for voter in voters], together=True)

    def decide(self, decision: Decision) -> None:
        vote, self.vote = self.vote, None
        assert vote is not None and self.is_decided(vote)
        assert decision.question == vote.question
        assert decision.num_rounds == vote.num_rounds
        sent = list(vote.sent.items()) + [(vote.question.coordinator, each) for each in vote.own]
        assert [(each.voter, each.ranking) for each in decision.ballots] == sent
        voted = [ranking for ranking in vote.sent.values() if ranking]
        first = decision.counts[-1 if vote.question.mode == "consensus" else 0]
        assert sum(votes for _, votes in first.votes) == len(voted)
        self.num_decisions += 1

    # What can happen.

    @rule(by=anybody, to=audiences, follows=st.sampled_from(["", "", "{by}: ", "\nBob: ", "\nHost: "]))
    def tell(self, by: str, to: Audience, follows: str) -> None:
        mark = next(self.marks)
        text = follows.format(by=by) + f"It is {mark}."
        is_possible = bool(by) and {*(to or ())} <= {*self.memories}  # who is no participant speaks from outside
        done = self.send(MessagePosted(by, text, to), is_possible)
        if done is not None:
            key = ("number", self.num_utterances)
            (heard,) = done
            assert isinstance(heard, Hear)
            self.spoken[key] = self.verbatim[key] = set(MARK.findall(heard.utterance.text)) & {mark}
            if by in self.memories:
                if heard.utterance.text == SILENCE:
                    self.nothing_left.add(key)
                self.memories[by].take(key)
                self.memories[by].own.add(key)
            self.follow(done)

    @rule(speakers=several, together=st.booleans(), to=audiences, data=st.data())
    def begin_round(self, speakers: tuple[str, ...], together: bool, to: Audience, data: st.DataObject) -> None:
        addressees: tuple[str, ...] = ()
        if data.draw(st.booleans(), "addressed"):
            addressees = tuple(data.draw(somebody, "addressee") for _ in speakers)
        event = RoundBegun(speakers, together, to, addressees)
        self.play(event)

    @precondition(lambda self: self.round is None)
    @rule(speakers=st.none() | several, to=audiences, topology=st.none() | st.sampled_from(TOPOLOGIES))
    def begin_round_of_a_topology(
        self, speakers: tuple[str, ...] | None, to: Audience, topology: Topology | None
    ) -> None:
        here = tuple(dict.fromkeys(name for name in speakers or () if name in self.memories))
        to = to and tuple(name for name in to if name in self.memories)
        if (topology or self.plan.topology) == "moderated" and self.plan.moderator is None:
            topology = "round_robin"
        self.play(self.session.next_round(RoundRequest(here or None, to, topology)))

    @precondition(lambda self: self.round is None)
    @rule(speaker=st.none() | somebody, topology=st.sampled_from(TOPOLOGIES))
    def begin_turn(self, speaker: str | None, topology: Topology) -> None:
        asked = RoundRequest((speaker,) if speaker in self.memories and speaker else None, None, topology)
        if topology == "moderated" and self.plan.moderator is None:
            return
        try:
            event = self.session.next_turn(asked)
        except BadRequest:
            assert topology == "turn_by_turn" and asked.speakers is None
            return
        assert event.picks == 1 or len(event.speakers) == 1
        self.play(event)

    def play(self, event: RoundBegun) -> None:
        names = {*event.speakers, *event.addressees, *(event.to or ())}
        is_possible = self.round is None and names <= {*self.memories} and bool(event.speakers or event.picks)
        if event.together and len({*event.speakers}) < len(event.speakers):
            is_possible = False
        if event.addressees and len(event.addressees) != len(event.speakers):
            is_possible = False
        if event.picks and {*event.speakers} == {self.plan.moderator}:
            is_possible = False
        done = self.send(event, is_possible)
        if done is None:
            return
        alone: list[Audience] = [(name,) for name in event.addressees]
        to = alone or [event.to] * len(event.speakers)
        waiting = [] if event.picks else list(zip(event.speakers, to, strict=True))
        candidates = tuple(name for name in event.speakers or self.memories if name != self.plan.moderator)
        self.round = ModelRound(waiting, event.together, event.picks, candidates, event.to)
        self.follow(done)

    @precondition(lambda self: self.round is not None)
    @rule(
        which=st.integers(0, 3),
        how=st.sampled_from(["words", "words", "words", "as itself", "as another", "nothing", "cut"]),
        answer=st.lists(st.sampled_from(OPTIONS), max_size=3, unique=True),
    )
    def end_turn(self, which: int, how: str, answer: list[str]) -> None:
        self.end_turn_as(which, how, answer)

    def end_turn_as(self, which: int, how: str, answer: list[str]) -> None:
        assert self.round is not None
        turn = list(self.round.speaking.values())[which % len(self.round.speaking)]
        key = ("turn", turn.number)
        heard, unheard, thought = next(self.marks), next(self.marks), next(self.marks)
        text = {"as itself": f"{turn.speaker}: Yes, {heard}.", "as another": f"{heard}\nZed: Well.\nHost: {unheard}"}
        said = text.get(how, f"It is {heard}.")
        if turn.purpose == "pick":
            said = self.pick(which, heard)
        elif turn.purpose == "ballot":
            said = self.answer(turn, answer, heard)
        elif how == "nothing":
            said = ""
        spoken = said.split("\nHost:")[0]
        if how == "nothing" and turn.purpose == "speak":
            self.nothing_left.add(key)
        self.spoken[key] = set(MARK.findall(spoken))
        self.verbatim[key] = {*MARK.findall(said), thought}
        memory = self.memories[turn.speaker]
        self.end(turn, key)
        memory.own.add(key)
        then = (MessagePosted("Host", f"Enough: {next(self.marks)}."),) if how == "cut" else ()
        done = self.send(TurnEnded(turn.number, said, thought, how == "cut", then), is_possible=True)
        assert done is not None
        self.follow(done)

    @precondition(lambda self: self.round is not None)
    @rule(steps=st.lists(st.tuples(st.integers(0, 3), st.permutations(OPTIONS)), min_size=4, max_size=16))
    def end_turns(self, steps: list[tuple[int, list[str]]]) -> None:
        for which, order in steps:
            if self.round is not None:
                self.end_turn_as(which, "words", order[:which])

    def end(self, turn: Turn, key: Key | None) -> None:
        """Its words, if any, then what it heard meanwhile."""
        assert self.round is not None
        memory = self.memories[turn.speaker]
        memory.keys += ([] if key is None else [key]) + (memory.late or [])
        memory.late = None
        del self.round.speaking[turn.number]
        if key is None:
            self.round.unpublished.remove(turn.number)
        self.round.ended[turn.number] = key is not None
        while self.round.seated and self.round.seated[0].number in self.round.ended:
            self.had_turn.append(self.round.seated.pop(0))

    def pick(self, which: int, mark: str) -> str:
        """One of those who may be picked, mostly; else it is known only when somebody begins."""
        assert self.round is not None
        candidates = self.round.candidates
        name = candidates[which % len(candidates)]
        if which == 3:
            self.round.waiting = [(self.longest_silent(candidates), self.round.to)]
            return f"The weather is nice: {mark}."
        self.round.waiting = [(name, self.round.to)]
        return f"{name.upper()}, please: {mark}."

    def longest_silent(self, candidates: Sequence[str]) -> str:
        spoke = {turn.speaker: at for at, turn in enumerate(self.had_turn) if turn.purpose == "speak"}
        return min(candidates, key=lambda name: spoke.get(name, -1))

    def answer(self, turn: Turn, answer: list[str], mark: str) -> str:
        assert self.vote is not None
        question = self.vote.question
        ranking = tuple(answer) if question.mode == "ranked" else tuple(answer[:1])
        if question.mode == "coordinator" and self.vote.num_rounds == 1:
            self.vote.own.append(ranking)
        else:
            self.vote.sent[turn.speaker] = ranking
        # Reasons of secret ballots are told, without names, so they bear no marks here.
        why = "" if question.mode in ("consensus", "coordinator") and not question.is_open else f"\nIt is {mark}."
        return f"{', '.join(ranking) or 'I abstain.'}{why}"

    @precondition(lambda self: self.round is not None)
    @rule(which=st.integers(0, 3))
    def fail_turn(self, which: int) -> None:
        assert self.round is not None
        turn = list(self.round.speaking.values())[which % len(self.round.speaking)]
        if turn.purpose == "pick":
            self.round.waiting = [(self.longest_silent(self.round.candidates), self.round.to)]
        elif turn.purpose == "ballot":
            self.answer(turn, [], "")
        self.end(turn, None)
        done = self.send(TurnFailed(turn.number, "out of memory"), is_possible=True)
        assert done is not None
        self.follow(done)

    @precondition(lambda self: self.round is not None and len(self.round.speaking) > 1)
    @rule(then=st.sampled_from(["fork", "merge", "drop"]), how=st.sampled_from(["words", "as another"]))
    def end_before_others(self, then: str, how: str) -> None:
        """Its words wait for those before it, while it knows them already."""
        assert self.round is not None
        turn = list(self.round.speaking.values())[-1]
        self.end_turn_as(-1, how, [])
        if then == "fork":
            self.join(turn.speaker, next((name for name in FORKS if name not in self.memories), FORKS[0]), False)
        elif then == "merge":
            silent = (name for name, memory in self.memories.items() if memory.late is None and name != turn.speaker)
            self.share(turn.speaker, next(silent, ""))
        else:
            self.give_up()
        for _ in range(len(self.round.speaking) if self.round is not None else 0):
            self.end_turn_as(0, "words", [])

    @rule(number=st.integers(-1, 60))
    def end_a_turn_that_is_not_spoken(self, number: int) -> None:
        if self.round is None or number not in self.round.speaking:
            self.send(TurnEnded(number, "I was not asked."), is_possible=False)
            self.send(TurnFailed(number, "gone"), is_possible=False)

    @rule()
    def drop_nothing(self) -> None:
        if self.round is None:
            self.send(RoundDropped(), is_possible=False)

    @precondition(lambda self: self.round is not None)
    @rule(is_meant=st.integers(0, 2).map(lambda number: number == 2))
    def drop(self, is_meant: bool) -> None:
        if is_meant:
            self.give_up()

    def give_up(self) -> None:
        assert self.round is not None
        self.had_turn += [turn for turn in self.round.seated if self.round.ended.get(turn.number)]
        self.round.seated = []
        for turn in list(self.round.speaking.values()):
            self.end(turn, None)
        self.round.waiting, self.vote = [], None
        done = self.send(RoundDropped(), is_possible=True)
        assert done is not None
        assert all(isinstance(each, Hear) for each in done)
        dropped = self.round
        for each in done:
            assert isinstance(each, Hear)
            self.hear(each.utterance, each.listeners)
        assert not dropped.unpublished
        self.round = None

    @rule(source=somebody, name=st.sampled_from([*FORKS, *NAMES, "Host", "a:b"]), is_renewed=st.booleans())
    def fork(self, source: str, name: str, is_renewed: bool) -> None:
        self.join(source, name, is_renewed)

    def join(self, source: str, name: str, is_renewed: bool) -> None:
        taken = {*self.memories, "Host", "a:b"}
        is_possible = source in self.memories and self.memories[source].late is None and name not in taken
        persona = f"You keep {next(self.marks)}." if is_renewed else ""
        done = self.send(Forked(source, name, persona), is_possible)
        if done is not None:
            memory = self.memories[source]
            self.memories[name] = Memory(list(memory.keys), set(memory.own))
            self.systems[name] = set(self.systems[source])
            self.reached[name] = list(self.reached[source])
            self.follow(done)
            self.memories[name].num_brought = len(self.memories[name].keys)

    @rule(name=somebody, turns=st.sampled_from([1, 1, 1, 2, 0, 9]))
    def rewind(self, name: str, turns: int) -> None:
        memory = self.memories.get(name, Memory())
        own = [at for at, key in enumerate(memory.keys) if key in memory.own and at >= memory.num_brought]
        done = self.send(Rewound(name, turns), memory.late is None and 1 <= turns <= len(own))
        if done is not None:
            memory.own -= {*memory.keys[own[-turns] :]}
            del memory.keys[own[-turns] :]
            self.prompts.pop(name, None)
            self.contexts.pop(name, None)
            self.follow(done)

    @rule(source=somebody, into=somebody)
    def merge(self, source: str, into: str) -> None:
        self.share(source, into)

    def share(self, source: str, into: str) -> None:
        both = [self.memories[name] for name in (source, into) if name in self.memories]
        is_possible = source != into and len(both) == 2 and all(each.late is None for each in both)
        if self.send(Merged(source, into), is_possible) is not None:
            new = [key for key in both[0].keys if not both[1].knows(key)]
            for key in new:
                if key[0] != "brought" and not (key in both[0].own and key in self.nothing_left):
                    both[1].take(key)

    @rule(
        mode=st.sampled_from(["majority", "ranked", "consensus", "coordinator", "moves"]),
        voters=several | st.just(NAMES[:2]),
        is_open=st.booleans(),
        coordinator=somebody,
    )
    def begin_vote(self, mode: Mode, voters: tuple[str, ...], is_open: bool, coordinator: str) -> None:
        chair = coordinator if mode == "coordinator" else None
        question = Question("What do we drink?", OPTIONS, mode, coordinator=chair, max_rounds=2, is_open=is_open)
        names = {*voters} | ({chair} if chair else set())
        is_possible = self.round is None and names <= {*self.memories} and 0 < len(voters) == len({*voters})
        done = self.send(VoteBegun(question, voters), is_possible)
        if done is not None:
            self.vote = ModelVote(question, voters, sent=dict.fromkeys(voters, ()))
            self.expect_ballots(self.vote, voters)
            self.follow(done)

    @rule()
    def restart(self) -> None:
        """The fold of the events kept is the session, to the last number; turns that had begun are begun."""
        again = Coordination(self.plan, self.preludes)
        assert [again.apply(event) for event in self.events] == self.directives
        assert again.snapshot() == self.session.snapshot()
        assert again.begun() == self.session.begun()
        self.session = again

    # What must hold.

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "session"):
            return
        self.session.check()
        assert list(self.session.participants) == list(self.memories)
        assert self.session.is_unfinished == (self.round is not None)
        assert self.session.begun() == (list(self.round.speaking.values()) if self.round else [])
        assert (self.session.voting is None) == (self.vote is None)
        assert len(self.session.utterances) == self.num_utterances
        assert len(self.session.decisions) == self.num_decisions
        assert {*self.session.expected()} <= {*self.memories}
        for name, memory in self.memories.items():
            self.holds_for(name, memory)

    def holds_for(self, name: str, memory: Memory) -> None:
        context = self.session.context(name)
        assert keys_of(context) == memory.keys
        assert len(set(memory.keys)) == len(memory.keys), "something was heard twice"
        earlier = self.contexts.get(name, ())
        assert context[: len(earlier)] == earlier, "a context only grows"
        self.contexts[name] = context
        prompt = self.session.prompt(name)
        marks = self.systems[name].union(
            *((self.verbatim if key in memory.own else self.spoken)[key] for key in memory.keys)
        )
        assert {mark for each in prompt for mark in MARK.findall(f"{each.content} {each.reasoning}")} == marks
        roles = [each.role for each in prompt]
        assert roles == ["system", *(["user", "assistant"] * len(roles))[: len(roles) - 1]]
        if name in self.prompts:
            assert_extends(self.prompts[name], prompt)
        self.prompts[name] = prompt
        numbers = [each.number for each in self.session.heard_by(name)]
        assert numbers == sorted(set(numbers))
        assert not {*self.reached[name]} - {*numbers}


def key_of(turn: int | None, number: int | None) -> Key:
    if turn is not None:
        return "turn", turn
    assert number is not None
    return "number", number


def keys_of(context: Sequence[Entry]) -> list[Key]:
    keys: list[Key] = []
    for at, entry in enumerate(context):
        if entry.kind != "cue":
            brought = entry.turn is None and entry.number is None
            keys.append(("brought", at) if brought else key_of(entry.turn, entry.number))
    return keys


def assert_extends(before: Sequence[Message], after: Sequence[Message]) -> None:
    """Only the last message of what was may have grown, at its end, and only if it was heard."""
    *same, last = before
    assert list(after[: len(same)]) == same
    then = after[len(same)]
    assert then == last or (last.role == then.role == "user" and str(then.content).startswith(f"{last.content}\n\n"))


SessionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSessionMachine = SessionMachine.TestCase
