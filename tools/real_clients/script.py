"""What the model says on a scripted day: replies by the step that the user's prompt names, tool calls included.

A prompt of the user contains `step:NAME`; the n-th reply after it is the n-th of that step. Prompts that a client
writes itself (a title, a summary of the history) name no step, or come without the step's tools, or after the prompt
and with words of `OWN`, or quote the conversation: they get `OTHER`.
Values and text only; `scripted_serve` chooses the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEP = re.compile(r"\bstep:([a-z0-9-]+)")
SIDE = re.compile(r"one-line Git commit messages")  # in the system text of a request that is not the conversation's
OWN = re.compile(r"summar|compact|snapshot|managed memory", re.IGNORECASE)
QUOTE = "\n<conversation>\n"  # opencode's, which may quote a prompt that names a step
TURN = "<|im_start|>"
END = "<|im_end|>"
RESULT = "<tool_response>"
PROSE = "I would rather say it in my own words."
SUMMARY = "The notes were read and changed; pictures and parts were looked at."
# In the tags without which Claude Code and Qwen Code ask for a summary once more.
OTHER = (f"<state_snapshot>\n<summary>\n{SUMMARY}\n</summary>\n</state_snapshot>", '{"title": "Notes"}')


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a client's tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply: reasoning, text, calls. `instead`: what is said, in this order, if a constraint forbids the text."""

    text: str
    calls: Sequence[Call] = ()
    reasoning: str = ""
    instead: Sequence[str] = ()

    def texts(self) -> list[str]:
        """Return what the model writes, the preferred text first."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = "".join(
            f'\n<tool_call>\n{{"name": "{each.name}", "arguments": {json.dumps(each.arguments, ensure_ascii=False)}}}'
            "\n</tool_call>"
            for each in self.calls
        )
        return [thought + self.text + calls, *self.instead]


def structured(value: Any) -> Reply:
    """Return a reply that is prose unless the server constrains it to JSON: then it is `value`."""
    spaced, dense = json.dumps(value), json.dumps(value, separators=(",", ":"))
    return Reply(PROSE, instead=(spaced, dense))


@dataclass(frozen=True, slots=True)
class Asked:
    """Which reply a prompt gets: of a step and the place in it, or of none (`step` is empty), with this many before."""

    texts: tuple[str, ...]
    step: str = ""
    place: int = 0
    num_replies: int = 0

    def recorded(self, prompt_tokens: int) -> dict[str, Any]:
        """Return what is recorded of it, with the size of its prompt."""
        return {"step": self.step, "place": self.place, "replies": self.num_replies, "prompt_tokens": prompt_tokens}


@dataclass(frozen=True, slots=True)
class Script:
    """The replies of a day by step."""

    steps: Mapping[str, Sequence[Reply]] = field(default_factory=dict)

    def dumps(self) -> str:
        """Return it as JSON: by step, a reply's texts and the tools that it calls."""
        said = {
            name: [{"texts": each.texts(), "tools": [call.name for call in each.calls]} for each in replies]
            for name, replies in self.steps.items()
        }
        return json.dumps(said, indent=1)


def answer(script: Mapping[str, Sequence[Mapping[str, Any]]], prompt: str) -> Asked:
    """Return what is said to a rendered prompt; `script` is what `Script.dumps` wrote."""
    turns = [_turn(text) for text in prompt.split(TURN)[1:]]
    num_replies = sum(role == "assistant" for role, _ in turns[:-1])
    asked = [at for at, (role, text) in enumerate(turns) if role == "user" and not text.startswith(RESULT)]
    marked = [at for at in asked if STEP.search(turns[at][1])]
    found = STEP.findall(turns[marked[-1]][1]) if marked else []
    if (
        not found
        or found[-1] not in script
        or SIDE.search(turns[0][1])
        or (asked[-1] > marked[-1] and OWN.search(turns[asked[-1]][1]))
        or QUOTE in turns[asked[-1]][1]
    ):
        return Asked(OTHER, num_replies=num_replies)
    replies = script[found[-1]]
    place = sum(role == "assistant" for role, _ in turns[marked[-1] + 1 : -1])
    if place >= len(replies):
        return Asked(OTHER, num_replies=num_replies)
    reply = replies[place]
    head = turns[0][1] if turns else ""
    if any(f'"name": "{tool}"' not in head for tool in reply["tools"]):
        return Asked(OTHER, num_replies=num_replies)
    begun = prompt.rpartition(f"{TURN}assistant\n")[2]
    return Asked(tuple(_rest(text, begun) for text in reply["texts"]), found[-1], place, num_replies)


def _rest(text: str, begun: str) -> str:
    """Return what is left to say of a text, where the prompt has begun a call that the client demands."""
    return text.partition(begun)[2] if begun and begun in text else text


def _turn(text: str) -> tuple[str, str]:
    role, _, rest = text.partition("\n")
    return role, rest.removesuffix("\n").removesuffix(END)
