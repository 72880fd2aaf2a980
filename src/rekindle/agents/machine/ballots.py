"""Which of some options a reply names. Knows words only: no votes, no session.

A name counts where it stands as a word of its own, whatever its case; of names that begin at one place the longest.
Places that say clearly what is meant, a line "Vote: X" or a first line of nothing but an option, win over mentions in
prose, and where no place is clear nothing is guessed: several names are none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

ABSTAIN = "abstain"

# No letter or digit; `\w` would take the underscores of emphasis for parts of a word.
_WORD = r"[^\W_]"
_BEFORE = rf"(?<!{_WORD})(?<!{_WORD}[-'])"
_AFTER = rf"(?!{_WORD})(?!-{_WORD})(?!'(?!s(?!{_WORD})){_WORD})"
_STATEMENT = re.compile(
    r"^[\W_]*(?:(?:my|our|final|the)\s+)*(?:vote|choice|answer|ballot|decision|ranking|move|pick)"
    r"[*_\s]*(?:is[*_\s]*)?[:=](?P<rest>.*)$"
)
_NUMBERED = re.compile(r"^[\W_]*\d{1,2}[.)]\s+(?=\S)")
# What may follow a name that leads a line for it to be meant: an end, or the reason why.
_MEANT = re.compile(r"\s*[.;!?(:–—]|[\s,*_]*(?:because|since|as|not|over|rather|instead|for)\b")
_CHOOSING = re.compile(
    r"(?:\bi(?:'ll|'d| will| would)? (?:vote|choose|pick|go|play|support)"
    r"|\bmy (?:final )?(?:vote|choice|pick|answer|move)(?: is| goes)?)(?: for| with| to)?(?: the| option)?[\W_]*$"
)
_REJECTING = re.compile(
    r"(?:\b(?:not|never|nor|neither|against|than|over|instead of)|n't)(?: vote| choose)?(?: for| the)*[\W_]*$"
)
_BETWEEN = {*"and or then first second third last best worst option".split()}
_SPOILED = ""
_LOOK_BACK = 48
_MOST_REASON = 240


def folded(text: str) -> str:
    """Return `text` as names are compared: one case, one form of each sign, single spaces."""
    text = unicodedata.normalize("NFKC", text).translate({0x2019: "'", 0x2010: "-"}).casefold()
    return " ".join(text.split())


def choice(options: Sequence[str], text: str) -> str | None:
    """Return the one option that `text` means; None where it abstains, names none or leaves open which."""
    names = _Names(options)
    lines = _lines(text)
    prose = names.prose(text)
    meant = names.stated(lines) or names.chosen(prose) or names.mentioned(prose)
    return names.options.get(meant.pop()) if len(meant) == 1 else None


def ranking(options: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the options that `text` lists, in its order, each once; of several lists the first."""
    names = _Names(options)
    listed = names.listed(_lines(text))
    if not listed:
        listed = names.found(names.prose(text))
        if ABSTAIN in listed:
            return ()
    return tuple(names.options[name] for name in dict.fromkeys(listed) if name != ABSTAIN)


def reason(options: Sequence[str], text: str) -> str:
    """Return what `text` says beside naming an option, on one line, cut after a word if it is long."""
    names = _Names(options)
    kept = []
    for raw in text.splitlines():
        line = folded(raw)
        statement = _STATEMENT.match(line)
        if line and not names.is_list(line) and not (statement and names.is_list(statement["rest"])):
            kept.append(" ".join(raw.split()))
    whole = " ".join(kept)
    return whole if len(whole) <= _MOST_REASON else f"{whole[:_MOST_REASON].rsplit(' ', 1)[0]} …"


def _lines(text: str) -> list[str]:
    return [line for raw in text.splitlines() if (line := folded(raw))]


class _Names:
    """The names to look for, "abstain" among them; all texts are folded."""

    def __init__(self, options: Iterable[str]) -> None:
        self.options = {folded(option): option for option in options}
        longest_first = sorted(self.options, key=len, reverse=True)
        self._pattern = re.compile(f"{_BEFORE}(?:{'|'.join(map(_whole, longest_first))}|{ABSTAIN}){_AFTER}")

    def found(self, line: str) -> list[str]:
        return self._pattern.findall(line)

    def is_list(self, line: str) -> bool:
        """Whether there are names in it and nothing else."""
        if not self._pattern.search(line):
            return False
        rest = self._pattern.sub(" ", self._unnumbered(line))
        return set(re.findall(r"\w+", rest.replace("_", " "))) <= _BETWEEN

    def stated(self, lines: Sequence[str]) -> set[str]:
        """What places say that are there to say it; `_SPOILED` for one that names nothing known."""
        stated: set[str] = set()
        for number, line in enumerate(lines):
            if number == 0 and (leading := self._leading(line)):
                stated |= leading
            elif statement := _STATEMENT.match(line):
                following = lines[number + 1 : number + 2]
                rest = statement["rest"] if re.search(_WORD, statement["rest"]) else " ".join(following)
                stated |= self._leading(rest) or set(self.found(rest)) or {_SPOILED}
        return stated

    def chosen(self, prose: str) -> set[str]:
        return {name for name, before in self._places(prose) if _CHOOSING.search(before)}

    def mentioned(self, prose: str) -> set[str]:
        return {name for name, before in self._places(prose) if not _REJECTING.search(before)}

    def listed(self, lines: Sequence[str]) -> list[str]:
        listed: list[str] = []
        for line in lines:
            statement = None if self.is_list(line) else _STATEMENT.match(line)
            rest = statement["rest"] if statement else line
            if self.is_list(rest):
                listed += self.found(self._unnumbered(rest))
            elif _NUMBERED.match(rest) and self.found(rest):
                listed += self.found(self._unnumbered(rest))[:1]
            elif listed:
                break
            elif statement and self.found(rest):
                return self.found(rest)
        return listed

    def prose(self, text: str) -> str:
        """All of it, less the articles and pronouns that an option of one capital letter would be taken for."""
        for option in self.options.values():
            if len(option) == 1 and option.isupper():
                text = re.sub(rf"\b{re.escape(option.lower())}\b", " ", text)
        return folded(text)

    def _leading(self, line: str) -> set[str]:
        if self.is_list(line):
            return set(self.found(self._unnumbered(line)))
        first = self._pattern.search(line)
        if first is None or re.search(_WORD, line[: first.start()]) or not _MEANT.match(line, first.end()):
            return set()
        return {first.group()}

    def _places(self, prose: str) -> list[tuple[str, str]]:
        """Each name with what stands before it."""
        return [
            (place.group(), prose[max(0, place.start() - _LOOK_BACK) : place.start()])
            for place in self._pattern.finditer(prose)
        ]

    def _unnumbered(self, line: str) -> str:
        """The line without its number in a list, unless the number is the only name in it."""
        rest = _NUMBERED.sub("", line)
        return rest if self._pattern.search(rest) else line


def _whole(name: str) -> str:
    """A name as a pattern; of a number no part of another: 5 is not in 1.5."""
    before = r"(?<!\d\.)" if name[0].isdigit() else ""
    after = r"(?!\.\d)" if name[-1].isdigit() else ""
    return f"{before}{re.escape(name)}{after}"
