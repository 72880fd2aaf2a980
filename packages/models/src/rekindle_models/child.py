"""The process that serves one model: how it is started, which keys it has, and why it ended.

It is `rekindle serve` itself, on a free port of this machine. Its settings are in its environment, where other users of
the machine cannot read them, and none of the variables of ours that are settings. Its keys are random ones, one for
each namespace, so that it sees whose a request is, and nobody but us can send it any.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.config import DEFAULT_NAMESPACE, ENV_PREFIX, ServerSettings
from rekindle.errors import BackendFailed
from rekindle.harness.own_server import Command, EndedEarly, OwnServer, free_url
from rekindle.server.answers.comparison import KEY_VARIABLE
from rekindle.server.gate.keys import Access
from rekindle_models.named import Model, text_of
from rekindle_models.said import Said

STOP_S = 300.0  # to save what it has; then it is killed
ASK_S = 60.0  # it listens before it loads, and answers once it has


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of the processes: of each namespace, for what needs an admin where there are several, and `answers`,
    the one of the ids of their answers (None: each has its own)."""

    of: Mapping[str, str]
    admin: str | None
    answers: str | None

    @classmethod
    def made_for(cls, settings: ServerSettings, answers: str | None) -> Keys:
        """Make keys for the namespaces of a server."""
        named = {name: secrets.token_urlsafe(32) for name in settings.namespaces()}
        return cls(named, secrets.token_urlsafe(32) if settings.separates else None, answers)

    def key_for(self, access: Access) -> str | None:
        """Return the key that grants what a request was granted; None if that was nothing."""
        if not access.has_key:
            return None
        return self.admin if access.is_admin and self.admin is not None else self.of[access.namespace]

    @property
    def settings(self) -> dict[str, Any]:
        """The keys as settings of a process."""
        others = {name: key for name, key in self.of.items() if name != DEFAULT_NAMESPACE}
        found: dict[str, Any] = {"api_key": self.of[DEFAULT_NAMESPACE]}
        return found | ({"api_keys": others} if others else {}) | ({"admin_key": self.admin} if self.admin else {})


class Child:
    """One start of a model's process. `start` and `stop` wait, and may be called by different threads.

    `ended` is called once it has ended by itself after it answered, on a thread of its own.
    """

    def __init__(self, model: Model, keys: Keys, *, ended: Callable[[], None]) -> None:
        self.model = model
        self.url = free_url()
        given = {**model.given, **keys.settings, "served_model_name": model.name}
        given |= {"host": "127.0.0.1", "port": self.url.rpartition(":")[2]}
        variables: dict[str, str | None] = {name: None for name in os.environ if name.startswith(ENV_PREFIX)}
        variables |= {ENV_PREFIX + name.upper(): text_of(value) for name, value in given.items()}
        variables[KEY_VARIABLE] = keys.answers
        if "REKINDLE_DEBUG" in os.environ:
            variables["REKINDLE_DEBUG"] = os.environ["REKINDLE_DEBUG"]
        command = Command(
            f"the process of {model.name!r}",
            (sys.executable, "-m", "rekindle.cli", "serve"),
            self.url,
            variables,
            stop_s=STOP_S,
            ask_s=ASK_S,
        )
        self._said = Said("" if given.get("log_format") == "json" else f"[{model.name}] ")
        self._own = OwnServer(command, pauses_s=(), output=self._said.descriptor, given_up=ended)

    def start(self) -> None:
        """Start it and wait until it answers; BackendFailed, with what it wrote last, if it ends before that."""
        try:
            try:
                self._own.start()
            finally:
                self._said.started()
        except EndedEarly as error:
            said = self._said.why()
            raise BackendFailed(f"{error}{f': {said}' if said else ''}") from error

    def stop(self) -> None:
        """Ask it to end, which saves what it has, and wait for that; calling twice is safe."""
        self._own.stop()

    def problem(self) -> str | None:
        """Return how it ended; None while it runs."""
        refusal = self._own.refusal()
        return None if refusal is None else str(refusal)
