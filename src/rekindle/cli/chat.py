"""A terminal chat with an engine in this process."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from rekindle.engine.api import Engine


def chat_loop(engine: Engine, agent: str, console: Console) -> None:
    """Read lines, stream replies and print what each reused, until /quit or the end of input."""
    messages: list[dict[str, Any]] = []
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
        reply = []
        console.print("[bold]model[/] ", end="")
        for delta in engine.stream(agent, messages, **engine.sampling.named("llama-server")):
            console.print(delta.text, end="", markup=False, highlight=False)
            reply.append(delta.text)
            if delta.finish_reason is not None and delta.report is not None:
                report = delta.report
                console.print(f"\n[dim]{report.outcome}, {report.reused_tokens} of {report.prompt_tokens} reused[/]")
        messages.append({"role": "assistant", "content": "".join(reply)})
