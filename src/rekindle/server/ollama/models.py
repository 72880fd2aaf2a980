"""Models of Ollama's answers for the OpenAPI description; tests validate real answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rekindle.server.answers.options import RekindleReport
from rekindle.server.answers.validation import StrictModel

# The version of Ollama whose interface this is: clients refuse old ones, or leave out what came later.
VERSION = "0.13.0"
FOREVER = "9999-12-31T23:59:59Z"


class OllamaErrorReply(StrictModel):
    """Every error under /api has this shape; in a stream it is the last line."""

    error: str


class OllamaToken(StrictModel):
    """A token, its natural logarithm of probability before temperature, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaPosition(OllamaToken):
    """A generated token and the most likely tokens in its position."""

    top_logprobs: list[OllamaToken]


class OllamaFunction(StrictModel):
    """A function that the model calls; calls are counted from 0."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCalled(StrictModel):
    """A tool call by the model, whole."""

    id: str
    function: OllamaFunction


class OllamaMessage(StrictModel):
    """The reply or, in a stream, what a line adds to it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCalled] = Field(default=[])


class _Line(StrictModel):
    model: str = Field(description="as the request names it")
    created_at: str
    done: bool = Field(description="whether it is the last line; only that one has figures")
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[OllamaPosition] | None = Field(default=None, description="of tokens since the last line with any")
    total_duration: int | None = Field(default=None, description="nanoseconds, as all durations")
    load_duration: int | None = Field(default=None, description="until the prompt was begun: waiting, loading KV")
    prompt_eval_count: int | None = Field(default=None, description="tokens of the whole prompt, reused ones too")
    prompt_eval_duration: int | None = None
    eval_count: int | None = Field(default=None, description="tokens of the reply")
    eval_duration: int | None = None
    progress: str | None = Field(default=None, description="of the prompt, on lines that keep the connection alive")
    rekindle: RekindleReport | None = None


class OllamaChatAnswer(_Line):
    """A whole answer or, in a stream, one of its lines."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Line):
    """A whole answer or, in a stream, one of its lines."""

    response: str
    thinking: str | None = None


class OllamaDetails(StrictModel):
    """What people compare models by. `quantization_level`: how the weights are kept here."""

    parent_model: str
    format: Literal["safetensors", "gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int


class _Named(StrictModel):
    name: str
    model: str
    digest: str = Field(description="differs wherever stored KV does not fit")
    size: int = Field(
        description="bytes of the weight files; if loaded, with hot KV; of a front, to an admin, with what it uses"
    )
    details: OllamaDetails


class OllamaModel(_Named):
    """A model that can be used."""

    modified_at: str = Field(description="when the server loaded it")
    capabilities: list[Literal["completion", "tools", "thinking", "vision"]]


class OllamaLoadedModel(_Named):
    """A model in memory; `expires_at` is never."""

    size_vram: int = Field(description="0 on a CPU, else its size")
    expires_at: str
    context_length: int


class OllamaTags(StrictModel):
    """The served model, alone."""

    models: list[OllamaModel]


class OllamaRunning(StrictModel):
    """The served model, alone."""

    models: list[OllamaLoadedModel]


class OllamaModelCard(StrictModel):
    """What a model is and can do. `template` is Jinja, as in the model's files; `parameters`: defaults of options."""

    modified_at: str
    details: OllamaDetails
    capabilities: list[Literal["completion", "tools", "thinking", "vision"]]
    template: str
    parameters: str
    model_info: dict[str, int | str]


class OllamaVersion(StrictModel):
    """A version of Ollama."""

    version: str
