"""A coding agent's long conversation: its parts, and in each a prompt whose reply takes a number of requests.

Owns what is called in them: a file is read, changed, searched and compared, then the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.real_clients.client import Client, Command, Place
from tools.real_clients.script import Call, Reply, Script

NUM_FILES, LINES = 12, 16
TIMEOUT_S = 2400.0


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of the user's and the requests that its reply takes; `after`: what happened before it, in words."""

    after: str
    num_requests: int

    @property
    def step(self) -> str:
        """Its step of the script."""
        return self.after.replace(" ", "-") or "alone"


OTHERS, ENGINE, BOTH = "others had the slots", "llama-server was killed", "both were killed"
PARTS = (Part("", 20), Part(OTHERS, 8), Part(ENGINE, 8), Part(BOTH, 8))


@dataclass(frozen=True, slots=True)
class Work:
    """How one client works: a call for each kind of work on a file, its command, and the one that goes on."""

    read: Callable[[Place, str], Call]
    change: Callable[[Place, str, str, str], Call]
    run: Callable[[str], Call]
    first: Sequence[str]
    resumed: Sequence[str]

    def script(self, place: Place) -> Script:
        """Return what the model says in all parts."""
        numbers = iter(range(sum(each.num_requests for each in PARTS)))
        steps = {}
        for part in PARTS:
            replies = [self._reply(place, next(numbers)) for _ in range(part.num_requests - 1)]
            steps[part.step] = [*replies, Reply(f"That was the part of {part.num_requests} requests.")]
        return Script(steps)

    def _reply(self, place: Place, number: int) -> Reply:
        name, line = _name(number // 4), number % LINES
        match number % 4:
            case 0:
                return Reply(f"I read {name} before I change it.", [self.read(place, name)])
            case 1:
                old, new = _line(number // 4, line), f"Lamp {number} was mended on day {number * 3}."
                return Reply(f"Line {line} is out of date.", [self.change(place, name, old, new)])
            case 2:
                return Reply("Is that lamp named elsewhere?", [self.run(f"grep -n 'Lamp {number % 7} ' {name}")])
            case _:
                return Reply("What has changed so far?", [self.run(f"git diff --stat -- {name}; wc {name}")])

    def commands(self) -> Sequence[Command]:
        """Return the calls of the client, one for each part."""
        made = []
        for part in PARTS:
            command = self.resumed if made else self.first
            prompt = f"Look after the ledgers: read, mend, search, compare. step:{part.step}"
            made.append(Command("day", [*command, prompt], [part.step], timeout_s=TIMEOUT_S))
        return made


def write_ledgers(place: Place) -> None:
    """Write the files that are worked on, and commit them."""
    for number in range(NUM_FILES):
        text = "".join(f"{_line(number, line)}\n" for line in range(LINES))
        (place.repository / _name(number)).write_text(text, "utf-8")
    place.git("add", ".")
    place.git("commit", "-q", "-m", "Ledgers")


def _name(number: int) -> str:
    return f"ledger-{number:02}.txt"


def _line(number: int, line: int) -> str:
    return f"Lamp {line} of quay {number} was lit for {(line * 7919 + number * 31) % 101} hours."


def _claude() -> Work:
    claude = ["claude", "--allowedTools", "Read,Edit,Bash", "-p"]
    return Work(
        read=lambda place, name: Call("Read", {"file_path": place.file(name)}),
        change=lambda place, name, old, new: Call(
            "Edit", {"file_path": place.file(name), "old_string": old, "new_string": new}
        ),
        run=lambda command: Call("Bash", {"command": command, "description": "Look at a ledger"}),
        first=claude,
        resumed=[*claude[:-1], "--continue", "-p"],
    )


def _codex() -> Work:
    def run(command: str) -> Call:
        return Call("exec_command", {"cmd": command})

    codex = ["codex", "exec", "--dangerously-bypass-approvals-and-sandbox"]
    return Work(
        read=lambda place, name: run(f"cat {name}"),
        change=lambda place, name, old, new: run(f"sed -i 's/{old}/{new}/' {name}"),
        run=run,
        first=codex,
        resumed=[*codex, "resume", "--last"],
    )


WORKS = {"Claude Code": _claude(), "Codex CLI": _codex()}


def work_of(client: Client) -> Work | None:
    """Return how a client works in a long conversation; None if that is not known of it."""
    return WORKS.get(client.name)
