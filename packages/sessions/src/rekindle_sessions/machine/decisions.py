"""Group decisions: instructions to voters, parsing of ballots, and counting. Pure: no engine, no session."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rekindle.errors import BadRequest
from rekindle_sessions.machine.ballots import ABSTAIN, choice, folded, ranking, reason

Mode = Literal["majority", "ranked", "consensus", "coordinator", "moves"]
_FEWEST_OPTIONS = 2
_MOST_OPTIONS = 26


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be decided, and how.

    `majority`: most first choices; `ranked`: instant runoff over rankings; `consensus`: repeated, with the tally and
    the reasons announced in between, until `threshold` of those who vote agree or `max_rounds` are over; `coordinator`:
    all vote, then the coordinator decides, given the tally; `moves`: everybody's choice stands, as in a game.
    `is_open`: all voters hear the ballots; otherwise only the tally is announced, with anonymous reasons in consensus
    and to a coordinator. Surplus whitespace is removed from options.
    """

    text: str
    options: tuple[str, ...]
    mode: Mode = "majority"
    coordinator: str | None = None
    max_rounds: int = 3
    threshold: float = 1.0
    is_open: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(" ".join(option.split()) for option in self.options))
        if self.mode not in get_args(Mode):
            raise BadRequest(f"There is no mode {self.mode!r}: use one of {', '.join(get_args(Mode))}.", param="mode")
        if not self.text.strip():
            raise BadRequest("Say what is to be decided: the text is empty.", param="text")
        self._check_options()
        if not 0.5 < self.threshold <= 1:
            raise BadRequest("A threshold is a share above 0.5 and at most 1.", param="threshold")
        if self.max_rounds < 1:
            raise BadRequest("There has to be at least one round: raise max_rounds.", param="max_rounds")
        if (self.mode == "coordinator") != bool(self.coordinator):
            raise BadRequest("Name a coordinator in mode coordinator, and only there.", param="coordinator")

    def _check_options(self) -> None:
        names = [folded(option) for option in self.options]
        if not _FEWEST_OPTIONS <= len(names) <= _MOST_OPTIONS:
            raise BadRequest(f"Give {_FEWEST_OPTIONS} to {_MOST_OPTIONS} options, not {len(names)}.", param="options")
        if "" in names:
            raise BadRequest("An option is empty: give each a name.", param="options")
        if ABSTAIN in names:
            raise BadRequest("Leave out the option to abstain: voters always have it.", param="options")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadRequest(f"Options have to differ by more than case and space: {twice[0]!r}.", param="options")


@dataclass(frozen=True, slots=True)
class Ballot:
    """One voter's reply and its parsed ranking: the options it names, best first; empty if it abstains."""

    voter: str
    text: str
    ranking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """One count: votes by option, in the question's order, without options eliminated earlier."""

    votes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of a vote. `outcome` None: nothing was decided; `tied` holds the options that tied.

    `counts`: one per round of ballots (consensus; coordinator: the voters', then its own) or per runoff count (ranked).
    `ballots`: of the last round; coordinator: the voters', then its own. `abstained`: the voters whose ballot is empty.
    """

    question: Question
    outcome: str | None
    counts: tuple[Count, ...]
    tied: tuple[str, ...]
    abstained: tuple[str, ...]
    ballots: tuple[Ballot, ...]
    num_rounds: int = 1


@dataclass(frozen=True, slots=True)
class Again:
    """No decision yet: make this announcement, then have these voters vote (again)."""

    announcement: str
    voters: tuple[str, ...]


def instructions(question: Question) -> str:
    """Return the instructions to voters. The question comes last: small models answer what they read last."""
    if question.mode == "ranked":
        how = "Answer with these options only, the best first, separated by commas"
    elif question.mode == "consensus":
        how = "Answer with exactly one of these options, then say why in one sentence"
    else:
        how = "Answer with exactly one of these options and nothing else"
    return f'We decide. {how}, or with "{ABSTAIN}": {"; ".join(question.options)}.\n\n{question.text.strip()}'


def read_ballot(question: Question, voter: str, text: str) -> Ballot:
    """Parse a reply into a ballot. Any text is accepted; an ambiguous one is spoiled and counts as abstaining."""
    words = text
    if folded(voter) not in map(folded, question.options):  # drop a script-style "Name:" prefix
        words = re.sub(rf"^[\W_]*{re.escape(voter)}[\W_]*?:", "", words, count=1, flags=re.IGNORECASE)
    if question.mode == "ranked":
        return Ballot(voter, text, ranking(question.options, words))
    chosen = choice(question.options, words)
    return Ballot(voter, text, () if chosen is None else (chosen,))


def judge(question: Question, rounds: Sequence[Sequence[Ballot]]) -> Decision | Again:
    """Evaluate the ballots so far; `rounds` in order, each complete, the coordinator's own being a round of one.

    A tie decides nothing. In a runoff (instant runoff voting, Ware 1871) an option wins with more than half of the
    ballots that still name a remaining option. Otherwise options without votes are eliminated, or else the one with the
    fewest: ties are broken by fewer votes in the previous count, then the one before, and finally by the last position
    in the question. If all remaining options have equally many votes, they are tied.
    """
    assert rounds, "nobody has voted yet"
    for ballots in rounds:
        assert len({ballot.voter for ballot in ballots}) == len(ballots), "somebody voted twice"
    match question.mode:
        case "majority":
            return _decision(question, rounds, *_leading(_count(question, rounds[-1])))
        case "ranked":
            return _runoff(question, rounds)
        case "consensus":
            return _consensus(question, rounds)
        case "coordinator":
            return _coordinated(question, rounds)
        case "moves":
            return _decision(question, rounds, None, ())


def announcement(decision: Decision) -> str:
    """Return the host's announcement of a decision, including tally, ties and abstentions.

    For secret ballots it gives only numbers; moves are announced by name.
    """
    question = decision.question
    if question.mode == "moves":
        moves = "; ".join(f"{ballot.voter}: {ballot.ranking[0]}" for ballot in decision.ballots if ballot.ranking)
        return f"Moves: {moves or 'none'}{_abstentions(decision.abstained, named=True)}."
    count, abstained = decision.counts[-1], decision.abstained
    if question.mode == "coordinator":
        count, abstained = decision.counts[0], _abstaining(decision.ballots[:-1])
    counted = f"{_tally(count)}{_abstentions(abstained, named=question.is_open)}."
    if question.mode == "ranked" and len(decision.counts) > 1:
        counted = f"{counted[:-1]} (after {len(decision.counts)} counts)."
    return f"{_outcome(decision)}. Votes: {counted}"


def _outcome(decision: Decision) -> str:
    question = decision.question
    if question.mode == "coordinator":
        return f"{question.coordinator} decided: {decision.outcome or 'nothing'}"
    if decision.outcome is not None:
        return f"Decided: {decision.outcome}"
    tied = f", tied between {' and '.join(decision.tied)}" if decision.tied else ""
    rounds = f" after round {decision.num_rounds}" if question.mode == "consensus" else ""
    return f"No decision{rounds}{tied}"


def _count(question: Question, ballots: Sequence[Ballot], eliminated: Collection[str] = ()) -> Count:
    """Count each ballot for the first option it names that is not `eliminated`."""
    votes = {option: 0 for option in question.options if option not in eliminated}
    for ballot in ballots:
        for option in ballot.ranking:
            if option in votes:
                votes[option] += 1
                break
    return Count(tuple(votes.items()))


def _leading(count: Count) -> tuple[str | None, tuple[str, ...]]:
    """Return the leading option and (); (None, the tied options) on a tie; (None, ()) without votes."""
    most = max(votes for _, votes in count.votes)
    ahead = tuple(option for option, votes in count.votes if votes == most)
    if most == 0:
        return None, ()
    return (ahead[0], ()) if len(ahead) == 1 else (None, ahead)


def _decision(
    question: Question,
    rounds: Sequence[Sequence[Ballot]],
    outcome: str | None,
    tied: tuple[str, ...],
    *,
    counts: Sequence[Count] = (),
) -> Decision:
    ballots = tuple(rounds[-1])
    return Decision(
        question,
        outcome,
        counts=tuple(counts) or tuple(_count(question, ballots) for ballots in rounds),
        tied=tied,
        abstained=_abstaining(ballots),
        ballots=ballots,
        num_rounds=len(rounds),
    )


def _runoff(question: Question, rounds: Sequence[Sequence[Ballot]]) -> Decision:
    counts: list[Count] = []
    eliminated: set[str] = set()
    while True:
        counts.append(_count(question, rounds[-1], eliminated))
        votes = dict(counts[-1].votes)
        outcome, tied = _leading(counts[-1])
        if outcome is not None and 2 * votes[outcome] > sum(votes.values()):
            return _decision(question, rounds, outcome, (), counts=counts)
        if outcome is None and len(tied) in (0, len(votes)):
            return _decision(question, rounds, None, tied, counts=counts)
        eliminated |= {option for option in votes if votes[option] == 0} or {_last(votes, counts)}


def _last(votes: dict[str, int], counts: Sequence[Count]) -> str:
    earlier = [dict(count.votes) for count in reversed(counts)]
    return min(reversed(votes), key=lambda option: [count[option] for count in earlier])


def _consensus(question: Question, rounds: Sequence[Sequence[Ballot]]) -> Decision | Again:
    ballots = rounds[-1]
    count = _count(question, ballots)
    outcome, tied = _leading(count)
    if outcome is not None:
        votes = dict(count.votes)
        if votes[outcome] >= question.threshold * sum(votes.values()) - 1e-9:  # 7 of 10 reach 0.7 despite rounding
            return _decision(question, rounds, outcome, ())
    if len(rounds) >= question.max_rounds:
        return _decision(question, rounds, None, tied)
    result = f"No agreement in round {len(rounds)} of {question.max_rounds}. {_summary(question, ballots)}"
    return Again(f"{result}\n\n{instructions(question)}", tuple(ballot.voter for ballot in ballots))


def _coordinated(question: Question, rounds: Sequence[Sequence[Ballot]]) -> Decision | Again:
    assert question.coordinator is not None
    voters, *own = rounds
    if not own:
        who = question.coordinator
        return Again(f"{_summary(question, voters)} {who}, you decide.\n\n{instructions(question)}", (who,))
    (ballot,) = own[-1]
    ballots = (*voters, ballot)
    abstained = tuple(dict.fromkeys(_abstaining(ballots)))
    outcome = ballot.ranking[0] if ballot.ranking else None
    return replace(_decision(question, rounds, outcome, ()), ballots=ballots, abstained=abstained)


def _abstaining(ballots: Sequence[Ballot]) -> tuple[str, ...]:
    return tuple(ballot.voter for ballot in ballots if not ballot.ranking)


def _summary(question: Question, ballots: Sequence[Ballot]) -> str:
    """Return the tally and, if the ballots were secret, the reasons in them without names."""
    abstained = _abstentions(_abstaining(ballots), named=question.is_open)
    votes = f"Votes: {_tally(_count(question, ballots))}{abstained}."
    if question.is_open:
        return votes
    reasons = [
        f"For {option}: {why}"
        for option in question.options
        for why in sorted(reason(question.options, each.text) for each in ballots if each.ranking[:1] == (option,))
        if why
    ]
    return " ".join([votes, *reasons])


def _tally(count: Count) -> str:
    return ", ".join(f"{option} {votes}" for option, votes in count.votes if votes) or "none"


def _abstentions(abstained: Sequence[str], *, named: bool) -> str:
    if not abstained:
        return ""
    return f"; abstained: {', '.join(abstained) if named else len(abstained)}"
