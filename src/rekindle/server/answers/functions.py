"""Tools as chat templates take them, which is how OpenAI's and Ollama's clients send them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rekindle.server.answers.validation import OpenModel


class ToolFunction(OpenModel):
    """A function the model may call; `parameters` is a JSON schema, which its calls have with `strict`."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenModel):
    """A tool offered to the model."""

    type: Literal["function"] = "function"
    function: ToolFunction
