"""What a request was made of, in its answer's id: a later request is compared with it, also after a restart.

Owns the form of such ids and what is compared. Nothing is stored: an id has a digest of each part of the request under
a random salt, and a MAC under a key of the namespace, so that what another namespace or server wrote is not found.

    msg_  base64url( salt [8] | bytes of the request [4] | of its messages [4] | digest a part [4] | their MAC [6] )

Parts are compared in their order, the messages last: those of the earlier request must begin the later one. What is
compared is the request as it is rendered, whether or not its KV was found; why that was not is said by
`rekindle.explanation`. Messages are one text, of which a beginning is compared:

    {"role": "user", ...}"What is a quay?\n{"role": "assistant", ...}"A wharf."\n{"role": "user", ...}"And a pier?

Where a dialect merges a message into the one before it, texts of that role have no end, so that more may follow.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import struct
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Literal

from rekindle.engine.types import GenerationRequest, Progress, Report
from rekindle.text.messages import GUARD, Message

Part = Literal["model", "system", "tools", "template", "messages"]
PARTS: tuple[Part, ...] = ("model", "system", "tools", "template", "messages")
KEY_VARIABLE = "ANSWERS_OF_REKINDLE"  # what each process of a server of several models gets: the key of all, in hex
_HEAD = struct.Struct("<8sII")
_DIGEST_BYTES, _MAC_BYTES = 4, 6
_MOST_BYTES = (1 << 32) - 1
_MARK = GUARD.encode()
_DIVISION = re.compile(rb'\Z|\n|"|\\n|' + _MARK)  # the next message, the first text of this one, or one more


class RequestParts:
    """The parts of one request for `model`, which its messages and tools are rendered for as they are.

    `merged`: the roles whose consecutive messages its dialect makes one, as paragraphs.
    """

    def __init__(self, model: str, request: GenerationRequest, merged: Collection[str]) -> None:
        messages = request.messages or ()
        system = list(takewhile(lambda message: message.role == "system", messages))
        before = (model, [asdict(message) for message in system], request.tools, request.template_kwargs)
        self._before = [_canonical(value) for value in before]
        self._messages = b"\n".join(_written(message, message.role in merged) for message in messages[len(system) :])

    @property
    def num_message_bytes(self) -> int:
        """How long its messages are."""
        return len(self._messages)

    @property
    def num_bytes(self) -> int:
        """How long all of it is."""
        return sum(map(len, self._before)) + len(self._messages)

    def digests(self, salt: bytes, num_message_bytes: int) -> list[bytes]:
        """The digest of each part, the last one of the first bytes of the messages, or of all if those end in a text
        that goes on."""
        begun = self._messages[:num_message_bytes]
        is_divided = begun.endswith(_MARK) or _DIVISION.match(self._messages, num_message_bytes) is not None
        texts = [*self._before, begun if is_divided else self._messages]
        return [hashlib.blake2b(text, digest_size=_DIGEST_BYTES, salt=salt).digest() for text in texts]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A request next to an earlier one: the first part that `changed`, if any, and how much of the request that was."""

    changed: Part | None
    share: float  # bytes of the earlier request of those of this one, 1 at most

    def missed(self, known: Report | Progress) -> int:
        """About how many tokens would have been reused if the prompt had continued the earlier one, and were not."""
        return max(0, round(known.prompt_tokens * self.share) - known.reused_tokens)


class ComparableIds:
    """Ids of answers that carry what was asked; `key` is the server's, of 64 bytes at most."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_process(cls, secret: bytes) -> ComparableIds:
        """Those of this process: under the key of all processes of its server, or else under a secret of its own."""
        shared = os.environ.get(KEY_VARIABLE)
        return cls(bytes.fromhex(shared) if shared else secret)

    def new(self, prefix: str, namespace: str, parts: RequestParts) -> str:
        """Return an id for the answer to a request."""
        salt, num_message_bytes = secrets.token_bytes(8), min(parts.num_message_bytes, _MOST_BYTES)
        head = _HEAD.pack(salt, min(parts.num_bytes, _MOST_BYTES), num_message_bytes)
        data = head + b"".join(parts.digests(salt, num_message_bytes))
        return prefix + base64.urlsafe_b64encode(data + self._mac(prefix, namespace, data)).rstrip(b"=").decode()

    def compare(self, id: str, prefix: str, namespace: str, parts: RequestParts) -> Comparison | None:
        """Compare a request with that of an earlier answer; None if no such id was given out in this namespace."""
        try:
            text = id.removeprefix(prefix).encode("ascii")
            sealed = base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        data, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
        is_whole = len(data) == _HEAD.size + _DIGEST_BYTES * len(PARTS)
        if not is_whole or not hmac.compare_digest(mac, self._mac(prefix, namespace, data)):
            return None
        salt, num_bytes, num_message_bytes = _HEAD.unpack_from(data)
        digests = parts.digests(salt, num_message_bytes)
        before = [data[at : at + _DIGEST_BYTES] for at in range(_HEAD.size, len(data), _DIGEST_BYTES)]
        changed = next((name for name, *both in zip(PARTS, digests, before, strict=True) if both[0] != both[1]), None)
        return Comparison(changed, min(1.0, num_bytes / max(1, parts.num_bytes)))

    def _mac(self, prefix: str, namespace: str, data: bytes) -> bytes:
        text = b"\0".join([prefix.encode(), namespace.encode(), data])
        return hashlib.blake2b(text, digest_size=_MAC_BYTES, key=self._key, person=b"rekindle.answer").digest()


def _written(message: Message, is_open: bool) -> bytes:
    """Return a message with its content last; if that `is_open`, without its end, and nothing of it if it is empty."""
    rest = asdict(message)
    content = _canonical(rest.pop("content"))
    if is_open:
        content = content[:-1] if message.content else b""
    return _canonical(rest) + content


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
