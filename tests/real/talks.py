"""What agents ask a real model over HTTP, and a process that is killed: python -m tests.real.talks MODEL STORE.

It holds a store while several agents speak; all is saved, what they said is printed as one line of JSON, and then it
waits.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rekindle.model.check_text import CHECK_TEXT
from tests.server.conftest import Served
from tests.server.scripted import serving

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
GREEDY = {"temperature": 0, "max_tokens": 10, "return_token_ids": True}

Talk = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply's text, the ids of its prompt and its own, and the report on it."""

    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    report: Mapping[str, Any]


def begun(question: str) -> Talk:
    """A conversation's first messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def asked(served: Served, agent: str, talk: Talk) -> Reply:
    """The greedy reply; of a base model, which has no chat template, to all that was said as one text."""
    given = {"messages": talk} if is_chat(served) else {"prompt": transcript(talk)}
    return _replied(served, agent, given)


def computed(served: Served, prompt_ids: list[int]) -> Reply:
    """The greedy reply to these ids, with nothing reused."""
    if is_chat(served):
        options = {"reuse": "off", "prompt_ids": prompt_ids}
        return _replied(served, "plain", {"messages": begun("Hello?"), "rekindle": options})
    return _replied(served, "plain", {"prompt": prompt_ids, "rekindle": {"reuse": "off"}})


def is_chat(served: Served) -> bool:
    """Whether the model has a chat template."""
    return bool(served.engine.encoder.template.sources)


def _replied(served: Served, agent: str, given: dict[str, Any]) -> Reply:
    route = "/v1/chat/completions" if "messages" in given else "/v1/completions"
    answer = served.send("POST", route, {**given, **GREEDY}, x_agent_id=agent)
    assert answer.status == 200, answer.body
    found = json.loads(answer.body)
    (choice,) = found["choices"]
    text = choice["message"]["content"] if "messages" in given else choice["text"]
    prompt_ids = found["prompt_token_ids"] if "messages" in given else choice["prompt_token_ids"]
    return Reply(text, prompt_ids, choice["token_ids"], found["rekindle"])


def transcript(talk: Talk) -> str:
    """A text that ends where a reply begins, with its own blank; it begins with one longer than Gemma's window."""
    blanks = {"assistant": ""}
    said = "\n".join(f"{each['role']}:{blanks.get(each['role'], ' ')}{each['content']}" for each in talk)
    return f"{CHECK_TEXT}\n{said}\nassistant:"


@contextmanager
def harbour_serving(model: str, store: str) -> Iterator[Served]:
    """A server of this model on this store."""
    with serving(model=model, store=store, threads=1, hot_bytes="64MiB", anticipate="off") as served:
        yield served


def main() -> None:
    model, store = sys.argv[1:]
    said = {}
    with harbour_serving(model, store) as served:
        for agent, questions in (("ada", QUESTIONS[:4]), *((agent, QUESTIONS[4:5]) for agent in AGENTS)):
            talk = begun(f"This is {agent} speaking. {questions[0]}")
            for following in (*questions[1:], None):
                talk.append({"role": "assistant", "content": asked(served, agent, talk).text})
                if following is not None:
                    talk.append({"role": "user", "content": following})
            said[agent] = talk
        assert served.engine.flush()
        print(json.dumps(said), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
