"""What the clients of other servers say of their sessions: a name, a priority, the next prompt, the end.

Owns the names of these fields and what each of them does here; docs/clients.md has the table. The fields are the same
in every dialect: they are taken out of a body before it is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.answers.validation import StrictModel, validated
from rekindle.server.gate.caller import NO_HINTS, Caller, Hints, named_in_body
from rekindle.text.omissions import MOST_NAMED, Omissions

FINAL = "x-dynamo-session-final"
MOST_PRIORITY = 100  # seconds: a request waits at most so much longer for others of its namespace
_ACTION, _AHEAD = "nvext.session_control.action", "nvext.agent_hints.speculative_prefill"
# Of `nvext`: a reply without them would be another than the one that was asked for.
_CHANGES_REPLIES, _MOST_THINKING = ("greed_sampling", "use_raw_prompt", "token_data"), "max_thinking_tokens"


class AgentHints(StrictModel):
    """Dynamo's hints for one request; a higher priority is earlier."""

    priority: int | None = Field(
        default=None, ge=-(1 << 31), le=(1 << 31) - 1, description="seconds by which it counts as older in the queue"
    )
    speculative_prefill: bool | None = Field(default=None, description="false: no next prompt is computed ahead")


class SessionControl(StrictModel):
    """Dynamo's life of a session, which here begins with its first request."""

    session_id: str | None = Field(default=None, description="names the agent, if no header does")
    action: Literal["open", "bind", "close"] | None = Field(default=None, description="close: with the last request")


class Nvext(StrictModel):
    """Dynamo's object of extensions, as far as it is known here."""

    agent_hints: AgentHints | None = None
    session_control: SessionControl | None = None


_PARTS: Mapping[str, type[BaseModel]] = {"agent_hints": AgentHints, "session_control": SessionControl}


class HintFields(StrictModel):
    """The fields of a body that are hints: vLLM's and OpenRouter's name of a session, and Dynamo's object."""

    session_id: str | None = Field(default=None, description="names the agent, if no header does")
    nvext: Nvext | None = Field(default=None, description="hints of Dynamo's clients")


def hinted(caller: Caller, headers: Headers, body: Any) -> tuple[Caller, Any]:
    """Return the caller with what the request says of its session, and the body without it.

    Headers that name an agent come before names in the body. BadRequest names what has a wrong type.
    """
    given = {name: body[name] for name in HintFields.model_fields if name in body} if isinstance(body, dict) else {}
    is_final = _is_final(headers)
    if not given and not is_final:
        return caller, body
    if isinstance(given.get("nvext"), dict):
        given["nvext"] = {name: _bounded(name, value) for name, value in given["nvext"].items()}
    omissions = Omissions()
    asked = validated(HintFields, given, omissions=omissions, harmless=(), neutral={})
    _check_replies(given.get("nvext"))
    nvext = asked.nvext or Nvext()
    hints, control = nvext.agent_hints or AgentHints(), nvext.session_control or SessionControl()
    if caller.agent is None:
        names = {"nvext.session_control.session_id": control.session_id, "session_id": asked.session_id}
        named = (named_in_body(name, where, headers) for where, name in names.items() if name)
        caller = replace(next(named, caller), namespace=caller.namespace)
    found = Hints(
        priority=max(-MOST_PRIORITY, min(hints.priority or 0, MOST_PRIORITY)),
        anticipates=hints.speculative_prefill,
        ends_by=FINAL if is_final else _ACTION if control.action == "close" else None,
        ignored=omissions.all().ignored,
    )
    rest = {name: value for name, value in body.items() if name not in given} if given else body
    return replace(caller, hints=found), rest


def _bounded(name: str, value: Any) -> Any:
    """Return a part of Dynamo's object with no more unknown keys than an answer names."""
    known = _PARTS[name].model_fields if name in _PARTS else None
    if known is None or not isinstance(value, dict):
        return value
    named = islice((key for key in value if key not in known), MOST_NAMED)
    kept = {*known, *named}
    return {key: item for key, item in value.items() if key in kept}


def applied(request: GenerationRequest, hints: Hints, engine: Engine, *, strict: bool) -> GenerationRequest:
    """Return the request with its caller's hints; those without effect are named in its report, or refused."""
    if hints == NO_HINTS:
        return request
    omissions = Omissions(strict=strict)
    for name in (*hints.ignored, *_unserved(request, hints, engine)):
        omissions.parameter(name)
    ignored = dict.fromkeys((*request.omitted.ignored, *omissions.all().ignored))
    return replace(
        request,
        priority=hints.priority,
        anticipates=hints.anticipates is not False,
        omitted=replace(request.omitted, ignored=tuple(ignored)),
    )


def _unserved(request: GenerationRequest, hints: Hints, engine: Engine) -> list[str]:
    """Return the hints that would have an effect on another server, or under other settings, and have none here."""
    settings, names = engine.settings, list[str]()
    if hints.anticipates and (settings.prompt.anticipate == "off" or settings.backend.address is not None):
        names.append(_AHEAD)
    if hints.ends_by is not None and (request.agent is None or not engine.has_kv):
        names.append(hints.ends_by)
    return names


def _is_final(headers: Headers) -> bool:
    said = headers.get(FINAL, "").lower()
    if said not in ("", "true", "false"):
        raise BadRequest(f"{FINAL}: say true with the last request of a session, false or nothing before", param=FINAL)
    return said == "true"


def _check_replies(nvext: Any) -> None:
    """Refuse extensions that change replies, which are not implemented."""
    given = nvext if isinstance(nvext, Mapping) else {}
    asked = [name for name in _CHANGES_REPLIES if given.get(name)]
    asked += [_MOST_THINKING] if given.get(_MOST_THINKING) is not None else []  # 0: no thinking at all
    if asked:
        name = f"nvext.{asked[0]}"
        raise BadRequest(f"{name} would change the reply and is not supported here: leave it out", param=name)
