"""Conversations whose every reply follows from what stands earlier in them, drawn from a seeded generator.

The pocket model was trained on them, and the demo and the recall benchmark ask with them: as a reply is a function of
the history, recall is scored by equality, at any distance and for any cache path. Plain Python, no tensors.

    facts    place ("the copper key is in the attic"), code ("the code of the north gate is 4821"),
             owner ("Mira owns the silver bell"); a later fact of the same subject replaces the earlier one
    asks     one fact, an unknown fact, who am I, say hello, repeat a phrase, how many facts, a sum by tool call
    filler   stories and documents, to put distance between a fact and its question
    crowd    several speakers in one user message ("Bob: ..."), closed by a cue in brackets
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Chat = dict[str, Any]  # "messages", and "tools" (a list or None) or "answer" (the reply wanted)

NAMES = (
    "Alice Bob Carla Dmitri Elena Farid Greta Hugo Ines Jonas Kira Liam Mira Nadia Oskar Priya Quentin Rosa Stefan "
    "Tara Umar Vera Walter Xenia Yusuf Zoe Anton Bianca Cyrus Delia Emil Flora Gideon Hanna Igor Julia Karim Lena "
    "Marco Nora Otto Petra Rafael Selma Tomas Uma Viktor Wanda Yara Danny"
).split()
ROLES = (
    "archivist gardener navigator clerk warden analyst pilot cook librarian smith keeper guide scribe mechanic "
    "painter ranger tailor watchman courier chemist"
).split()
COLOURS = (
    "copper silver golden iron wooden glass red blue green black white amber violet grey ivory bronze crystal "
    "purple orange paper stone leather velvet marble"
).split()
THINGS = (
    "key lantern map bell compass ledger mirror rope kettle violin clock medal cup chest drum flute lamp needle "
    "ring saddle scarf stamp telescope umbrella vase wheel anchor basket candle dagger engine feather globe hammer "
    "ink jar kite ladder mask notebook oar pipe quilt radio shovel ticket valve whistle"
).split()
PLACES = (
    "attic barn cellar garden harbour kitchen library market mill museum office orchard palace quarry school "
    "stable station studio temple theatre tower tunnel vault village warehouse workshop bakery bridge chapel "
    "courtyard factory forge gallery greenhouse hospital inn lighthouse meadow monastery observatory pier"
).split()
SITES = [
    f"{a} {b}"
    for a in "north south east west upper lower inner outer old new".split()
    for b in "gate door safe hatch lock locker bridge cabin vault dock elevator archive".split()
]
FOODS = "bread soup plums cheese rice honey apples tea olives figs beans fish".split()
WEATHER = "rain fog snow wind sunshine hail thunder mist frost drizzle".split()

ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass
class Memory:
    """What has been said so far: subject -> answer sentence, in the order of first mention."""

    name: str
    role: str
    facts: dict[str, str] = field(default_factory=dict)

    def learn(self, subject: str, sentence: str) -> None:
        self.facts[subject] = sentence


def _thing(r: random.Random) -> str:
    return f"{r.choice(COLOURS)} {r.choice(THINGS)}"


def fact(r: random.Random, memory: Memory) -> tuple[str, str]:
    """A new or replacing fact as (subject, sentence without the full stop, lower-case start)."""
    kind = r.random()
    if memory.facts and r.random() < 0.1:
        subject = r.choice(list(memory.facts))
        kind = {"place": 0.0, "code": 0.5, "owner": 0.9}[subject.split(":")[0]]
        what = subject.split(":", 1)[1]
    else:
        what = None
    if kind < 0.45:
        what = what or _thing(r)
        return f"place:{what}", f"the {what} is in the {r.choice(PLACES)}"
    if kind < 0.8:
        what = what or r.choice(SITES)
        return f"code:{what}", f"the code of the {what} is {r.randrange(1000, 10000)}"
    what = what or _thing(r)
    return f"owner:{what}", f"{r.choice(NAMES)} owns the {what}"


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def question(subject: str) -> str:
    kind, what = subject.split(":", 1)
    return {
        "place": f"Where is the {what}?",
        "code": f"What is the code of the {what}?",
        "owner": f"Who owns the {what}?",
    }[kind]


def _unknown(subject: str) -> str:
    kind, what = subject.split(":", 1)
    return {
        "place": f"I do not know where the {what} is.",
        "code": f"I do not know the code of the {what}.",
        "owner": f"I do not know who owns the {what}.",
    }[kind]


def answer(memory: Memory, subject: str) -> str:
    return memory.facts.get(subject) or _unknown(subject)


def _filler_sentence(r: random.Random) -> str:
    a, b = r.sample(NAMES, 2)
    return r.choice(
        [
            f"{a} walked past the {r.choice(PLACES)} in the {r.choice(WEATHER)}.",
            f"{a} and {b} shared {r.choice(FOODS)} near the {r.choice(PLACES)}.",
            f"After the {r.choice(WEATHER)}, {a} waited for {b}.",
            f"{a} asked {b} about the {r.choice(WEATHER)} and went home.",
            f"They found {r.choice(FOODS)} but no {r.choice(FOODS)}.",
            f"It was a day of {r.choice(WEATHER)} and {r.choice(WEATHER)}.",
            f"{a} sold {r.choice(FOODS)} to {b} for {r.randrange(2, 90)} coins.",
        ]
    )


def story(r: random.Random, sentences: int) -> str:
    return " ".join(_filler_sentence(r) for _ in range(sentences))


def system_prompt(r: random.Random, memory: Memory, handbook_sentences: int = 0) -> str:
    text = r.choice(
        [
            f"You are {memory.name}, the {memory.role}. Answer in one short sentence.",
            f"Your name is {memory.name}. You are the {memory.role}. Be concise.",
            f"You are {memory.name}. You work as the {memory.role}. Remember what you are told.",
        ]
    )
    return text + (f"\n\nHandbook: {story(r, handbook_sentences)}" if handbook_sentences else "")


Exchange = tuple[str, str]  # what the user says, what the model should reply
Act = Callable[[random.Random, "Memory"], Exchange]


def _tell(r: random.Random, m: Memory) -> Exchange:
    """A fact and its acknowledgement."""
    subject, text = fact(r, m)
    m.learn(subject, sentence(text))
    lead = r.choice(
        ["Remember that {}.", "Please note: {}.", "You should know that {}.", "{}.", "News: {}.", "By the way, {}."]
    )
    return lead.format(text[0].upper() + text[1:] if lead == "{}." else text), f"Noted. {sentence(text)}"


def _tell_many(r: random.Random, m: Memory) -> Exchange:
    texts = []
    for _ in range(r.randrange(2, 5)):
        subject, text = fact(r, m)
        m.learn(subject, sentence(text))
        texts.append(sentence(text))
    return "Remember all of this. " + " ".join(texts), f"Noted {len(texts)} facts."


def _document(r: random.Random, m: Memory) -> Exchange:
    parts, count = [], r.randrange(1, 5)
    for _ in range(count):
        parts.append(story(r, r.randrange(1, 9)))
        subject, text = fact(r, m)
        m.learn(subject, sentence(text))
        parts.append(sentence(text))
    parts.append(story(r, r.randrange(0, 5)))
    return "Document: " + " ".join(
        p for p in parts if p
    ), f"I have read it. It holds {count} facts." if count > 1 else "I have read it. It holds 1 fact."


def _ask(r: random.Random, m: Memory) -> Exchange:
    if m.facts and r.random() < 0.9:
        subject = r.choice(list(m.facts))
    else:
        subject = fact(r, Memory("", ""))[0]
    lead = r.choice(["{}", "{}", "Tell me: {}", "Quick question. {}"])
    return lead.format(question(subject)), answer(m, subject)


def _story(r: random.Random, m: Memory) -> Exchange:
    teller = r.choice(NAMES)
    return f"A story by {teller}: {story(r, r.randrange(3, 30))}", f"Thank you for the story by {teller}."


def _who(r: random.Random, m: Memory) -> Exchange:
    return r.choice(["Who are you?", "What is your name?", "Introduce yourself."]), f"I am {m.name}, the {m.role}."


def _hello(r: random.Random, m: Memory) -> Exchange:
    return r.choice(["Say hello briefly.", "Hello!", "Good morning."]), f"Hello, I am {m.name}."


def _repeat(r: random.Random, m: Memory) -> Exchange:
    words = " ".join(
        r.choice((COLOURS, THINGS, PLACES, FOODS, NAMES)[r.randrange(5)]) for _ in range(r.randrange(2, 9))
    )
    return f"Repeat after me: {words}", words


def _count(r: random.Random, m: Memory) -> Exchange:
    n = len(m.facts)
    return r.choice(["How many facts do you know?", "Count your facts."]), f"I know {n} fact{'' if n == 1 else 's'}."


def _crowd(r: random.Random, m: Memory) -> Exchange:
    """Other speakers talk; the cue asks this agent to answer the last of them."""
    speakers = r.sample([n for n in NAMES if n != m.name], r.randrange(1, 4))
    lines = []
    for who in speakers:
        subject, text = fact(r, m)
        m.learn(subject, sentence(text))
        lines.append(f"{who}: {sentence(text)}")
    last = lines[-1].split(": ", 1)[1]
    return "\n".join(lines) + f"\n[{m.name}, respond now.]", f"I heard you, {speakers[-1]}. {last}"


ACTS: list[tuple[Act, int]] = [
    (_tell, 18),
    (_tell_many, 8),
    (_document, 5),
    (_ask, 50),
    (_story, 4),
    (_who, 2),
    (_hello, 2),
    (_repeat, 4),
    (_count, 1),
    (_crowd, 7),
]


def conversation(r: random.Random, words: int) -> Chat:
    """One conversation of about `words` words: {"messages": [...], "tools": [...] or None}."""
    memory = Memory(r.choice(NAMES), r.choice(ROLES))
    with_tools = r.random() < 0.15
    messages: list[Chat] = [
        {"role": "system", "content": system_prompt(r, memory, r.choice([0, 0, 0, r.randrange(2, 30)]))}
    ]
    used = 0
    acts, weights = [act for act, _ in ACTS], [weight for _, weight in ACTS]
    while used < words:
        if with_tools and r.random() < 0.2:
            a, b = r.randrange(1, 100), r.randrange(1, 100)
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
            messages += [
                {"role": "user", "content": r.choice([f"Add {a} and {b}.", f"What is {a} plus {b}?"])},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": json.dumps({"sum": a + b})},
                {"role": "assistant", "content": f"The sum is {a + b}."},
            ]
            used += 40
            continue
        user, reply = r.choices(acts, weights)[0](r, memory)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        used += len(user.split()) + len(reply.split()) + 6
    return {"messages": messages, "tools": [ADD_TOOL] if with_tools else None}


def recall_case(r: random.Random, distance_words: int) -> Chat:
    """A fact, `distance_words` words of other talk, then its question: messages end with the user's question."""
    memory = Memory(r.choice(NAMES), r.choice(ROLES))
    messages: list[Chat] = [{"role": "system", "content": system_prompt(r, memory)}]
    user, reply = _tell(r, memory)
    (subject,) = memory.facts
    messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    used = 0
    while used < distance_words:
        user, reply = r.choices([_tell, _story, _document, _crowd], [3, 2, 2, 1])[0](r, memory)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        used += len(user.split()) + len(reply.split()) + 6
    messages.append({"role": "user", "content": question(subject)})
    return {"messages": messages, "answer": answer(memory, subject)}
