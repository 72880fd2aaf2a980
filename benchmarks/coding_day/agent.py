"""A coding agent as a client of /v1/messages: forty turns with tools, sub-agents, reminders and a midnight.

Owns what is sent to the model and in what order; the model's replies decide what comes next. The same seed and the
same replies give the same session. The requests are modelled on a well-known client: an attribution line that changes
in every request, instructions marked for caching, the date in a reminder before the first message, thinking sent back,
tool results as they arrive, sub-agents that name their parent. A `Habit` adds what only some clients do.
"""

from __future__ import annotations

import base64
import copy
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from benchmarks.coding_day.client import PATH, Block, Heard, Identity
from benchmarks.coding_day.templates import Habit
from benchmarks.coding_day.texts import HELPER_TOOLS, Texts
from rekindle.errors import ConfigError

SUMMARISE = "Write a summary of this conversation: what was asked for, what was found out, and what is left to do."
SUMMARY = "This conversation goes on from an earlier one that became too long. Its summary:\n\n"
EVENING = datetime(2026, 11, 20, 21, 40)
MAX_TOKENS, THINKING_TOKENS = 4096, 2048
HELPER_TURNS = 4
REMIND_EVERY = 9
MIN_TURNS = 4
# An "own" sub-agent has its own instructions and tools; a "fork" continues the whole conversation.
Helper = Literal["own", "fork"]
HELPERS: Mapping[float, Helper] = {0.25: "own", 0.75: "fork"}  # after which share of the turns
NESTED_AFTER = 1  # turns of an "own" sub-agent, after which it also starts one
MIDNIGHT = 0.5  # after which share of the turns
# Of clients with the habit, as shares of the turns: a resumed conversation, another one; summaries of the history.
RESUMED, ANOTHER = 0.3, 0.6
SUMMARISED = (0.3, 0.55, 0.8)
PICTURE_EVERY = 3  # results


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """How long a session is, and the seed of everything in it except the model's replies."""

    turns: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.turns < MIN_TURNS:
            raise ConfigError(f"--turns must be at least {MIN_TURNS}, not {self.turns}")

    def helper_after(self, turn: int) -> Helper | None:
        """Return the kind of sub-agent that runs after this turn (from 1), if any."""
        return next((kind for share, kind in HELPERS.items() if self.is_after(share, turn)), None)

    def is_after(self, share: float, turn: int) -> bool:
        """Whether a turn (from 1) is the last one of this share of all."""
        return max(1, round(share * self.turns)) == turn

    def now(self, turn: int) -> datetime:
        """Return the time at a turn; midnight falls in the middle."""
        late = turn > round(MIDNIGHT * self.turns)
        return EVENING + timedelta(minutes=2 * turn) + timedelta(hours=3 if late else 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the `turn`-th of agent `who` (both for display), its body, identity and time."""

    who: str
    turn: int
    body: Mapping[str, Any]
    identity: Identity
    at: datetime

    def line(self) -> dict[str, Any]:
        """Return the line a proxy would log for it."""
        body = {**self.body, "stream": True}
        return {"at": self.at.isoformat(), "endpoint": PATH, "headers": self.identity.headers, "body": body}


Ask = Callable[[Request], Heard]


class Thread:
    """The conversation of one agent."""

    def __init__(self, session: Session, who: str, *, identity: Identity, helper: Helper | None) -> None:
        self.who = who
        self.identity = identity
        self.messages: list[dict[str, Any]] = []
        self.num_turns = 0
        self._session = session
        self._own = helper == "own"
        self._dated = False  # whether the first message contains the date

    def user(self, *blocks: Block, dated: bool = False) -> None:
        """Append a user message; `dated`: preceded by the project's notes and the date."""
        self._dated = self._dated or dated
        self.messages.append({"role": "user", "content": list(blocks)})

    def fork(self, other: Thread) -> None:
        """Continue from a copy of another thread's conversation."""
        self.messages, self._dated = copy.deepcopy(other.messages), other._dated

    def ask(self, at: datetime) -> Heard:
        """Send the conversation, and append the reply."""
        self.num_turns += 1
        request = Request(self.who, self.num_turns, self._body(at), self.identity, at)
        heard = self._session.ask(request)
        self.messages.append({"role": "assistant", "content": heard.content})
        return heard

    def summarise(self, at: datetime) -> None:
        """Ask for a summary of the conversation, without tools; it takes the place of the conversation."""
        self.messages[-1]["content"].append(_text(SUMMARISE))
        body = self._body(at)
        del body["tools"]
        heard = self._session.ask(Request(f"{self.who}, summary", self.num_turns, body, self.identity, at))
        self.messages = []
        self.user(_text(f"{SUMMARY}{heard.text.strip()}"), dated=True)

    def _body(self, at: datetime) -> dict[str, Any]:
        texts = self._session.texts
        role, rules = ("a helper", texts.helper_instructions()) if self._own else ("an agent", texts.instructions())
        messages = copy.deepcopy(self.messages)
        if self._dated:
            messages[0]["content"].insert(0, _text(texts.context(f"{at:%Y-%m-%d}")))
        for message in [each for each in messages if each["role"] == "user"][-2:]:
            message["content"][-1]["cache_control"] = {"type": "ephemeral"}
        cached = {"cache_control": {"type": "ephemeral"}}
        return {
            "model": "claude-sonnet-4-5",
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "thinking": {"type": "enabled", "budget_tokens": THINKING_TOKENS},
            "metadata": {"user_id": f"user_0_session_{self.identity.session}"},
            "system": [
                _text(self._session.attribution()),
                _text(f"You are {role} that works on code.") | cached,
                _text(rules if self._own else self._session.with_status(rules)) | cached,
            ],
            "tools": texts.tools(HELPER_TOOLS) if self._own else texts.tools(),
            "messages": messages,
        }


class Session:
    """One session of a client with a habit; `ask` sends a request. Run it once."""

    def __init__(self, plan: SessionPlan, ask: Ask, habit: Habit | None = None) -> None:
        self.ask = ask
        self._habit = habit
        self._status = 0  # how often the state of the repository has changed
        self.texts = Texts(plan.seed)
        self._plan = plan
        self._random = random.Random(f"{plan.seed} session")
        self._name = f"{self._random.getrandbits(128):032x}"
        self._num_results = 0
        self._num_tasks = 0
        self._num_helpers = 0

    def run(self) -> None:
        """Run all turns of the main agent and of its sub-agents."""
        main = self._main("main")
        for turn in range(1, self._plan.turns + 1):
            heard = main.ask(self._plan.now(turn))
            kind = self._plan.helper_after(turn)
            report = self._help(kind, main, heard, turn) if kind else None
            main.user(*self._next(heard, report, turn))
            if turn < self._plan.turns:
                main = self._between(main, turn)

    def _main(self, who: str) -> Thread:
        """Begin a conversation of the main agent with its user's task."""
        main = Thread(self, who, identity=Identity(self._name), helper=None)
        main.user(self._task(), dated=True)
        return main

    def _between(self, main: Thread, turn: int) -> Thread:
        """Do what the client's habit is after a turn; return the conversation that goes on."""
        after = self._plan.is_after
        if self._habit == "git-status" and (after(RESUMED, turn) or after(ANOTHER, turn)):
            self._status += 1
            if after(ANOTHER, turn):
                self._name = f"{self._random.getrandbits(128):032x}"
                return self._main("main, again")
        if self._habit == "compaction" and any(after(share, turn) for share in SUMMARISED):
            main.summarise(self._plan.now(turn))
        return main

    def with_status(self, rules: str) -> str:
        """Return the system text's end, with the state of the repository if the client puts it there."""
        return f"{rules}\n\n{self.texts.status(self._status)}" if self._habit == "git-status" else rules

    def attribution(self) -> str:
        """Return the line that changes in every request."""
        number = self._random.getrandbits(20)
        return f"x-anthropic-billing-header: cc_version=2.1.63.a1f; cc_entrypoint=cli; cch={number:05x};"

    def _next(self, heard: Heard, report: str | None, turn: int) -> list[Block]:
        """Return the results of the calls, or the user's next message after an answer."""
        blocks = self._results(heard, report)
        if not blocks:
            blocks = [_text(f"A helper reports:\n{report}")] if report else []
            blocks.append(self._task())
        if turn % REMIND_EVERY == 0:
            blocks.append(_text(self.texts.reminder(turn // REMIND_EVERY)))
        return blocks

    def _results(self, heard: Heard, report: str | None = None) -> list[Block]:
        found = []
        for call in heard.calls:
            self._num_results += 1
            result: str | list[Block] = report or self.texts.result(call["name"], call["input"], self._num_results)
            if self._habit == "image" and self._num_results % PICTURE_EVERY == 0:
                result = [picture(self._num_results), _text(str(result))]
            found.append({"type": "tool_result", "tool_use_id": call["id"], "content": result})
        return found

    def _task(self) -> Block:
        self._num_tasks += 1
        return _text(self.texts.task(self._num_tasks - 1))

    def _help(self, kind: Helper, caller: Thread, heard: Heard, turn: int) -> str:
        """Run a sub-agent to its end; return its report."""
        helper = self._helper(kind, caller.identity)
        task = _text(self.texts.helper_task(self._num_helpers - 1))
        if kind == "fork":
            helper.fork(caller)
            helper.user(*self._results(heard, "A helper has been started."), task)
        else:
            helper.user(task, dated=True)
        for number in range(1, HELPER_TURNS + 1):
            answer = helper.ask(self._plan.now(turn))
            nests = kind == "own" and number == NESTED_AFTER and caller.identity.agent is None
            report = self._help(kind, helper, answer, turn) if nests else None
            if number == HELPER_TURNS or not (answer.calls or report):
                break
            helper.user(*(self._results(answer, report) or [_text(f"A helper reports:\n{report}")]))
        return answer.text or "I looked at all of it and found nothing wrong."

    def _helper(self, kind: Helper, caller: Identity) -> Thread:
        """Create a sub-agent; one started by the main agent does not name its parent."""
        self._num_helpers += 1
        identity = Identity(self._name, f"{self._random.getrandbits(64):016x}", caller.agent)
        return Thread(self, f"helper-{self._num_helpers}", identity=identity, helper=kind)


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def picture(number: int) -> Block:
    """Return an image block with a picture of one colour."""
    size = 16 + number
    head = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes([number % 256]) * size) * size)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    )
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png).decode()}
    return {"type": "image", "source": source}
