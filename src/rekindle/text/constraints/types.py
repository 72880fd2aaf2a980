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


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool that a reply may call; its arguments are JSON of `schema`.

    `is_strict`: a schema that cannot be enforced is refused, under the name `param`; else its calls have any object.
    """

    name: str
    schema: Any
    is_strict: bool
    param: str


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that a reply may have, one or (`parallel`) several.

    Without tools they are free. `is_forced`: the reply has nothing else, and the prompt has begun the first, up to its
    name, or of the tool `name` up to its arguments.
    """

    tools: tuple[CalledTool, ...]
    parallel: bool = True
    is_forced: bool = False
    name: str | None = None
