"""Constraints of replies that another server computes: what can be passed on to it, and a clear error for the rest.

The masks of our own grammar cover reasoning, calls and text of a reply together; another server gets the constraint of
its text alone, which holds from its first token on.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.config import BackendKind
from rekindle.errors import BadRequest
from rekindle.text.constraints.types import Calls, Constraint


class BackendConstraints:
    """Says which constraints can be passed on to a backend of this kind."""

    def __init__(self, kind: BackendKind) -> None:
        self._kind = kind

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
            tool = next((tool for tool in calls.tools if tool.is_strict), None)
            param = "tool_choice" if calls.is_forced or tool is None else tool.param
            raise BadRequest(
                f"{param}: calls cannot be enforced where another server computes: leave it out", param=param
            )
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
        if self._kind != "vllm" and constraint.kind != "json":
            raise BadRequest(f"{param}: the server that computes takes JSON schemas only", param=param)
