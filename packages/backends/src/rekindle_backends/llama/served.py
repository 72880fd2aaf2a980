"""What a llama-server serves, asked before anything is sent to it: model, slots, context, tokens.

Raises ConfigError for a server that cannot do the work: the message says what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.errors import ConfigError
from rekindle_backends.client import Backend
from rekindle_backends.llama.wire import COMPLETION, PROPS, SLOTS
from rekindle_backends.served import PROBE, Served, ask, compare_tokens
from rekindle_backends.wire import TOKENIZE, error_text


@dataclass(frozen=True, slots=True)
class LlamaServed:
    """A llama-server: its model, tokens of context in each of its slots, and whether it may compute by drafts."""

    served: Served
    max_context: int
    num_slots: int
    may_draft: bool

    @classmethod
    def find(cls, backend: Backend, wanted: str | None, names: Sequence[str]) -> LlamaServed:
        """Ask for the model as `Served.find` chooses it, and for its slots."""
        served = Served.find(backend, wanted, names)
        status, props = ask(backend, "GET", PROPS)
        match props:
            case {
                "total_slots": int(num_slots),
                "model_path": str(),
                "default_generation_settings": {"n_ctx": int(max_context)},
            }:
                _, slots = ask(backend, "GET", SLOTS)
                return cls(served, max_context, num_slots, _may_draft(slots))
            case _:
                raise ConfigError(
                    f"backend: {backend.url}{PROPS} does not answer as a llama-server does (status {status}): "
                    f"{error_text(props)}"
                )

    def check_tokens(self, backend: Backend, encode: Callable[[str], Sequence[int]]) -> str:
        """Compare the tokens of a text, then let one token follow them; return what was found, a sentence for users.

        ConfigError if its tokenizer differs, or if it does not take and return token ids.
        """
        ids = [int(token_id) for token_id in encode(PROBE)]
        asked = {"content": PROBE, "add_special": False, "parse_special": False}
        note = compare_tokens(self.served, ids, *ask(backend, "POST", TOKENIZE, asked))
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "return_tokens": True}
        status, answer = ask(backend, "POST", COMPLETION, body)
        match answer:
            case {"tokens": [int(), *_], "tokens_evaluated": int(num_tokens)} if status == 200:
                if num_tokens != len(ids):
                    raise ConfigError("backend: it changed the token ids of a prompt, so nothing could be matched")
                return note
            case _:
                raise ConfigError(
                    f"backend: {COMPLETION} returns no token ids (return_tokens), without which no reply can be "
                    f"remembered (status {status}): {error_text(answer)}"
                )


def _may_draft(slots: object) -> bool:
    """Whether slots, as they are listed, may compute by drafts: what /props say of that is what a request asks for."""
    listed = slots if isinstance(slots, list) else [None]
    return not all(isinstance(each, dict) and each.get("speculative") is False for each in listed)
