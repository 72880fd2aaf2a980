"""Find which of a set of options a reply names. Works on text only: knows no votes and no session.

An option matches as a whole word, case-insensitively; where several options match at one position, the longest wins.
Explicit statements (a line "Vote: X", or a first line that holds only an option) win over mentions in prose. Nothing is
guessed: if the text stays ambiguous between several options, it names none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

ABSTAIN = "abstain"

# A letter or digit; `\w` would also match the underscores of emphasis.
_WORD = r"[^\W_]"
_BEFORE = rf"(?<!{_WORD})(?<!{_WORD}[-'])"
_AFTER = rf"(?!{_WORD})(?!-{_WORD})(?!'(?!s(?!{_WORD})){_WORD})"
_STATEMENT = re.compile(
    r"^[\W_]*(?:(?:my|our|final|the)\s+)*(?:vote|choice|answer|ballot|decision|ranking|move|pick)"
    r"[*_\s]*(?:is[*_\s]*)?[:=](?P<rest>.*)$"
)
_NUMBERED = re.compile(r"^[\W_]*\d{1,2}[.)]\s+(?=\S)")
# What may follow an option at the start of a line for it to count: an end, or the reason.
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
    """Return `text` normalized for comparing names: one case, NFKC, single spaces."""
    text = unicodedata.normalize("NFKC", text).translate({0x2019: "'", 0x2010: "-"}).casefold()
    return " ".join(text.split())


def choice(options: Sequence[str], text: str) -> str | None:
    """Return the option that `text` chooses; None if it abstains, names none or is ambiguous."""
    names = _Names(options)
    lines = _lines(text)
    prose = names.prose(text)
    meant = names.stated(lines) or names.chosen(prose) or names.mentioned(prose)
    return names.options.get(meant.pop()) if len(meant) == 1 else None


def ranking(options: Sequence[str], text: str) -> tuple[str, ...]:
    """Return the options that `text` lists, in its order, without duplicates; only the first of several lists."""
    names = _Names(options)
    listed = names.listed(_lines(text))
    if not listed:
        listed = names.found(names.prose(text))
        if ABSTAIN in listed:
            return ()
    return tuple(names.options[name] for name in dict.fromkeys(listed) if name != ABSTAIN)


def reason(options: Sequence[str], text: str) -> str:
    """Return what `text` says apart from naming an option, on one line, cut at a word boundary if it is long."""
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
    """The names to look for, including "abstain"; all texts passed in are folded."""

    def __init__(self, options: Iterable[str]) -> None:
        self.options = {folded(option): option for option in options}
        longest_first = sorted(self.options, key=len, reverse=True)
        self._pattern = re.compile(f"{_BEFORE}(?:{'|'.join(map(_whole, longest_first))}|{ABSTAIN}){_AFTER}")

    def found(self, line: str) -> list[str]:
        return self._pattern.findall(line)

    def is_list(self, line: str) -> bool:
        """Whether the line holds names and nothing else."""
        if not self._pattern.search(line):
            return False
        rest = self._pattern.sub(" ", self._unnumbered(line))
        return set(re.findall(r"\w+", rest.replace("_", " "))) <= _BETWEEN

    def stated(self, lines: Sequence[str]) -> set[str]:
        """Return the names in explicit statements, and `_SPOILED` for a statement that names no known option."""
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
        """Return `text` folded, without the articles and pronouns that look like an option of one capital letter."""
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
        """Return each name with the text before it."""
        return [
            (place.group(), prose[max(0, place.start() - _LOOK_BACK) : place.start()])
            for place in self._pattern.finditer(prose)
        ]

    def _unnumbered(self, line: str) -> str:
        """Strip the line's list number, unless that number is the only name in it."""
        rest = _NUMBERED.sub("", line)
        return rest if self._pattern.search(rest) else line


def _whole(name: str) -> str:
    """Return a pattern for a name; a number does not match inside another: 5 is not in 1.5."""
    before = r"(?<!\d\.)" if name[0].isdigit() else ""
    after = r"(?!\.\d)" if name[-1].isdigit() else ""
    return f"{before}{re.escape(name)}{after}"
