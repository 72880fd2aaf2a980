"""Errors for requests that miss a route: which one was meant, or that this server has nothing of the kind.

Most are sent by clients with a wrong base URL: OpenAI's end in /v1, Anthropic's do not, and both are easy to mistake.
"""

from __future__ import annotations

import re

OPENAI = ("chat/completions", "completions", "responses", "models", "embeddings")
ANTHROPIC = ("messages", "messages/count_tokens")
_LEAD = re.compile(r"(?:(?:api|openai|anthropic|v1|v1beta|v2)/)+")
# What other servers do under these names, and a language model does not.
ELSEWHERE = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "ranks",
    "/v1/score": "scores of pairs",
    "/v1/moderations": "moderation",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/images/generations": "images",
}


def meant(path: str) -> str | None:
    """Return what to do about a path that no route has; None if nothing like it is served."""
    route = path.strip("/")
    route = _LEAD.sub("", route, count=1) if _LEAD.match(route) else route
    if route not in (*OPENAI, *ANTHROPIC) or path == f"/v1/{route}":
        return None
    base = "the server's address, without /v1" if route in ANTHROPIC else "the server's address with /v1 at its end"
    return f"there is no route {path[:100]}, but /v1/{route}: the base URL of this client is {base}"
