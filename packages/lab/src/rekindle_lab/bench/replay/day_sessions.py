"""Sessions of a generated day: desks that use tools, a talk of four, chats.

Owns the texts, and ensures that each session fits the context; knows no times. Facts, questions and sums come from
`pocket.conversations`, so the bundled model can answer most of them and call the tool `add`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from rekindle.pocket import model_dir
from rekindle_pocket import conversations
from rekindle_pocket.conversations import Chat, Memory, fact, sentence, story

MESSAGE_TOKENS = 8  # what a template adds to a message, at most
MAX_TOKENS = 48  # of a reply
REPLY_TOKENS = 80  # of a reply in a prompt: a recorded call may be longer than a server's reply
TALKERS = ("Alice", "Bob", "Carla", "Dmitri")
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes: tokens of context, handbook and longest tool result; turns of a desk and a chat, sub-agents, rounds."""

    context: int
    handbook: int
    desk_turns: int
    helpers: int
    chat_turns: int
    rounds: int
    report: int

    def within(self, context: int | None) -> Scale:
        """Return the scale for another context; the handbook takes at most a quarter of it."""
        context = context or self.context
        return replace(self, context=context, handbook=min(self.handbook, context // 4))


@dataclass(frozen=True, slots=True)
class Step:
    """One request: the agent, its messages after the system prompt, and the right reply.

    `{date}` in `system` is replaced by the day's date.
    """

    agent: str
    system: str
    messages: tuple[Chat, ...]
    answer: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int = MAX_TOKENS


Turn = list[Step]  # requests that follow one another immediately


@dataclass(frozen=True, slots=True)
class Session:
    """A name and turns whose requests are sent one after another."""

    name: str
    turns: list[Turn]


def counter() -> Count:
    """Return a function that counts a text's tokens with the bundled tokenizer."""
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    return cache(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    conversations.ADD_TOOL,
    _function("report", "Fetch a report by its number.", number="integer"),
    _function("delegate", "Give a task to a helper and wait for the answer.", task="string"),
)


def _call(name: str, number: int, /, **arguments: Any) -> Chat:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(number: int, content: str) -> Chat:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}


def _message(role: str, content: str) -> Chat:
    return {"role": role, "content": content}


class Thread:
    """One agent's messages and the tokens left for them, with every reply counted at its longest."""

    def __init__(
        self, agent: str, system: str, count: Count, limit: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.agent = agent
        self.system = system
        self.tools = tools
        self.messages: list[Chat] = []
        self.count = count
        self._left = limit - count(system) - count(json.dumps(list(tools))) - 4 * MESSAGE_TOKENS

    def fits(self, *texts: str, replies: int) -> bool:
        """Whether the texts and this number of replies still fit."""
        return sum(self._cost(text) for text in texts) + replies * (REPLY_TOKENS + MESSAGE_TOKENS) <= self._left

    def ask(self, message: Chat, answer: Chat) -> Step:
        """Return the request that ends in this message, and append the answer to the thread."""
        self.hear(message)
        step = Step(self.agent, self.system, tuple(self.messages), answer, self.tools)
        self.messages.append(answer)
        self._left -= REPLY_TOKENS + MESSAGE_TOKENS
        return step

    def hear(self, message: Chat) -> None:
        """Append a message without a request."""
        self.messages.append(message)
        self._left -= self._cost(message["content"])

    def _cost(self, text: str) -> int:
        return self.count(text) + MESSAGE_TOKENS


def _handbook(seed: int, scale: Scale, count: Count) -> str:
    """Generate the long text shared by the desks."""
    r = random.Random(f"{seed} handbook")
    text = "You are Nadia, the archivist. Answer in one short sentence.\n\nHandbook:"
    while count(text) < scale.handbook:
        text += " " + story(r, 4)
    return text + "\n\nToday is {date}."


def desk(seed: int, number: int, scale: Scale, count: Count) -> Session:
    """Generate a session that uses tools; some turns delegate to sub-agents with the same system prompt and tools."""
    name = f"desk-{number}"
    r = random.Random(f"{seed} {name}")
    system = _handbook(seed, scale, count)
    thread = Thread(name, system, count, scale.context, TOOLS)
    memory = Memory("Nadia", "archivist")
    delegating = set(r.sample(range(2, 2 * scale.desk_turns // 3), scale.helpers))
    turns: list[Turn] = []
    for index in range(scale.desk_turns):
        turn: Turn | None
        if index in delegating:
            helper = Thread(f"{name}/helper-{index}", system, count, scale.context, TOOLS)
            turn = _delegate(r, thread, helper, scale, 10 * index)
        elif index % 3 == 0:
            turn = _add(r, thread, 10 * index)
        elif index % 3 == 1:
            turn = _report(r, thread, scale, 10 * index)
        else:
            turn = _plain(r, thread, memory)
        if turn is None:
            break
        turns.append(turn)
    return Session(name, turns)


def _add(r: random.Random, thread: Thread, number: int) -> Turn | None:
    a, b = r.randrange(1, 100), r.randrange(1, 100)
    asked = f"Add {a} and {b}."
    if not thread.fits(asked, '{"sum": 198}', replies=2):
        return None
    return [
        thread.ask(_message("user", asked), _call("add", number, a=a, b=b)),
        thread.ask(_result(number, json.dumps({"sum": a + b})), _message("assistant", f"The sum is {a + b}.")),
    ]


def _document(r: random.Random, tokens: int, count: Count) -> tuple[str, int]:
    """Generate a text of at least `tokens` tokens; also return the number of facts it holds."""
    parts: list[str] = []
    num_facts = 0
    while sum(count(part) for part in parts) < tokens:
        parts += [story(r, 3), sentence(fact(r, Memory("", ""))[1])]
        num_facts += 1
    return "Document: " + " ".join(parts), num_facts


def _report(r: random.Random, thread: Thread, scale: Scale, number: int) -> Turn | None:
    """Generate a call of a tool that answers at length."""
    text, num_facts = _document(r, r.randrange(scale.report // 2, scale.report), thread.count)
    which = r.randrange(100, 1000)
    asked = f"Fetch report {which} and tell me how many facts it holds."
    if not thread.fits(asked, text, replies=2):
        return None
    done = _message("assistant", f"I have read it. It holds {num_facts} facts.")
    calling = _call("report", number, number=which)
    return [thread.ask(_message("user", asked), calling), thread.ask(_result(number, text), done)]


def _delegate(r: random.Random, thread: Thread, helper: Thread, scale: Scale, number: int) -> Turn | None:
    """Generate a delegation: a helper reads a report and adds two numbers, and the desk receives the sum."""
    task = f"Read report {r.randrange(100, 1000)}, then add {r.randrange(1, 100)} and {r.randrange(1, 100)}."
    if not thread.fits(task, "The sum is 198.", replies=2):
        return None
    calling = thread.ask(_message("user", f"Let a helper do this: {task}"), _call("delegate", number, task=task))
    turns = [_report(r, helper, scale, number + 1), _add(r, helper, number + 2)]
    steps = [step for turn in turns for step in turn or ()]
    if not steps:
        return None
    heard = _result(number, str(steps[-1].answer["content"]))
    return [calling, *steps, thread.ask(heard, _message("assistant", "The helper is done."))]


def _plain(r: random.Random, thread: Thread, memory: Memory) -> Turn | None:
    """State a fact, or ask for one stated before."""
    if memory.facts and r.random() < 0.5:
        subject = r.choice(list(memory.facts))
        asked, reply = conversations.question(subject), conversations.answer(memory, subject)
    else:
        subject, text = fact(r, memory)
        memory.learn(subject, sentence(text))
        asked, reply = f"Remember that {text}.", f"Noted. {sentence(text)}"
    if not thread.fits(asked, replies=1):
        return None
    return [thread.ask(_message("user", asked), _message("assistant", reply))]


def chat(seed: int, number: int, scale: Scale, count: Count) -> Session:
    """Generate a person's chat that states facts and asks for them; a short system prompt that begins with the date."""
    name = f"chat-{number}"
    r = random.Random(f"{seed} {name}")
    memory = Memory(r.choice(conversations.NAMES), r.choice(conversations.ROLES))
    thread = Thread(name, "Today is {date}. " + conversations.system_prompt(r, memory), count, scale.context)
    turns = [_plain(r, thread, memory) for _ in range(scale.chat_turns)]
    return Session(name, [turn for turn in turns if turn is not None])


def talk(seed: int, scale: Scale, count: Count) -> Session:
    """Generate four agents that hear each other and answer in turn; their system prompts begin with shared rules."""
    r = random.Random(f"{seed} talk")
    rules = "Rules of the round table: " + story(r, scale.handbook // 32)
    threads = {
        name: Thread(f"talk/{name.lower()}", f"{rules}\n\nYou are {name}.", count, scale.context) for name in TALKERS
    }
    unheard: dict[str, list[str]] = {name: [] for name in TALKERS}
    turns: list[Turn] = []
    for _ in range(scale.rounds):
        for name, thread in threads.items():
            _, text = fact(r, Memory("", ""))
            heard = "\n".join([*unheard[name], f"[{name}, respond now.]"])
            if not thread.fits(heard, replies=1):
                return Session("talk", turns)
            turns.append([thread.ask(_message("user", heard), _message("assistant", sentence(text)))])
            unheard[name] = []
            for other in TALKERS:
                if other != name:
                    unheard[other].append(f"{name}: {sentence(text)}")
    return Session("talk", turns)
