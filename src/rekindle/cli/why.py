"""why: an agent's last requests: what each reused, where its prompt first differed, and advice."""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from rekindle.cli.console import show_ago, show_id
from rekindle.cli.remote import Remote, agent_path
from rekindle.cli.settings import with_settings
from rekindle.config import Settings
from rekindle.errors import NotFound
from rekindle.server.answers.advice import advice_for

UrlOption = Annotated[str | None, typer.Option("--url", help="the server [http://HOST:PORT of the settings]")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
AgentArgument = Annotated[str, typer.Argument(metavar="AGENT", help="its id")]
NORMALISED = {
    "attribution": "left out the attribution line",
    "dates": "left out a line with date or time",
    "tools": "put the tools in order",
    "compaction": "kept as it was before a summary",
    "tail": "moved to the first user message: the changing end",
}


@with_settings(only=())
def why(settings: Settings, agent: AgentArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Show what an agent's last requests reused, and why not more; exit code 2 if there is no such agent."""
    remote = Remote.of(settings.server, url)
    answer = ask_of_agent(remote, "GET", agent, "why")
    if as_json:
        typer.echo(json.dumps(answer))
        return 0
    requests = answer["data"]
    if not requests:
        typer.echo(f"{show_id(agent)} has sent no request since the server started")
    for number, request in enumerate(requests):
        typer.echo(("\n" if number else "") + "\n".join(request_lines(request, time.time())))
    for problem in answer.get("problems", ()):
        typer.echo(f"\nthe server says: {problem}")
    return 0


def ask_of_agent(
    remote: Remote, method: str, agent: str, *rest: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Send a request about one agent and return the answer; NotFound suggests similar ids."""
    try:
        answer: dict[str, Any] = remote.ask(method, agent_path(agent, *rest), body)
    except NotFound:
        known = [info["id"] for info in remote.ask("GET", "/v1/agents")["data"]]
        raise NotFound(f"{remote.url} knows no agent {show_id(agent)!r}; {near(agent, known)}") from None
    return answer


def near(agent: str, known: list[str]) -> str:
    """Suggest similar ids, or say how many agents there are."""
    found = (
        difflib.get_close_matches(agent, known, n=3) or [each for each in known if agent.lower() in each.lower()][:3]
    )
    if found:
        return f"did you mean {' or '.join(map(show_id, found))}?"
    return f"there are {len(known):,}: rekindle agents lists them" if known else "there is no agent yet"


def request_lines(request: Mapping[str, Any], now: float) -> Iterator[str]:
    """The lines about one request."""
    moment = time.strftime("%H:%M:%S", time.localtime(request["at"]))
    head = f"{moment} ({show_ago(request['at'], now)})"
    if request["error"] is not None:
        yield f"{head}  failed with {request['error']['status']}: {request['error']['message']}"
        return
    yield f"{head}  {request['outcome']}{_ending(request)}"
    yield f"  reused {request['reused_tokens']:,} of {request['prompt_tokens']:,} tokens{_tiers(request)}"
    yield f"  computed {request['computed_tokens']:,}, answered {request['completion_tokens']:,}"
    if "first_token_ms" in request["timings"]:
        yield f"  {_timings(request['timings'])}"
    yield from map(_normalised, request.get("normalised", ()))
    for each in request.get("left_out", ()):
        times = f" and {each['count'] - 1:,} more of the kind" if each["count"] > 1 else ""
        line = f", in its place {_shown(each['text'])}" if each["text"] else ""
        yield f"  not shown: {each['kind']} at {each['param']}{times}{line}"
    if request.get("ignored"):
        yield f"  ignored, as nothing here knows them: {_shown(', '.join(request['ignored']))}"
    if request.get("generic_tools"):
        yield "  the model's template has no tools: they were described in the prompt, in a form that is Rekindle's own"
    if request["reuse"] == "off":
        yield "  reuse was off, as the request specified"
    elif request["explanation"] is not None:
        yield from _explained(request["explanation"])


def _ending(request: Mapping[str, Any]) -> str:
    return ", cancelled" if request["finish_reason"] == "cancelled" else ""


def _tiers(request: Mapping[str, Any]) -> str:
    if not request["reused_tokens"]:
        return ""
    whose = {"shared": ", of other agents", "parent": ", of its parent"}.get(request["source"], "")
    return f": {request['hot_tokens']:,} hot, {request['warm_tokens']:,} warm{whose}"


def _timings(timings: Mapping[str, float]) -> str:
    parts = [f"{name} {timings[f'{name}_ms']:,.0f}" for name in ("queue", "match", "load", "prefill")]
    return f"first token after {timings['first_token_ms']:,.0f} ms: {', '.join(parts)}"


def _normalised(item: Mapping[str, Any]) -> str:
    index = item["message_index"]
    done = NORMALISED.get(item["kind"], item["kind"])
    cost = f"as sent it would have cost {item['tokens']:,} tokens" if item["tokens"] else "this time it cost nothing"
    return f"  {done}{'' if index is None else f' of message {index}'}: {_shown(item['text'])} ({cost})"


def _explained(explanation: Mapping[str, Any]) -> Iterator[str]:
    if explanation["stored"] is not None or explanation["sent"] is not None:
        index = explanation["message_index"]
        yield f"  first difference {'outside all messages' if index is None else f'in message {index}'}:"
        stored, sent = marked(explanation["stored"] or "", explanation["sent"] or "")
        if explanation["stored"] is not None:
            yield f"    stored  {stored}"
        yield f"    sent    {sent}"
    yield f"  likely cause: {explanation['detail']}"
    yield f"  what to do: {advice_for(explanation)}"


def marked(stored: str, sent: str) -> tuple[str, str]:
    """Both texts on one line each, with the first difference in [[ ]]."""
    one, other = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (stored, sent))
    opcodes = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    for kind, begin, end, other_begin, other_end in opcodes:
        if kind != "equal" and stored and sent:
            return _mark(one, begin, end), _mark(other, other_begin, other_end)
    return _shown(stored), _shown(sent)


def _mark(words: Sequence[str], begin: int, end: int) -> str:
    return _shown(f"{''.join(words[:begin])}[[{''.join(words[begin:end])}]]{''.join(words[end:])}")


def _shown(text: str) -> str:
    return show_id(text.replace("\n", "⏎"))
