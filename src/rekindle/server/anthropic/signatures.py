"""Signatures of thinking blocks: opaque to clients, which send them back unchanged.

They prove nothing: any client of this server may supply reasoning. If the thinking is hidden, the signature carries it,
so that the next prompt can include it.
"""

from __future__ import annotations

import base64
import hashlib

_SHOWN, _HIDDEN = "rekindle-1-", "rekindle-2-"


def sign(reasoning: str, *, hidden: bool) -> str:
    """Return the signature of a thinking block; if `hidden`, its length grows with the text."""
    raw = reasoning.encode("utf-8", "replace")
    if hidden:
        return _HIDDEN + base64.urlsafe_b64encode(raw).decode("ascii")
    return _SHOWN + base64.urlsafe_b64encode(hashlib.blake2b(raw, digest_size=18).digest()).decode("ascii")


def reasoning_of(signature: object) -> str:
    """Return the reasoning that a signature carries; empty if it carries none or another server wrote it."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(_HIDDEN).encode("ascii")).decode()
    except ValueError:
        return ""
