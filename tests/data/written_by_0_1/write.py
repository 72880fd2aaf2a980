"""What the files beside this one hold, and how they were written, by version 0.1.0 (from the repository's root):

    PYTHONPATH=src:. python tests/data/written_by_0_1/write.py DIRECTORY

They are not to be written again once 0.1.0 is released: files of the next version go into a directory of their own.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from rekindle.config import RESPONSES_FILE, SESSIONS_FILE
from rekindle.server.responses.items import message_item
from rekindle.server.responses.stored import StoredResponse, StoredResponses
from rekindle.store.commands import Pin
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.machine.types import Entry, MessagePosted, Participant, Plan, Prelude, RoundBegun, TurnEnded
from tests.store.chains import Chain, open_store, save

SHARED = list(range(40))
AGENTS = {"ann": [*SHARED, *range(100, 130)], "bob": [*SHARED, *range(200, 224)]}  # ids, a tail included
PINNED_UNTIL = 1e12
FIRST, SECOND = (
    StoredResponse(
        "team",
        "ann",
        {
            "id": name,
            "previous_response_id": previous,
            "output": [message_item(f"msg_{name}", "In the attic, “höre”.")],
        },
        [message_item(f"in_{name}", "Where is the key?")],
    )
    for name, previous in (("resp_1", None), ("resp_2", "resp_1"))
)
PLAN = Plan((Participant("Ada", "Kurz & gut.", agent="ada"), Participant("Ben")), sampling=(("max_tokens", 3),))
PRELUDES = {"Ada": Prelude("You are Ada.", (Entry("heard", "Hi.", "Ben"),))}
EVENTS = (MessagePosted("Host", "Hello, “Ada”."), RoundBegun(("Ada", "Ben")), TurnEnded(1, "Said.", "Thought."))
MEMORY = Memory("ada", 3.0, Prelude("", (Entry("heard", "Of a session that was deleted."),)))


def write(directory: Path) -> None:
    """Write a store with one agent pinned, a conversation of two responses, and a session, into a new directory."""
    store = open_store(directory)
    store.start()
    for agent, ids in AGENTS.items():
        save(store, Chain.of(store, ids), agent)
    store.submit(Pin("default", "bob", PINNED_UNTIL)).result(10)
    store.close()
    responses = StoredResponses(directory / RESPONSES_FILE, clock=lambda: 100.0)
    responses.start()
    for kept in (FIRST, SECOND):
        responses.keep(kept).result(10)
    responses.close()
    with closing(SessionRecords.open(directory / SESSIONS_FILE)) as sessions:
        gone = sessions.create("team", "gone", PLAN, {}, 1.0)
        sessions.delete(gone, "team", [MEMORY])
        number = sessions.create("team", "garden", PLAN, PRELUDES, 4.0)
        sessions.append(number, 0, EVENTS, 5.0)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
