"""Games in a scene: all players move simultaneously, and a table gives each player's points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.scenes.document import Field
from rekindle_sessions.scenes.templating import Allowed, Template

MOST_ROUNDS = 100
MOST_ENTRIES = 1_000  # per table
FIELDS = ("question", "moves", "payoffs", "rounds", "default")

Moves = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Game:
    """`payoffs`: for each combination of moves, in the order of the players, the points of each.

    `default` is the move of a player whose answer names none; without a default nobody gets points in that round.
    """

    question: Template
    moves: Moves
    payoffs: Mapping[Moves, tuple[float, ...]]
    rounds: int = 1
    default: str | None = None

    def rendered_question(self, values: Mapping[str, Any]) -> Question:
        """Return the question of a round."""
        return Question(self.question.render(values), self.moves, "moves")

    def points(self, made: Sequence[str | None]) -> tuple[float, ...]:
        """Return each player's points for these moves; all zero if a move is missing."""
        moves = tuple(move for move in made if move is not None)
        return self.payoffs[moves] if len(moves) == len(made) else (0.0,) * len(made)


def number(points: float) -> int | float:
    """Return points as displayed: 3, not 3.0."""
    return int(points) if points == int(points) else points


def read_game(field: Field, players: Sequence[str], allowed: Allowed) -> Game | None:
    """Read a phase's game; None if it is too broken to continue."""
    given = field.entries(FIELDS, ("question", "moves", "payoffs"))
    if "moves" not in given or "payoffs" not in given or "question" not in given:
        return None
    moves = _read_moves(given["moves"])
    if moves is None:
        return None
    payoffs: dict[Moves, tuple[float, ...]] = {}
    if len(moves) ** len(players) > MOST_ENTRIES:
        given["payoffs"].wrong(f"{len(players)} players with {len(moves)} moves each are more than {MOST_ENTRIES} rows")
    else:
        _read_payoffs(given["payoffs"], players, moves, (), payoffs)
    members = {**allowed.members, "moves": players}
    question = given["question"].template(Allowed((*allowed.names, "round", "rounds"), members))
    return Game(
        question,
        moves,
        payoffs,
        given["rounds"].whole(1, MOST_ROUNDS) if "rounds" in given else 1,
        given["default"].one_of(moves, "move") if "default" in given else None,
    )


def _read_moves(field: Field) -> Moves | None:
    moves = tuple(item.filled() for item in field.items())
    try:
        return Question("Which move?", moves, "moves").options
    except BadRequest as error:
        field.wrong(str(error))
        return None


def _read_payoffs(
    field: Field, players: Sequence[str], moves: Moves, made: Moves, payoffs: dict[Moves, tuple[float, ...]]
) -> None:
    """Fill `payoffs` from nested mappings: the first player's move, then the second's, and so on, then the points."""
    if len(made) == len(players):
        points = tuple(item.number() for item in field.items())
        if field.is_list and len(points) != len(players):
            field.wrong(f"must have {len(players)} numbers, one for each of {', '.join(players)}, not {len(points)}")
        payoffs[made] = points
        return
    inner = field.entries(moves)
    for move in moves:
        if move in inner:
            _read_payoffs(inner[move], players, moves, (*made, move), payoffs)
        elif field.is_mapping:
            field.wrong(f"has no row for {move!r} of {players[len(made)]}")
