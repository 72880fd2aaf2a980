"""Tails of system texts stay where stored text has them; a new one comes before the newest user message."""

from __future__ import annotations

import pytest

from rekindle.engine.intake.candidates import moved
from rekindle.engine.intake.rewrites import with_earlier_tails
from rekindle.text.messages import Message
from rekindle.text.vocabulary import MARK

OLD, NEW, NEWER = (f"gitStatus: {word}\n\n?? {word}.txt" for word in ("old", "new", "newer"))
ENV, LATER_ENV = (f"Here is useful information about the environment:\n<env>\n{day}\n</env>" for day in "12")
HELLO, BYE, MORE = (Message("user", text) for text in ("Hello there.", "Bye.", "And more?"))
REPLY = Message("assistant", "Yes?")


def key(message: Message, text: str) -> bytes:
    return text.strip().encode()


def system(*tails: str) -> Message:
    return Message("system", "\n\n".join(("Be kind.", *tails)))


def stored(*messages: Message, tails: dict[int, str]) -> bytes:
    """The key of a conversation with these tails at the heads of messages."""
    return b"".join(
        MARK + f"{message.role}\n{tails[at] + chr(10) * 2 if at in tails else ''}{message.content}".encode()
        for at, message in enumerate(messages)
    )


def test_a_new_tail_comes_before_the_newest_user_message() -> None:
    before = stored(Message("system", "Be kind."), HELLO, REPLY, tails={1: OLD})
    found = with_earlier_tails([system(NEW), HELLO, REPLY, BYE], before, key)
    assert found == (system(OLD), HELLO, REPLY, Message("user", f"{NEW}\n\nBye."))


def test_one_that_the_conversation_has_stays_there() -> None:
    after = stored(Message("system", "Be kind."), HELLO, REPLY, BYE, tails={1: OLD, 3: NEW})
    told = Message("user", f"{NEW}\n\nBye.")
    for more in ([], [REPLY], [REPLY, Message("tool", "Dust.")]):
        found = with_earlier_tails([system(NEW), HELLO, REPLY, BYE, *more], after, key)
        assert found == (system(OLD), HELLO, REPLY, told, *more)
    found = with_earlier_tails([system(NEWER), HELLO, REPLY, BYE, REPLY, MORE], after, key)
    assert found == (system(OLD), HELLO, REPLY, told, REPLY, Message("user", f"{NEWER}\n\nAnd more?"))


def test_each_part_of_a_tail_is_replaced_in_its_place() -> None:
    before = stored(HELLO, REPLY, tails={0: f"{ENV}\n\n{OLD}"})
    sent = Message("system", f"{LATER_ENV}\nRules.\n{NEW}")
    first, *_, last = with_earlier_tails([sent, HELLO, REPLY, BYE], before, key)
    assert first.content == f"{ENV}\nRules.\n{OLD}"
    assert last.content == f"{LATER_ENV}\n\n{NEW}\n\nBye."


@pytest.mark.parametrize(
    ("messages", "tails"),
    [
        ([system(OLD), HELLO, REPLY, BYE], {0: OLD}),  # the same
        ([system(), HELLO, REPLY, BYE], {0: OLD}),  # none sent
        ([system(NEW), HELLO, REPLY, BYE], {}),  # none stored
        ([system(NEW), HELLO], {0: OLD}),  # a new conversation that begins alike
        ([system(NEW), MORE, REPLY, BYE], {0: OLD}),  # another conversation
        ([system(NEW), HELLO, REPLY, BYE], {0: OLD, 2: NEWER}),  # the newest message has been read with another
        ([system(NEW), HELLO, REPLY, BYE], {0: f"{ENV}\n\n{OLD}"}),  # of other parts
    ],
)
def test_otherwise_nothing_changes(messages: list[Message], tails: dict[int, str]) -> None:
    assert with_earlier_tails(messages, stored(HELLO, REPLY, BYE, tails=tails), key) == tuple(messages)


@pytest.mark.parametrize(
    ("place", "before", "after", "now"),
    [
        (0, "Bye.", "New.\n\nBye.", 0),
        (2, "Bye.", "New.\n\nBye.", 8),
        (4, "Bye.", "New.\n\nBye.", 10),
        (3, "Be a bb", "Be ccc bb", 3),
        (5, "Be a bb", "Be ccc bb", 7),
        (4, "Be abc bb", "Be c bb", 3),
        (2, "Be", "Be", 2),
    ],
)
def test_places_move_with_what_is_put_before_them(place: int, before: str, after: str, now: int) -> None:
    assert moved(place, before, after) == now
