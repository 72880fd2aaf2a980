"""Participants: check plans and names, make forks, find names in text.

`check_plan` and `check_name` also apply to events of stored sessions: what they refuse was never accepted. Names that
only look alike are refused for new names only (`check_new_plan`, `check_look`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from rekindle.agent_ids import is_shown
from rekindle.errors import BadRequest
from rekindle_sessions.machine.ballots import choice, ranking
from rekindle_sessions.machine.types import MOST_AGENTS, TOPOLOGIES, Forked, Participant, Plan

MOST_NAME_CHARS = 64
SIGNS = ":,()"  # what is around names in text
SCRIPTS = frozenset({"LATIN", "CYRILLIC", "GREEK", "COPTIC", "ARMENIAN", "CHEROKEE"})  # they share letter shapes
PAIRS = (  # letters, and the Latin ones that look like them
    ("АВЕЅІЈКМНОРСТУҮХԚԜӀѴЗ", "ABESIJKMHOPCTYYXQWIV3"),
    ("аеѕіјорсуүхԛԝһԁѵӏ", "aesijopcyyxqwhdvl"),
    ("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧͿ", "ABEZHIKMNOPTYXJ"),
    ("αγικνορυϳ", "ayikvopuj"),
    ("ՕՍՏօսհոցզ", "OUSouhngq"),
    ("ᎪᏴᏟᎠᎬᏀᎻᎫᏦᏞᎷᏢᎡᏚᎢᏙᏔᏃ", "ABCDEGHJKLMPRSTVWZ"),
    ("ıɑɡ", "iag"),
)
_LATIN = {ord(other): latin for others, latins in PAIRS for other, latin in zip(others, latins, strict=True)}
# Printable but invisible: joiners, fillers, variation selectors.
_UNSEEN = [0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)]
_UNSEEN += range(0xE0100, 0xE01F0)
_SHAPES: dict[int, str | None] = {**_LATIN, **dict.fromkeys(_UNSEEN)}


# Detect names that look alike although their characters differ: in Latin, Cyrillic, Greek and other scripts.
#
# Owns which letters of other scripts look like which Latin ones, case-sensitively (Cyrillic `Н` looks like `H`, `н`
# like no Latin letter), and which characters are invisible. After Unicode's Technical Standard 39, whose full table of
# confusables is not needed for names: similar letters within one script (`l` and `I`) are not treated as alike.


def skeleton(name: str) -> str:
    """Return the Latin skeleton of a name: names that look alike have the same skeleton."""
    unseen = unicodedata.normalize("NFKD", name.translate(dict.fromkeys(_UNSEEN))).translate(_SHAPES)
    return unicodedata.normalize("NFKD", unseen.casefold())


def mixed_scripts(name: str) -> tuple[str, ...]:
    """Return the scripts of the first word that mixes scripts sharing letter shapes; empty if no word does."""
    found: set[str] = set()
    for each in unicodedata.normalize("NFKC", name):
        script = unicodedata.name(each, "").partition(" ")[0]
        if each.isalpha() and script in SCRIPTS:
            found.add(script)
        elif not (each.isalpha() or unicodedata.combining(each)):
            found.clear()
        if len(found) > 1:
            return tuple(sorted(found))
    return ()


def check_plan(plan: Plan) -> None:
    """Raise BadRequest for an invalid plan."""
    names = [each.name for each in plan.participants]
    if not 2 <= len(names) <= MOST_AGENTS:
        raise BadRequest(f"a session has 2 to {MOST_AGENTS} agents, not {len(names)}", param="agents")
    for at, name in enumerate(names):
        check_name(name, (*names[:at], plan.host), param=f"agents[{at}].name")
    check_name(plan.host, (), param="host")
    identities = [each.agent for each in plan.participants if each.agent is not None]
    if len(set(identities)) < len(identities):
        raise BadRequest("two agents of one session cannot be the same permanent agent", param="agents")
    if plan.topology not in TOPOLOGIES:
        raise BadRequest(f"topology must be one of {', '.join(TOPOLOGIES)}, not {plan.topology!r}", param="topology")
    if plan.topology == "moderated" and plan.moderator is None:
        raise BadRequest("a moderated session needs a moderator: name one of its agents", param="moderator")
    if plan.moderator is not None and plan.moderator not in names:
        raise BadRequest(f"the moderator {plan.moderator!r} is none of the agents", param="moderator")


def check_new_plan(plan: Plan) -> None:
    """Check the plan of a new session, whose names must also look different; stored sessions are exempt from that."""
    check_plan(plan)
    names = [each.name for each in plan.participants]
    for at, name in enumerate(names):
        check_look(name, (*names[:at], plan.host), param=f"agents[{at}].name")
    check_look(plan.host, (), param="host")


def check_look(name: str, taken: Sequence[str], *, param: str) -> None:
    """Raise BadRequest for a new name that could be mistaken for another one."""
    scripts = mixed_scripts(name)
    if scripts:
        mixed = " and ".join(each.capitalize() for each in scripts)
        raise BadRequest(f"{name!r} cannot be a name: a word of it has {mixed} letters, which look alike", param=param)
    signs = sorted({*SIGNS} & {*unicodedata.normalize("NFKC", name)})
    if signs:
        raise BadRequest(f"{name!r} cannot be a name: it has a sign that looks like {signs[0]!r}", param=param)
    shape = skeleton(name)
    other = next((each for each in taken if each != name and skeleton(each) == shape), None)
    if other is not None:
        raise BadRequest(f"the name {name!r} looks like {other!r}, which is taken", param=param)


def check_name(name: str, taken: Sequence[str], *, param: str) -> None:
    """Raise BadRequest for a name that is taken, or that cannot be distinguished from other text."""
    if not name.strip() or name != name.strip() or len(name) > MOST_NAME_CHARS:
        message = f"a name has 1 to {MOST_NAME_CHARS} characters, and no blanks around them"
        raise BadRequest(message, param=param)
    if name in (".", "..") or not is_shown(name) or any(sign in name for sign in SIGNS):
        raise BadRequest(
            f"{name!r} cannot be a name: no dots alone, line breaks, colons, commas, brackets", param=param
        )
    if _alike(name) in map(_alike, taken):
        raise BadRequest(f"the name {name!r} is taken", param=param)


def _alike(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def forked(participants: Mapping[str, Participant], host: str, source: Participant, event: Forked) -> Participant:
    """Return the new participant; it lives as long as the session."""
    if len(participants) >= MOST_AGENTS:
        raise BadRequest(f"a session has at most {MOST_AGENTS} agents", param="name")
    check_name(event.target, (*participants, host), param="name")
    return Participant(event.target, event.persona or source.persona, source.role)


def named(text: str, names: Sequence[str]) -> str | None:
    """Return the name that a text chooses, else the first one it mentions; of overlapping names the longest."""
    return choice(names, text) or next(iter(ranking(names, text)), None)
