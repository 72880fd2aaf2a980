"""Tools as chat templates take them, which is how OpenAI's and Ollama's clients send them.

Tools of other types, which the servers of a vendor would run or know, are not shown to the model: they are left out and
named, as in every dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from rekindle.errors import BadRequest
from rekindle.server.answers.validation import OpenModel
from rekindle.text.omissions import Omissions

FUNCTION = "function"


class ToolFunction(OpenModel):
    """A function the model may call; `parameters` is a JSON schema, which its calls have with `strict`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenModel):
    """A tool offered to the model; one of another type than `function` is left out, and named."""

    type: str = Field(default=FUNCTION, min_length=1)
    function: ToolFunction | None = None


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a request: as they were sent, for the template (None: there are none), and their names.

    `strict`: the names of those whose schemas are enforced, and where these are in the body.
    """

    shown: list[Any] | None = None
    names: frozenset[str] = frozenset()
    strict: Mapping[str, str] = field(default_factory=dict)


def read_functions(tools: Sequence[Tool] | None, sent: Any, omissions: Omissions) -> Functions:
    """Return the functions among the tools; BadRequest for one without its function.

    `sent`: the same tools, unparsed, as the template prints every key, in the order sent.
    """
    shown: list[Any] = []
    names: set[str] = set()
    strict: dict[str, str] = {}
    for at, (tool, unparsed) in enumerate(zip(tools or (), sent if tools else (), strict=True)):
        if tool.function is not None:
            shown.append(unparsed)
            names.add(tool.function.name)
            if tool.function.strict:
                strict[tool.function.name] = f"tools[{at}].function.parameters"
        elif tool.type == FUNCTION:
            raise BadRequest(f"tools[{at}].function is missing", param=f"tools[{at}].function")
        else:
            omissions.whole(unparsed, f"tools[{at}]")
    return Functions(shown or None, frozenset(names), strict)
