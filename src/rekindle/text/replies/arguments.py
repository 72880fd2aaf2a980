"""The arguments of a call as JSON, passed on while they are generated; shared by the forms that write JSON.

They are verbatim but for strings, which are repaired (`text/tools_json`).
"""

from __future__ import annotations

from typing import Literal

from rekindle.text.arguments import read_object
from rekindle.text.messages import GUARD
from rekindle.text.replies.reader import Passed
from rekindle.text.tools_json import StringRepair, ValueScan

# "closed": the value is complete. "cut": a mark interrupts it. "more": it depends on text to come.
Found = Passed | Literal["closed", "cut", "more"]


class JsonArguments:
    """Reads one JSON value, which the mark `close` (if there is one) and special tokens cut off."""

    def __init__(self, close: str = "") -> None:
        self._close = close
        self._scan = ValueScan(close[:1] or GUARD)
        self._repair = StringRepair()
        self._passed: list[str] = []

    @property
    def closed(self) -> bool:
        """Whether the value has ended."""
        return self._scan.done

    @property
    def whole(self) -> bool:
        """Whether the value is complete, and JSON if it is an object. Costs a pass over it."""
        text = "".join(self._passed)
        return self._scan.done and (not text.startswith("{") or read_object(text) is not None)

    @property
    def begun(self) -> bool:
        """Whether anything of the value was read."""
        return self._scan.begun

    def advance(self, text: str, at: int, *, final: bool) -> tuple[int, Found]:
        """Read one more piece of `text` from `at`; at the end of everything (`final`) an open value is "cut"."""
        end = self._scan.read(text, at)
        while not self._scan.done and end < len(text):
            rest = text[end:]
            is_part = bool(self._close) and self._close.startswith(rest) and not final
            if rest.startswith(GUARD) or (self._close and rest.startswith(self._close)) or is_part:
                break
            end = self._scan.read(text, end + 1)
        if end > at:
            is_object = (self._passed or [text[at]])[0].startswith("{")
            return end, self._pass(self._repair.push(text[at:end]) if is_object else text[at:end])
        if self._scan.done:
            return at, "closed"
        rest = text[at:]
        waits = not final and (not rest or (bool(self._close) and self._close.startswith(rest) and rest != self._close))
        if not waits and self._repair.held:
            held, self._repair = self._repair.held, StringRepair()
            return at, self._pass(held)
        return at, "more" if waits else "cut"

    def _pass(self, text: str) -> Passed:
        self._passed.append(text)
        return Passed(text)
