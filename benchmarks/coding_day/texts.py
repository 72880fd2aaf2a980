"""Texts around the model in a coding-agent session: instructions, tools, tasks and tool results.

Generated from a seed. Sizes are distributed as in real sessions at about a quarter of the scale: long instructions and
tool descriptions, many short results, a few long ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.coding_day.script import RESULT_ENDS

_WHEN = (
    "Before you change a file", "When a test fails", "When a command prints a warning", "If the task is not clear",
    "After every edit", "When two files disagree", "If a folder holds generated code", "When you search for a name",
    "If a result is long", "Before you delegate", "When the user names a line", "If a command needs the network",
)  # fmt: skip
_DO = (
    "read what stands around it first", "say what you saw, not what you expected", "prefer the smallest change",
    "run the narrow test, then the folder's", "keep names that the callers know", "ask for the fact that is missing",
    "leave formatting to the formatter", "quote the line with its number", "look for a second owner of the same fact",
    "write down what you will not do", "undo what did not help", "stop and report if it happens twice",
)  # fmt: skip
_WHY = (
    "others work on this tree, too", "a reader has only the diff", "the cheap check finds most of it",
    "nobody reads a long answer", "what is guessed has to be found again", "the history explains more than a comment",
    "a green test that never failed proves nothing", "the next session starts without your memory",
)  # fmt: skip
_TASKS = (
    "The ledger counts a pin twice after a restart. Find out why and mend it.",
    "Rename the eviction classes so that the table in the docs matches, and keep the tests green.",
    "Why does the saving thread wait when the disk is full? Show me the lines.",
    "Add a test that fails when a shard is missing, then look at what else reads shards.",
    "The command prints a raw error on an empty folder. Make it say what to do.",
    "Check whether anybody still calls the old loader, and remove it if nobody does.",
    "Speed up the search in the radix tree; measure before and after.",
    "Write a line for the changelog about all of that and show me the diff.",
)
_REMINDERS = (
    "The list of tasks is empty. If that is not meant so, write down what is left to do.",
    "The file src/store/ledger.py was changed on disk since it was read. This is expected.",
    "Results of earlier commands may be out of date after an edit.",
)
_HELPERS = (
    "Find every place that takes a lock while it holds the index, and list them with their lines.",
    "Compare the two loaders and say which callers would notice a difference.",
    "Review what was changed so far in this conversation and name what is missing.",
)
_BODY = (
    "        held = self._ledger.hold(name)", "        if block.is_pinned and not force:", "            return None",
    "        for parent in self._parents(name):", "            self._release(parent, count=1)",
    "        assert held >= 0, name", "        with self._lock:", "            self._queue.append(record)",
    "    def _mend(self, record: Record) -> int:", '        """Return how many rows were wrong."""', "",
    "        found = [row for row in rows if row.slot == slot]", "        return sum(row.num_bytes for row in found)",
    "        self._clock = clock", "        raise StoreError(f\"{path}: no such slot\") from None",
)  # fmt: skip
_SUBJECTS = ("Count pins once", "Say what a full disk means", "Move the lock inward", "Forget slots that moved")
_ARGUMENTS = {
    "Read": {"file_path": "file to read", "offset": "first line", "limit": "number of lines"},
    "Grep": {"pattern": "regular expression", "folder": "where to look", "glob": "files to look at"},
    "Bash": {"command": "command line", "timeout": "milliseconds", "description": "what it does, in five words"},
    "Edit": {"path": "file to change", "old_string": "text to replace, unique", "new_string": "text to put there"},
    "Write": {"path": "file to write", "content": "all of it"},
    "Glob": {"pattern": "shell pattern", "folder": "where to look"},
    "Fetch": {"url": "page to fetch", "question": "what to look for on it"},
    "Search": {"query": "words to search the web for", "domains": "where to search"},
    "Plan": {"tasks": "what is to be done, in order", "done": "what is done"},
    "Notebook": {"path": "notebook to change", "cell": "its number", "source": "its new text"},
    "Output": {"job": "job whose output to read", "filter": "lines to show"},
    "Task": {"kind": "which helper", "prompt": "what it is to do", "description": "the same in five words"},
}  # fmt: skip
HELPER_TOOLS = ("Read", "Grep", "Bash", "Edit", "Glob")


class Texts:
    """All texts of one session except the model's; deterministic by seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def instructions(self, *, rules: int = 112) -> str:
        """Return the long part of the main agent's system prompt."""
        return "# How to work\n" + "\n".join(self._rule(number) for number in range(rules))

    def helper_instructions(self) -> str:
        """Return the system prompt of "own" sub-agents."""
        return "You help another agent: look, do not change anything, and report.\n" + "\n".join(
            self._rule(number) for number in range(1000, 1014)
        )

    def tools(self, names: Sequence[str] = tuple(_ARGUMENTS)) -> list[dict[str, Any]]:
        """Return tools in the form of the Anthropic API."""
        return [self._tool(name) for name in names]

    def task(self, number: int) -> str:
        """Return the user's task `number`, from a repeating list."""
        return _TASKS[number % len(_TASKS)]

    def helper_task(self, number: int) -> str:
        """Return a sub-agent's task."""
        return _HELPERS[number % len(_HELPERS)]

    def reminder(self, number: int) -> str:
        """Return what a client adds to a user message or a result."""
        return f"<system-reminder>\n{_REMINDERS[number % len(_REMINDERS)]}\n</system-reminder>"

    def context(self, date: str) -> str:
        """Return what a client puts before the first message: the project's notes and the date."""
        notes = "\n".join(f"- {self._rule(number)}" for number in range(2000, 2010))
        return (
            "<system-reminder>\nNotes of this project:\n"
            f"{notes}\n\nToday's date is {date}.\n\nUse what helps and pass over the rest.\n</system-reminder>"
        )

    def status(self, number: int) -> str:
        """Return the state of the repository as a client writes it, different for each number."""
        r = random.Random(f"{self._seed} status {number}")
        files = "\n".join(f"?? src/{r.choice(_NAMES)}_{r.randrange(100)}.py" for _ in range(r.randrange(1, 6)))
        commits = "\n".join(f"{r.randrange(1 << 28):07x} {r.choice(_SUBJECTS)}" for _ in range(3))
        return (
            "gitStatus: The state of the repository when the conversation began.\nCurrent branch: main\n\n"
            f"Status:\n{files}\n\nRecent commits:\n{commits}"
        )

    def result(self, tool: str, arguments: Mapping[str, Any], number: int) -> str:
        """Return a tool's result for the `number`-th call of a session; its end decides what the model does next."""
        r = random.Random(f"{self._seed} {number} {tool}")
        return self._brought(tool, arguments, r) + RESULT_ENDS[r.choices(*_NEXT)[0]]

    def _brought(self, tool: str, arguments: Mapping[str, Any], r: random.Random) -> str:
        if tool == "Read":
            first, count = r.randrange(1, 300), round(r.triangular(6, 56, 12))
            return "\n".join(f"{first + at:>6}\t{self._line(r)}" for at in range(count))
        if tool == "Grep":
            folder = str(arguments.get("folder", "src")).rstrip("/")
            lines = (f"{folder}/{r.choice(_NAMES)}.py:{r.randrange(1, 400)}:{self._line(r)}" for _ in range(9))
            return "\n".join(list(lines)[: r.randrange(1, 10)])
        if tool == "Edit":
            first = r.randrange(1, 300)
            shown = "\n".join(f"{first + at:>6}\t{self._line(r)}" for at in range(6))
            return f"{arguments.get('path')} was changed. The lines around it:\n{shown}"
        return self._printed(str(arguments.get("command", "")), r)

    def _printed(self, command: str, r: random.Random) -> str:
        if "pytest" in command or "check" in command:
            slow = "\n".join(f"{r.uniform(0.1, 3):.2f}s call tests/test_{r.choice(_NAMES)}.py" for _ in range(3))
            return f"{'.' * r.randrange(20, 70)}\n{slow}\n{r.randrange(20, 300)} passed in {r.uniform(1, 30):.2f}s"
        if command.startswith("git log"):
            return "\n".join(f"{r.randrange(1 << 28):07x} {r.choice(_SUBJECTS)}" for _ in range(5))
        if command.startswith("git"):
            return "\n".join(
                f" M src/{r.choice(_NAMES)}.py | {r.randrange(1, 90)} +-" for _ in range(r.randrange(1, 7))
            )
        if command.startswith("ls"):
            return "\n".join(f"-rw-r--r-- 1 dev dev {r.randrange(400, 9000)} {name}.py" for name in _NAMES)
        return "no problems found"

    def _line(self, r: random.Random) -> str:
        return r.choice(_BODY)

    def _rule(self, number: int) -> str:
        r = random.Random(f"{self._seed} rule {number}")
        return f"{r.choice(_WHEN)}, {r.choice(_DO)}: {r.choice(_WHY)}."

    def _tool(self, name: str) -> dict[str, Any]:
        r = random.Random(f"{self._seed} {name}")
        described = " ".join(f"{r.choice(_WHEN)}, {r.choice(_DO)}." for _ in range(5))
        properties = {key: {"type": "string", "description": what} for key, what in _ARGUMENTS[name].items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
        return {"name": name, "description": f"{name}: {described}", "input_schema": schema}

    def corpus(self) -> list[str]:
        """Return texts of this kind for training a tokenizer."""
        made = [self.instructions(), self.helper_instructions(), self.context("2026-11-20"), *_TASKS, *_HELPERS]
        made += [str(self.tools()), *_REMINDERS]
        commands = ("pytest", "git log", "git diff", "ls", "mypy")
        made += [self.result(tool, {"command": c}, n) for tool in ("Read", "Grep", "Bash", "Edit")
                 for n, c in enumerate(commands)]  # fmt: skip
        return made


# Weights of the next action: a tool call, or an answer to the user.
_NEXT = (("Read", "Grep", "Bash", "Edit", "answer"), (4, 4, 4, 2, 2))
_NAMES = ("ledger", "pool", "radix", "saving", "index", "loop", "prompt", "shards", "why")
