"""Bodies that a noisy tenant sends: expensive for a server, whether it accepts or refuses them.

Every body is built once and sent unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"
HEADER = "x-anthropic-billing-header: "


@dataclass(frozen=True, slots=True)
class Attack:
    """A body sent without a pause over `connections` at once; `reads` False: the answer is left unread. `is_chunked`:
    the body has the marks of its chunks."""

    path: str
    body: bytes
    connections: int = 1
    reads: bool = True
    is_chunked: bool = False


def attacks(fill: int) -> dict[str, Attack]:
    """Return every attack by name. `fill`: the bytes of text in the largest bodies."""
    fits = fill // 128  # what a context of a few thousand tokens may hold: it is rendered and counted
    texts = {"words": "word ", "spaces": " ", "digits": "1", "accents": "é", "control tokens": "<|im_end|>"}
    found = {name: _attack(CHAT, _chat(_filled(unit, fill))) for name, unit in texts.items()}
    found |= {f"{name}, may fit": _attack(CHAT, _chat(_filled(unit, fits))) for name, unit in texts.items()}
    many = {"messages": [{"role": "user", "content": "word"}] * 200_000}
    found["200,000 messages"] = _attack(CHAT, many)
    found["200,000 messages to count"] = _attack(COUNT, many)
    found["30,000 messages"] = _attack(CHAT, {"messages": [{"role": "user", "content": "word"}] * 30_000})
    for name, size in (("billing header", fill), ("billing header, may fit", fits)):
        system = {"role": "system", "content": HEADER + "a=b; " * (size // 5)}
        found[name] = _attack(CHAT, {"messages": [system, {"role": "user", "content": "Hi."}]})
    found["nested lists"] = Attack(CHAT, b'{"messages": [' + b"[[]],[]," * (fill // 8) + b"[]]}")
    found |= _dialects("word " * (fill // 5))
    found |= {f"{name}, may fit": attack for name, attack in _dialects("word " * (fits // 5)).items()}
    found["picture"] = _attack(CHAT, _picture(fill))
    found["agent's file"] = Attack("/v1/agents/loud/import", bytes(fill))
    return found | _values(fill) | _streams() | _constraints()


def _filled(unit: str, size: int) -> str:
    """Repeat a text as often as it fits into so many bytes of JSON."""
    return unit * (size // (len(json.dumps(unit)) - 2))


def _dialects(text: str) -> dict[str, Attack]:
    chat = _chat(text)
    bodies: Mapping[str, Any] = {
        "/v1/completions": {"prompt": text},
        "/v1/messages": chat,
        "/v1/responses": {"input": text},
        "/v1/tokenize": {"text": text},
        COUNT: chat,
        "/api/chat": chat,
        "/api/generate": {"prompt": text},
    }
    return {path.removeprefix("/v1/"): _attack(path, body) for path, body in bodies.items()}


def _values(fill: int) -> dict[str, Attack]:
    """Return bodies whose values, or whose ways of being sent, cost more than their bytes."""
    words, most = _filled("word ", fill), min(fill // 16, 149_000)  # nearly as many objects and keys as a body may have
    tools = [{"name": f"f{at:06}", "input_schema": {}} for at in range(most // 4)]
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(_chat("word " * (fill // 30))).encode())
    return {
        "suffix": _attack("/v1/completions", {"prompt": "Hi.", "suffix": words}),
        "role": _attack(CHAT, {"messages": [{"role": words, "content": "Hi."}]}),
        "empty parts": _attack("/v1/messages", {"messages": [{"role": "user", "content": [{}] * most}]}),
        "65,000 empty parts": _attack("/v1/messages", {"messages": [{"role": "user", "content": [{}] * 65_000}]}),
        "unknown hints": _attack(CHAT, _hinted(most)),
        "too many hints": _attack(CHAT, _hinted(3 * most)),
        "long numbers": Attack("/v1/completions", _numbers("9" * 4300, fill)),
        "decimals": Attack("/v1/completions", _numbers("1.2345678912345678e-300", fill)),
        "tools": _attack("/v1/messages", {**_chat("Hi."), "tools": tools}),
        "one-byte chunks": Attack(CHAT, chunks + b"0\r\n\r\n", is_chunked=True),
    }


def _streams() -> dict[str, Attack]:
    """Return requests that are served, but more of them than can run at once."""
    endless = {**_chat("Count on."), "stream": True, "max_tokens": 2000, "ignore_eos": True}
    long = {**_chat("word " * 2_300), "max_tokens": 40, "ignore_eos": True}
    return {
        "60 unread streams": _attack(CHAT, endless, connections=60, reads=False),
        "100 long prompts": _attack(CHAT, long, connections=100),
    }


def _constraints() -> dict[str, Attack]:
    """Return constraints of a few bytes to a megabyte that are expensive to compile or to follow, or never compile."""
    patterns = {"type": "object", "patternProperties": {f"^a{at}[a-z]+$": {"type": "string"} for at in range(200)}}
    at_fault = {
        "type": "object",
        "properties": {
            **{f"p{at}": {"$ref": "#/$defs/d"} for at in range(100)},
            "last": {"type": "string", "pattern": "(?=x)y"},
        },
        "$defs": {"d": patterns},
    }
    ambiguous = " | ".join(f's s "a{at}"' for at in range(300))
    given: dict[str, dict[str, Any]] = {
        "schema at fault": {"json": at_fault},
        "8,000 properties": {"json": {"properties": {f"p{at}": {"type": "integer"} for at in range(8000)}}},
        "enum of 200,000": {"json": {"enum": list(range(200_000))}},
        "large divisor": {"json": {"type": "integer", "multipleOf": 99_999_989}},
        "regex that multiplies": {"regex": "((a{1000}){1000}){1000}"},
        "50,000 choices": {"choice": [f"c{at}x" for at in range(50_000)]},
        "grammar that doubles": {"grammar": "\n".join(["start: a0", *_doubling(": ", 40)])},
        "ambiguous grammar": {"grammar": f'start: s\ns: {ambiguous} | ""'},
        "GBNF that doubles": {"grammar": "\n".join(["root ::= a0", *_doubling(" ::= ", 40)])},
        "GBNF of 3,000 rules": {"grammar": "\n".join(["root ::= a0", *_doubling(" ::= ", 3000)])},
    }
    chat = {**_chat("Hi."), "max_tokens": 20}
    return {name: _attack(CHAT, {**chat, "structured_outputs": each}) for name, each in given.items()}


def _doubling(mark: str, count: int) -> list[str]:
    """Rules of which each needs the next one twice; `mark` is between a rule's name and what it says."""
    return [*(f"a{at}{mark}a{at + 1} a{at + 1}" for at in range(count)), f'a{count}{mark}"x"']


def _picture(fill: int) -> dict[str, Any]:
    """A message with a picture in it, which is none."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (fill // 4 * 4)}}
    return {"messages": [{"role": "user", "content": [part]}]}


def _numbers(number: str, size: int) -> bytes:
    """A prompt of ids that are none."""
    return f'{{"prompt": [{",".join([number] * (size // (len(number) + 1)))}]}}'.encode()


def _hinted(count: int) -> dict[str, Any]:
    """A message with so many hints that nobody knows."""
    return {**_chat("Hi."), "nvext": {"agent_hints": {f"k{at:06}": 1 for at in range(count)}}}


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _attack(path: str, body: Mapping[str, Any], *, connections: int = 1, reads: bool = True) -> Attack:
    data = body if path != "/v1/messages" else {"max_tokens": 1, **body}
    return Attack(path, json.dumps(data).encode(), connections, reads)
