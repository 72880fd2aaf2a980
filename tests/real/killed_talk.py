"""A process that is killed while it holds a store: python -m tests.real.killed_talk MODEL STORE.

Several agents speak, all is saved, what they said is printed as one line of JSON, and then it waits.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from rekindle import Engine

SYSTEM = (
    "You are the clerk of a small harbour. You know the ships, their captains and their cargo, the tides of the week "
    "and the berths that are free, and you answer in one short sentence what the crews ask you on the radio."
)
QUESTIONS = (
    "The Aurora is two miles out with forty barrels of oil. Which berth is hers?",
    "Her captain asks for a pilot before the tide turns at six. Is there one?",
    "Write down that the crane at berth three is broken until Thursday.",
    "A fishing boat reports fog west of the lighthouse. Who must be warned?",
    "How many barrels did I say the Aurora carries?",
    "The Swallow leaves tonight with timber for Riga. Note it in the book.",
    "Which ship leaves tonight, and where to?",
    "Read me the list of everything that I asked you to write down.",
    "What is wrong with the crane?",
    "Thank you. Close the book for today and wish the crews a good night.",
)
AGENTS = ("bea", "cid", "dora")
GREEDY: Any = {"temperature": 0.0, "max_tokens": 10}
SETTINGS: Any = {"threads": 1, "hot_bytes": 64 << 20, "anticipate": "off"}


def begun(question: str) -> list[dict[str, str]]:
    """A conversation's first messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def main() -> None:
    model, store = sys.argv[1:]
    engine = Engine.from_pretrained(model, store=store, **SETTINGS)
    said = {}
    for agent, questions in (("ada", QUESTIONS[:4]), *((agent, QUESTIONS[4:5]) for agent in AGENTS)):
        talk = begun(f"This is {agent} speaking. {questions[0]}")
        for following in (*questions[1:], None):
            reply = engine.chat(agent, talk, **GREEDY).text
            talk.append({"role": "assistant", "content": reply})
            if following is not None:
                talk.append({"role": "user", "content": following})
        said[agent] = talk
    assert engine.flush()
    print(json.dumps(said), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
