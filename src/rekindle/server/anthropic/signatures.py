"""Signatures of thinking blocks: opaque to clients, which send them back as they are.

Nothing is proven by one: who may speak to this server may say what was thought. Where the thinking is not to be shown,
the signature carries it, so that the next turn can hold it again.
"""

from __future__ import annotations

import base64
import hashlib

_SHOWN, _HIDDEN = "rekindle-1-", "rekindle-2-"


def sign(thought: str, *, hidden: bool) -> str:
    """The signature of a thought; of a hidden one it grows with its length."""
    raw = thought.encode("utf-8", "replace")
    if hidden:
        return _HIDDEN + base64.urlsafe_b64encode(raw).decode("ascii")
    return _SHOWN + base64.urlsafe_b64encode(hashlib.blake2b(raw, digest_size=18).digest()).decode("ascii")


def reasoning_of(signature: object) -> str:
    """The thought a signature carries; empty where it carries none, also where another server wrote it."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(_HIDDEN).encode("ascii")).decode()
    except ValueError:
        return ""
