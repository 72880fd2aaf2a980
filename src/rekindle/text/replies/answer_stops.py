"""Stop strings in the answer's text: not in reasoning, nor in calls, whose arguments a client could not read then.

Owns where in a reply stop strings are searched. What is read here is read again for the client: text in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.text.replies.events import Event, TextDelta
from rekindle.text.replies.stream import ReplyStream
from rekindle.text.stream import StopSearch, TextStream


class AnswerStream:
    """Incremental structured text of one reply, ended by a stop string in its answer; see `TextStream`.

    `stream` has no stop strings of its own, `reader` reads all calls.
    """

    def __init__(self, stream: TextStream, reader: ReplyStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._reader = reader
        self._search = StopSearch(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string came: nothing follows."""
        return self._search.found is not None

    @property
    def stop_text(self) -> str | None:
        """The stop string that came."""
        return self._search.found

    @property
    def ends_anywhere(self) -> tuple[str, ...]:
        """No string ends the reply wherever it is."""
        return ()

    def watch_for(self, stop: Sequence[str]) -> None:
        """Stop at these strings from here on."""
        self._search.watch_for(stop)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; see `TextStream`."""
        return self._stream.token_bytes(token_id)

    def push(self, token_id: int) -> str:
        """Add one token; return the text that is now certain, often none."""
        return "" if self.stopped else self._searched(self._reader.push(self._stream.push(token_id)))

    def finish(self) -> str:
        """Return the remaining text; empty after a stop string."""
        if self.stopped:
            return ""
        events = [*self._reader.push(self._stream.finish()), *self._reader.finish()]
        return self._searched(events) + self._search.flush()

    def _searched(self, events: Sequence[Event]) -> str:
        parts = []
        for event in events:
            if self.stopped:
                break
            is_answer = isinstance(event, TextDelta)
            parts.append(self._search.push(event.raw) if is_answer else self._search.flush() + event.raw)
        return "".join(parts)
