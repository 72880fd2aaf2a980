"""Constraints as requests carry them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a reply must be.

    `value`: of "json" a JSON schema, of "regex" a regular expression, of "choice" a tuple of texts, of "grammar" one in
    Lark's or llama.cpp's notation. `param` is what the caller calls it.
    """

    kind: Kind
    value: Any
    param: str = "constraint"
