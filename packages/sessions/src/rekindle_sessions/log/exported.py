"""A session as one JSON document, for another server: its plan, what its agents brought, and its events.

Owns the form of the document. A document is checked as rows of the file are; whether its events fit each other is found
where they are applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest, quoted
from rekindle_sessions.log.codec import packed, packed_event, unpacked, unpacked_event
from rekindle_sessions.machine.types import Event, Plan, Prelude

VERSION = 1


@dataclass(frozen=True, slots=True)
class ExportedSession:
    """What a session is the fold of, without its id, which is another one elsewhere."""

    plan: Plan
    preludes: Mapping[str, Prelude]
    events: tuple[Event, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the document."""
        events = [packed_event(event) for event in self.events]
        return {
            "version": VERSION,
            "plan": json.loads(packed(self.plan)),
            "preludes": json.loads(packed(dict(self.preludes))),
            "events": [{"kind": kind, "body": json.loads(body)} for kind, body in events],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ExportedSession:
        """Return the session of a document; BadRequest says what is wrong with it."""
        if (version := document.get("version")) != VERSION:
            raise refused(
                f"it is of version {quoted(version)}, and this Rekindle reads {VERSION}: update the older one"
            )
        try:
            return cls(
                unpacked(Plan, json.dumps(document["plan"])),
                unpacked(dict[str, Prelude], json.dumps(document["preludes"])),
                tuple(unpacked_event(each["kind"], json.dumps(each["body"])) for each in document["events"]),
            )
        except (LookupError, TypeError) as error:
            raise refused(f"a part of it is missing or of another kind ({error})") from error
        except ValueError as error:
            raise refused(str(error)) from error


def refused(why: str) -> BadRequest:
    """Return the error for a document that cannot be taken in."""
    return BadRequest(f"the session is not imported, and nothing has changed: {why}", param="session")
