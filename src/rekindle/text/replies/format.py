"""The format of a model's replies: a value, found by `text/replies/probes`, read by `text/replies`.

Marks are structured text: a token flagged special is in them as a guard and its content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rekindle.text.arguments import skip_blanks
from rekindle.text.replies.channels import ChannelForm, ChannelReader
from rekindle.text.replies.events import Event, new_call_id
from rekindle.text.replies.reader import CallLayout, CallMarks, CallReader, CallScan

SHORT_ID_LENGTH = 9
_SHORT_ID_SIGNS = string.ascii_letters + string.digits


class ToolFormat(Protocol):
    """How calls are written."""

    @property
    def marks(self) -> CallMarks:
        """The marks around calls."""

    def opening(self, name: str | None) -> str | None:
        """The beginning of a call of that tool, or of any; None: it cannot be forced."""

    @property
    def layout(self) -> CallLayout | None:
        """How whole calls are written; None if their arguments are neither JSON nor in tags."""

    def new_scan(self, tools: Sequence[Any]) -> Callable[[], CallScan]:
        """Return a factory of scans, one per call; `tools` are the definitions sent, if they are known."""


class BodyReader(Protocol):
    """Reads what follows the reasoning of a reply."""

    @property
    def ended(self) -> bool:
        """Whether the rest of the reply is ignored."""

    def push(self, text: str) -> list[Event]:
        """Read more; return the events that are now certain."""

    def finish(self) -> list[Event]:
        """End the reply: return the remaining events."""


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """Reasoning between `open` and `close`, at the start of a reply; the template adds `lead` and `trail`.

    `gap` is what the template puts between `close` and the text.
    """

    open: str
    close: str
    lead: str = ""
    trail: str = ""
    gap: str = ""

    @property
    def ending(self) -> str:
        """What ends open reasoning, up to where text or a call may begin."""
        return self.trail + self.close + self.gap

    def opened_at_end_of(self, prompt: str) -> str:
        """The part of the reply at the end of a structured prompt: reasoning that is open, or closed and empty."""
        at = prompt.rfind(self.open)
        if at < 0:
            return ""
        opened = prompt[at:]
        rest = opened[skip_blanks(opened, len(self.open)) :]
        closed = rest.startswith(self.close) and skip_blanks(rest, len(self.close)) == len(rest)
        return opened if not rest or closed else ""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The format of a model's replies. `tools` None: no calls are known; `thinking` None: no reasoning.

    `visible`: ids of tokens flagged special that a reader needs to see, `specials` how they are in structured text.
    `call_ids`: "short" if the template accepts only ids of nine letters and digits. `one_call`: the template accepts
    one call per message, so a reply ends after its first.
    """

    thinking: ThinkingFormat | None = None
    tools: ToolFormat | None = None
    visible: frozenset[int] = frozenset()
    specials: tuple[str, ...] = ()
    call_ids: Literal["long", "short"] = "long"
    one_call: bool = False

    def opening(self, name: str | None) -> str | None:
        """The beginning of a call of that tool or (None) any, as structured text; None: a call cannot be forced."""
        return self.tools.opening(name) if self.tools else None

    @property
    def has_reasoning(self) -> bool:
        """Whether replies may have reasoning, leading or in a channel."""
        return self.thinking is not None or isinstance(self.tools, ChannelForm)

    @property
    def leading_reasoning(self) -> ThinkingFormat | None:
        """The format of reasoning that begins a reply; None if there is none, or if it has a channel."""
        return None if isinstance(self.tools, ChannelForm) else self.thinking

    def opened_at_end_of(self, prompt: str) -> str:
        """The part of the reply at the end of a structured prompt; usually empty."""
        if isinstance(self.tools, ChannelForm):
            return self.tools.opened_at_end_of(prompt)
        return self.thinking.opened_at_end_of(prompt) if self.thinking else ""

    def bridged(self, opened: str, prefix: str) -> str:
        """`prefix`, text or a call, as it can follow `opened`: open reasoning is ended first."""
        if isinstance(self.tools, ChannelForm):
            return self.tools.bridged(opened, prefix)
        is_open = self.thinking is not None and bool(opened) and self.thinking.close not in opened
        return (self.thinking.ending if self.thinking and is_open else "") + prefix

    def new_id(self) -> str:
        """A new id for a call, in the form that the template accepts."""
        if self.call_ids == "long":
            return new_call_id()
        return "".join(secrets.choice(_SHORT_ID_SIGNS) for _ in range(SHORT_ID_LENGTH))

    def reader(self, tools: bool | Sequence[Any], *, parallel: bool, new_id: Callable[[], str]) -> BodyReader:
        """Return a reader for the part of a reply after its reasoning; it reads calls if there are `tools`."""
        known = () if isinstance(tools, bool) else tuple(tools)
        has_calls = tools is True or bool(known)
        if isinstance(self.tools, ChannelForm):
            return ChannelReader(self.tools, calls=has_calls, specials=self.specials, parallel=parallel, new_id=new_id)
        form = self.tools if has_calls else None
        new_scan = form.new_scan(known) if form else None
        marks = form.marks if form else None
        return CallReader(marks, new_scan, specials=self.specials, parallel=parallel, new_id=new_id)
