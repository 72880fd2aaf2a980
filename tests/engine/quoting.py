"""Requests whose reply a text of their agent already holds, right or spoilt: drafts that are accepted and refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle.cache.blocks.hashing import Ids
from rekindle.engine.request import Request
from tests.exactness.rig import Rig


def spoilt(ids: Sequence[int], every: int = 7) -> list[int]:
    """The ids with every so-manieth one replaced by another; those between are long enough to be found again."""
    return [token ^ 1 if index % every == every - 1 else token for index, token in enumerate(ids)]


def quoting(rig: Rig, ids: Ids, new_tokens: int, text: Sequence[int], **params: Any) -> Request:
    """Queue a request whose agent has another text."""
    request = rig.unqueued(ids, new_tokens, **params)
    request.sequence.texts = (np.asarray(text, dtype=np.uint32),)
    rig.core.add(request)
    return request
