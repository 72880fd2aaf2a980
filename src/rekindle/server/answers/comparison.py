"""What a request was made of, in its answer's id: a later request is compared with it, also after a restart.

Owns the form of such ids and what is compared. Nothing is stored: an id has a digest of each part of the request under
a random salt, and a MAC under a key of the namespace, so that what another namespace or server wrote is not found.

    msg_  base64url( salt [8] | bytes of the request [4] | number of messages [2] | digest a part [4] | their MAC [6] )

Parts are compared in their order, the messages last: those of the earlier request must begin the later one. What is
compared is the request as it is rendered, whether or not its KV was found; why that was not is said by
`rekindle.explanation`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Literal

from rekindle.engine.types import GenerationRequest, Progress, Report

Part = Literal["model", "system", "tools", "template", "messages"]
PARTS: tuple[Part, ...] = ("model", "system", "tools", "template", "messages")
_HEAD = struct.Struct("<8sIH")
_DIGEST_BYTES, _MAC_BYTES = 4, 6
_MOST_BYTES, _MOST_MESSAGES = (1 << 32) - 1, (1 << 16) - 1


class RequestParts:
    """The parts of one request for `model`, which its messages and tools are rendered for as they are."""

    def __init__(self, model: str, request: GenerationRequest) -> None:
        messages = request.messages or ()
        system = list(takewhile(lambda message: message.role == "system", messages))
        before = (model, [asdict(message) for message in system], request.tools, request.template_kwargs)
        self._before = [_canonical(value) for value in before]
        self._messages = [_canonical(asdict(message)) for message in messages[len(system) :]]

    @property
    def num_messages(self) -> int:
        """How many messages it has."""
        return len(self._messages)

    @property
    def num_bytes(self) -> int:
        """How long all of it is."""
        return sum(map(len, [*self._before, *self._messages]))

    def digests(self, salt: bytes, num_messages: int) -> list[bytes]:
        """The digest of each part, the last one of the first messages."""
        texts = [*self._before, b"\n".join(self._messages[:num_messages])]
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

    def new(self, prefix: str, namespace: str, parts: RequestParts) -> str:
        """Return an id for the answer to a request."""
        salt, num_messages = secrets.token_bytes(8), min(parts.num_messages, _MOST_MESSAGES)
        head = _HEAD.pack(salt, min(parts.num_bytes, _MOST_BYTES), num_messages)
        data = head + b"".join(parts.digests(salt, num_messages))
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
        salt, num_bytes, num_messages = _HEAD.unpack_from(data)
        digests = parts.digests(salt, num_messages)
        before = [data[at : at + _DIGEST_BYTES] for at in range(_HEAD.size, len(data), _DIGEST_BYTES)]
        changed = next((name for name, *both in zip(PARTS, digests, before, strict=True) if both[0] != both[1]), None)
        return Comparison(changed, min(1.0, num_bytes / max(1, parts.num_bytes)))

    def _mac(self, prefix: str, namespace: str, data: bytes) -> bytes:
        text = b"\0".join([prefix.encode(), namespace.encode(), data])
        return hashlib.blake2b(text, digest_size=_MAC_BYTES, key=self._key, person=b"rekindle.answer").digest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
