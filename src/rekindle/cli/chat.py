"""A terminal chat with one agent: of an engine in this process, or of a running server.

Owns the conversation and how it is shown. What replies are read from is a `Talker`; both give the same pieces, so that
a reply looks alike wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.markup import escape

from rekindle.errors import RequestFailed

if TYPE_CHECKING:
    from rekindle.cli.remote import Remote
    from rekindle.engine.api import Engine

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a reply; `is_thought`: it is reasoning. The last one has the `report` of what was reused."""

    text: str
    is_thought: bool = False
    report: Mapping[str, Any] | None = None


class Talker(Protocol):
    """A model, and the agent that remembers what is said to it."""

    @property
    def about(self) -> str:
        """The model's name, and where it runs if that is not here."""
        ...

    def reply(self, messages: Messages) -> Iterator[Piece]:
        """Yield the reply to a conversation as it is computed."""
        ...


@dataclass(frozen=True, slots=True)
class EngineTalker:
    """An agent of an engine in this process."""

    engine: Engine
    agent: str

    @property
    def about(self) -> str:
        """The model's name."""
        return self.engine.spec.name

    def reply(self, messages: Messages) -> Iterator[Piece]:
        """Yield the engine's deltas; the text of a model that reasons is as the model wrote it."""
        for delta in self.engine.stream(self.agent, messages, **self.engine.sampling.named("llama-server")):
            is_last = delta.finish_reason is not None and delta.report is not None
            report = delta.report.as_dict() if delta.report is not None and is_last else None
            yield Piece(delta.text, report=report)


@dataclass(frozen=True, slots=True)
class RemoteTalker:
    """An agent of a running server. `model` is its entry of /v1/models."""

    server: Remote
    model: Mapping[str, Any]
    agent: str

    @property
    def about(self) -> str:
        """The model's name and the server's address."""
        return f"{self.model['id']} on {self.server.url}"

    def reply(self, messages: Messages) -> Iterator[Piece]:
        """Yield the server's chunks; RequestFailed if the reply breaks off."""
        from urllib.parse import quote

        sampling = self.model["rekindle"].get("sampling", {})  # known of one of several models once it was loaded
        body = {"model": self.model["id"], "messages": messages, "stream": True, **sampling}
        headers = {"X-Agent-ID": quote(self.agent, safe="")}
        with self.server.streaming("/v1/chat/completions", body, headers) as events:
            for _, chunk in events:
                if chunk is not None:
                    yield from _pieces(chunk)


def _pieces(chunk: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of a chunk of a streamed chat completion."""
    if "error" in chunk:
        raise RequestFailed(chunk["error"]["message"])
    for choice in chunk["choices"]:
        yield Piece(choice["delta"].get("reasoning_content") or "", is_thought=True)
        yield Piece(choice["delta"].get("content") or "", report=chunk.get("rekindle"))


def chat_loop(talker: Talker, console: Console) -> None:
    """Read lines, stream replies and print what each reused, until /quit or the end of input."""
    messages: Messages = []
    console.print(f"[bold]{escape(talker.about)}[/] [dim](/quit ends the chat)[/]", highlight=False)
    while True:
        try:
            line = console.input("[bold]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        console.print("[bold]model[/] ", end="")
        messages.append(_shown(talker.reply(messages), console))


def _shown(pieces: Iterator[Piece], console: Console) -> dict[str, Any]:
    """Print a reply as it comes and what it reused; return it as a message."""
    said, report = {True: "", False: ""}, None
    for piece in pieces:
        style = "dim" if piece.is_thought else ""
        if piece.text:
            console.print(piece.text, end="", markup=False, highlight=False, style=style)
        said[piece.is_thought] += piece.text
        report = report if piece.report is None else piece.report
    if report is not None:
        note = f"{report['outcome']}, {report['reused_tokens']} of {report['prompt_tokens']} reused"
        console.print(f"\n[dim]{note}[/]")
    thought = {"reasoning_content": said[True]} if said[True] else {}
    return {"role": "assistant", "content": said[False], **thought}
