"""Constraints of replies that another server computes: what can be passed on to it, and a clear error for the rest.

The masks of our own grammar cover reasoning, calls and text of a reply together; another server gets the constraint of
its text alone, which holds from its first token on. A forced call of one tool is such a text: the prompt ends in its
beginning, and the arguments in JSON are the reply. What closes the call is not written then, which readers accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from rekindle.config import BackendKind
from rekindle.errors import BadRequest
from rekindle.text.constraints.types import Calls, Constraint, Kind
from rekindle.text.replies import ReplyFormat

# What a backend of each kind can be asked for, and that in words.
TAKEN: Mapping[BackendKind, tuple[frozenset[Kind], str]] = {
    "vllm": (frozenset(get_args(Kind)), "all"),
    "llama.cpp": (frozenset(("json", "choice", "grammar")), "JSON schemas, choices and GBNF"),
    "openai": (frozenset(("json",)), "JSON schemas"),
}


class BackendConstraints:
    """Says which constraints can be passed on to a backend of this kind, for a model with this form of replies."""

    def __init__(self, kind: BackendKind, form: ReplyFormat) -> None:
        self._kind = kind
        layout = form.tools.layout if form.tools is not None else None
        self._writes_json = layout is not None and layout.tags is None and not layout.number

    def enforces(self, calls: Calls) -> bool:
        """Whether calls would have to be enforced: forced ones, and those of strict tools."""
        return calls.is_forced or any(tool.is_strict for tool in calls.tools)

    def is_ready(self, constraint: Constraint | None, *, opening: str, calls: Calls | None = None) -> bool:
        """Whether `matcher` takes no time: always, as nothing is compiled here."""
        return True

    def close(self) -> None:
        """Nothing to end: there is no process."""

    def matcher(
        self,
        constraint: Constraint | None,
        *,
        opening: str,
        calls: Calls | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Return None, as nothing is masked here; BadRequest for what the backend does not accept."""
        if calls is not None and self.enforces(calls):
            self._check(calls)
        if constraint is None:
            return
        param = constraint.param
        if calls is not None:
            raise BadRequest(f"{param}: not together with tools where another server computes", param=param)
        if opening:
            message = (
                f"{param}: this model begins its replies with reasoning, which the server that computes would constrain"
            )
            raise BadRequest(f"{message}: switch reasoning off, or leave it out", param=param)
        kinds, words = TAKEN[self._kind]
        if constraint.kind not in kinds:
            raise BadRequest(f"{param}: the server that computes takes {words} only", param=param)

    def _check(self, calls: Calls) -> None:
        """Raise BadRequest for calls that cannot be enforced at the backend."""
        if not calls.is_forced:
            param = next(tool.param for tool in calls.tools if tool.is_strict)
            message = f"{param}: calls that the model chooses cannot be enforced where another server computes"
            raise BadRequest(f"{message}: leave strict out, or force the call", param=param)
        if calls.name is None:
            message = "tool_choice: where another server computes, only the call of one tool can be forced: name it"
            raise BadRequest(message, param="tool_choice")
        if not self._writes_json:
            message = "tool_choice: this model's calls are not JSON, which another server cannot be asked for: use auto"
            raise BadRequest(message, param="tool_choice")
