"""Outcomes of a scene: rules over its decisions, points and words, and the text to show if they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle_sessions.scenes.document import Field
from rekindle_sessions.scenes.story import Story
from rekindle_sessions.scenes.templating import Allowed, Template

FIELDS = ("text", "otherwise", "said", "decided", "scored")


@dataclass(frozen=True, slots=True)
class Said:
    """Check that an agent (None: any) said this in a phase (None: any), case-insensitively; or `never` did."""

    contains: str
    agent: str | None = None
    phase: str | None = None
    never: bool = False

    def holds(self, story: Story) -> bool:
        """Whether the check holds."""
        return self.never != any(
            self.contains.casefold() in line.text.casefold()
            for line in story.lines
            if self.agent in (None, line.by) and self.phase in (None, line.phase)
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """Check that a phase's vote decided for this option (None: for any)."""

    phase: str
    option: str | None = None

    def holds(self, story: Story) -> bool:
        """Whether the check holds."""
        found = story.decisions.get(self.phase)
        outcome = None if found is None else found.outcome
        return outcome is not None and self.option in (None, outcome)


@dataclass(frozen=True, slots=True)
class Scored:
    """Check that an agent's points are within bounds, or more than another agent's."""

    agent: str
    at_least: float | None = None
    at_most: float | None = None
    more_than: str | None = None

    def holds(self, story: Story) -> bool:
        """Whether the check holds."""
        score = story.scores[self.agent]
        return (
            (self.at_least is None or score >= self.at_least)
            and (self.at_most is None or score <= self.at_most)
            and (self.more_than is None or score > story.scores[self.more_than])
        )


Check = Said | Decided | Scored


@dataclass(frozen=True, slots=True)
class Rule:
    """`text` is shown if all checks hold (also if there are none), else `otherwise`.

    Both may use `held` and `of`: the number of checks that hold, and of all checks.
    """

    text: Template
    otherwise: Template | None = None
    checks: tuple[Check, ...] = ()

    def verdict(self, story: Story) -> Verdict | None:
        """Evaluate the rule; None if it shows no text."""
        held = sum(check.holds(story) for check in self.checks)
        holds = held == len(self.checks)
        template = self.text if holds else self.otherwise
        if template is None:
            return None
        return Verdict(template.render(story.values(held=held, of=len(self.checks))), holds, held, len(self.checks))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one rule; `of` 0: it has no checks."""

    text: str
    holds: bool
    held: int
    of: int


@dataclass(frozen=True, slots=True)
class Known:
    """What rules may refer to: agents, phases, and the options of phases with a vote."""

    agents: Sequence[str]
    phases: Sequence[str]
    options: dict[str, tuple[str, ...]]


def read_rules(field: Field, known: Known, allowed: Allowed) -> tuple[Rule, ...]:
    """Read the rules of a document."""
    return tuple(_read_rule(item, known, allowed) for item in field.items())


def _read_rule(field: Field, known: Known, allowed: Allowed) -> Rule:
    given = field.entries(FIELDS, ("text",))
    allowed = Allowed((*allowed.names, "held", "of"), allowed.members)
    checks: list[Check] = []
    if "said" in given:
        checks += [_read_said(item, known) for item in given["said"].items_or_one()]
    if "decided" in given:
        checks += [_read_decided(item, known) for item in given["decided"].items_or_one()]
    if "scored" in given:
        checks += [_read_scored(item, known) for item in given["scored"].items_or_one()]
    if "otherwise" in given and not checks:
        given["otherwise"].wrong("is never said: the rule checks nothing")
    text = given["text"].template(allowed) if "text" in given else Template("", field.place)
    return Rule(text, given["otherwise"].template(allowed) if "otherwise" in given else None, tuple(checks))


def _read_said(field: Field, known: Known) -> Said:
    given = field.entries(("agent", "contains", "phase", "never"), ("contains",))
    return Said(
        given["contains"].filled() if "contains" in given else "",
        given["agent"].one_of(known.agents, "agent") if "agent" in given else None,
        given["phase"].one_of(known.phases, "phase") if "phase" in given else None,
        given["never"].flag() if "never" in given else False,
    )


def _read_decided(field: Field, known: Known) -> Decided:
    given = field.entries(("phase", "option"), ("phase",))
    phase = given["phase"].one_of(known.options, "phase that decides") if "phase" in given else ""
    options = known.options.get(phase, ())
    return Decided(phase, given["option"].one_of(options, "option of this phase") if "option" in given else None)


def _read_scored(field: Field, known: Known) -> Scored:
    given = field.entries(("agent", "at_least", "at_most", "more_than"), ("agent",))
    if field.is_mapping and len(given) < 2:
        field.wrong("needs at_least, at_most or more_than")
    return Scored(
        given["agent"].one_of(known.agents, "agent") if "agent" in given else "",
        given["at_least"].number() if "at_least" in given else None,
        given["at_most"].number() if "at_most" in given else None,
        given["more_than"].one_of(known.agents, "agent") if "more_than" in given else None,
    )
