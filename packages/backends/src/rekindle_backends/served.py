"""What a backend serves, asked before anything is sent to it: its model's name, its context, its tokens.

Of llama-server, whose list of models is read here as well, `llama/served` asks the rest. Raises ConfigError for a
backend that cannot do the work: the message says what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rekindle.errors import BackendFailed, ConfigError
from rekindle_backends.client import Backend
from rekindle_backends.wire import COMPLETIONS, MODELS, TOKENIZE, error_text

# Words, digits, blanks, signs of several scripts: tokenizers that differ are unlikely to agree on all of it.
PROBE = 'The quick  brown fox, 1234567 years\tago:\n\n  naïve café, Straße — 数字 и текст 🙂 \'ll <end> {"a": [0.5]}'
TEXT_ALONE = (
    "For servers that take text alone, such as mlx_lm.server, Ollama and LM Studio, nothing can be remembered: let "
    "llama.cpp compute a GGUF file of the model, with backend llama.cpp"
)


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a backend, by its name there. `max_context` and `num_bytes` (of its weights) None: it does not say."""

    name: str
    max_context: int | None
    num_bytes: int | None = None

    @classmethod
    def find(cls, backend: Backend, wanted: str | None, names: Sequence[str]) -> Served:
        """Choose the model `wanted`, else the only one that is no adapter, else one of these `names`."""
        status, body = ask(backend, "GET", MODELS)
        entries = _entries(body)
        if status != 200 or not entries:
            raise ConfigError(
                f"backend: {backend.url}{MODELS} lists no models (status {status}): is the URL right, and is a model "
                "loaded there?"
            )
        listed = ", ".join(str(entry["id"]) for entry in entries)
        if wanted is not None:
            chosen = [entry for entry in entries if entry["id"] == wanted]
            if not chosen:
                raise ConfigError(f"backend_model: {wanted!r} is not served at {backend.url}; it has {listed}")
        else:
            base = [entry for entry in entries if not entry.get("parent")]
            named = [each for each in base if each["id"] in names or each.get("root") in names]
            chosen = base if len(base) == 1 else named
            if len(chosen) != 1:
                raise ConfigError(f"backend: {backend.url} serves several models: set backend_model to one of {listed}")
        return cls(str(chosen[0]["id"]), _length(chosen[0]), _number(chosen[0].get("meta"), "size"))

    def difference(self, listed: Any) -> str | None:
        """Return in what a later list of models differs from this, as a sentence; None: in nothing."""
        entry = next((entry for entry in _entries(listed) if entry["id"] == self.name), None)
        if entry is None:
            return f"it no longer serves {self.name!r}: restart this server for the model that it serves"
        if _length(entry) != self.max_context:
            return f"its context was {self.max_context} tokens and is {_length(entry)}: restart this server"
        if _number(entry.get("meta"), "size") != self.num_bytes:
            return f"it serves another model of the name {self.name!r}: restart this server"
        return None


def _entries(body: Any) -> list[dict[str, Any]]:
    found = body.get("data") if isinstance(body, dict) else None
    if not isinstance(found, list):
        return []
    return [each for each in found if isinstance(each, dict) and isinstance(each.get("id"), str)]


def _length(entry: dict[str, Any]) -> int | None:
    """Return the context of a model: vLLM's word for it, else llama-server's, which is that of a slot."""
    return _number(entry, "max_model_len") or _number(entry.get("meta"), "n_ctx")


def _number(values: Any, name: str) -> int | None:
    found = values.get(name) if isinstance(values, dict) else None
    return found if isinstance(found, int) and found > 0 else None


def check_tokens(backend: Backend, served: Served, encode: Callable[[str], Sequence[int]]) -> str:
    """Compare the tokens of a text, then let one token follow them; return what was found, a sentence for users.

    ConfigError if the backend's tokenizer differs, or if it does not take and return token ids.
    """
    ids = [int(token_id) for token_id in encode(PROBE)]
    note = _same_tokens(backend, served, ids)
    body = {"model": served.name, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    status, answer = ask(backend, "POST", COMPLETIONS, body)
    if status != 200:
        why = f"backend: it does not take prompts as token ids (status {status}): {error_text(answer)}"
        raise ConfigError(why if status >= httpx.codes.INTERNAL_SERVER_ERROR else f"{why.rstrip('.')}. {TEXT_ALONE}")
    match answer:
        case {"choices": [{"token_ids": list()} as choice, *_]}:
            pass
        case _:
            raise ConfigError(
                "backend: it returns no token ids (return_token_ids), without which no reply can be remembered: vLLM "
                "does from 0.10.2 on; a llama-server is asked in another way: write llama.cpp=URL"
            )
    if choice.get("prompt_token_ids") not in (None, ids):
        raise ConfigError("backend: it changed the token ids of a prompt, so nothing could be matched")
    return note


def ask(backend: Backend, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Ask a backend something; ConfigError if it does not answer, or refuses our key."""
    try:
        status, answer = backend.ask(method, path, body)
    except BackendFailed as error:
        raise ConfigError(f"backend: {error}") from error
    if status in (401, 403):
        raise ConfigError(f"backend: {backend.url} refuses our key: set backend_key (REKINDLE_BACKEND_KEY)")
    return status, answer


def _same_tokens(backend: Backend, served: Served, ids: Sequence[int]) -> str:
    body = {"model": served.name, "prompt": PROBE, "add_special_tokens": False}
    return compare_tokens(served, ids, *ask(backend, "POST", TOKENIZE, body))


def compare_tokens(served: Served, ids: Sequence[int], status: int, answer: Any) -> str:
    """Compare our ids of the probe with a backend's answer; return what was found. ConfigError if they differ."""
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(tokens, list) or not tokens:  # none: it looked for the text under another name
        return f"whether its tokenizer is the same is not known: it has no {TOKENIZE} (status {status})"
    if tokens != list(ids):
        at = next((n for n, pair in enumerate(zip(tokens, ids, strict=False)) if pair[0] != pair[1]), 0)
        raise ConfigError(
            f"backend: {served.name!r} has another tokenizer than the model that is served here (they differ at token "
            f"{at} of a text): serve the same model at both"
        )
    return "its tokenizer is the same"
