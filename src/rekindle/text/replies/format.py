"""How replies of a model are written: a value, found by `text/replies/probes`, read by `text/replies`.

Marks are structured text: a token flagged special stands in them as a guard and its spelling.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rekindle.text.replies.channels import ChannelForm, ChannelReader
from rekindle.text.replies.events import Event, new_call_id
from rekindle.text.replies.reader import CallMarks, CallReader, CallScan
from rekindle.text.tools_json import skip_blanks

SHORT_ID_LENGTH = 9
_SHORT_ID_SIGNS = string.ascii_letters + string.digits


class ToolFormat(Protocol):
    """How calls are written."""

    @property
    def marks(self) -> CallMarks:
        """What stands around calls."""

    def opening(self, name: str | None) -> str | None:
        """How a call begins, of that tool or any; None: it cannot be forced."""

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """What makes a scan for each call; `tools` are the definitions sent, if they are known."""


class BodyReader(Protocol):
    """Reads what follows the thoughts of a reply."""

    @property
    def ended(self) -> bool:
        """Whether nothing that follows is wanted."""

    def push(self, text: str) -> list[Event]:
        """Take more; return what became certain."""

    def finish(self) -> list[Event]:
        """The reply is over: return what was held back."""


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """Thoughts stand between `open` and `close`, at the start of a reply; the template adds `lead` and `trail`.

    `gap` is what the template puts between `close` and the text.
    """

    open: str
    close: str
    lead: str = ""
    trail: str = ""
    gap: str = ""

    @property
    def ending(self) -> str:
        """What ends thoughts that are open, down to where text or a call may begin."""
        return self.trail + self.close + self.gap

    def opened_at_end_of(self, prompt: str) -> str:
        """What the end of a structured prompt has begun of the reply: open thoughts, or empty ones that are closed."""
        at = prompt.rfind(self.open)
        if at < 0:
            return ""
        opened = prompt[at:]
        rest = opened[skip_blanks(opened, len(self.open)) :]
        closed = rest.startswith(self.close) and skip_blanks(rest, len(self.close)) == len(rest)
        return opened if not rest or closed else ""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How replies of a model are written. `tools` None: no calls are known; `thinking` None: no thoughts.

    `visible`: ids of tokens flagged special which a reader needs to see, `specials` how they stand in structured text.
    `call_ids`: "short" where the template takes ids of nine letters and digits only. `one_call`: the template takes one
    call a message, so a reply ends behind its first.
    """

    thinking: ThinkingFormat | None = None
    tools: ToolFormat | None = None
    visible: frozenset[int] = frozenset()
    specials: tuple[str, ...] = ()
    call_ids: Literal["long", "short"] = "long"
    one_call: bool = False

    def opening(self, name: str | None) -> str | None:
        """How a call begins, of that tool or (None) any, as structured text; None: a call cannot be forced."""
        return self.tools.opening(name) if self.tools else None

    @property
    def leading_thoughts(self) -> ThinkingFormat | None:
        """How thoughts begin a reply; None where there are none, or where channels say what is thought."""
        return None if isinstance(self.tools, ChannelForm) else self.thinking

    def opened_at_end_of(self, prompt: str) -> str:
        """What the end of a structured prompt has begun of the reply: mostly nothing."""
        if isinstance(self.tools, ChannelForm):
            return self.tools.opened_at_end_of(prompt)
        return self.thinking.opened_at_end_of(prompt) if self.thinking else ""

    def bridged(self, opened: str, prefix: str) -> str:
        """`prefix`, text or a call, as it can stand behind `opened`: thoughts that are open are ended first."""
        if isinstance(self.tools, ChannelForm):
            return self.tools.bridged(opened, prefix)
        is_open = self.thinking is not None and bool(opened) and self.thinking.close not in opened
        return (self.thinking.ending if self.thinking and is_open else "") + prefix

    def new_id(self) -> str:
        """A fresh id for a call, as the template takes it back."""
        if self.call_ids == "long":
            return new_call_id()
        return "".join(secrets.choice(_SHORT_ID_SIGNS) for _ in range(SHORT_ID_LENGTH))

    def reader(self, tools: bool | Sequence[Any], *, parallel: bool, new_id: Callable[[], str]) -> BodyReader:
        """What reads the part of a reply behind its thoughts; calls are read if there are `tools`."""
        known = () if isinstance(tools, bool) else tuple(tools)
        is_asked = tools is True or bool(known)
        if isinstance(self.tools, ChannelForm):
            return ChannelReader(self.tools, calls=is_asked, specials=self.specials, parallel=parallel, new_id=new_id)
        form = self.tools if is_asked else None
        new_scan = form.new_scan(known) if form else None
        marks = form.marks if form else None
        return CallReader(marks, new_scan, specials=self.specials, parallel=parallel, new_id=new_id)
