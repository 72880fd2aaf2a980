"""Fields that items of every type have: ids in OpenAI's format, and texts that a prompt can contain."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.messages import check_text

Item = dict[str, Any]
MAX_ID = 128  # characters of an id that a caller gave an item


def new_item_id(prefix: str) -> str:
    """A fresh id in OpenAI's format."""
    return f"{prefix}_{uuid.uuid4().hex}"


def item_id(item: Mapping[str, Any], prefix: str) -> str:
    """The id that the caller gave an item, or a fresh one."""
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ID and given.isascii() else new_item_id(prefix)


def text_field(item: Mapping[str, Any], key: str, where: str) -> str:
    """The text of a field; BadRequest if it is none, or if a prompt cannot contain it."""
    value = item.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{key} must be a string", param=f"{where}.{key}")
    return check_text(value, f"{where}.{key}")
