"""Errors for requests that miss a route: which one was meant, or that this server has nothing of the kind.

Most are sent by clients with a wrong base URL: OpenAI's end in /v1, Anthropic's and Ollama's do not, and that is easily
mistaken.
"""

from __future__ import annotations

import re

OPENAI = ("chat/completions", "completions", "responses", "models", "embeddings")
ANTHROPIC = ("messages", "messages/count_tokens")
OLLAMA = ("chat", "generate", "tags", "show", "ps", "version")
# Ollama's routes that manage models, and what to do instead.
UNMANAGED = {
    "pull": "no model can be fetched while the server runs: start it with rekindle serve NAME",
    "push": "models are not published from here: use the hub's own tools",
    "create": "no model is made from another: start the server with the one to serve, and send options with requests",
    "copy": "models have no copies here: --served-model-name gives the model another name",
    "delete": "models are files that the server does not own: delete them on disk while it is stopped",
    "blobs": "no files are taken: start the server with the model to serve",
}
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
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_OLLAMA_PATH = re.compile(rf"/api/(?:(?:{'|'.join((*OLLAMA, *UNMANAGED, 'embed', 'embeddings'))})|blobs/.*)")
_OLLAMA_ASTRAY = re.compile(rf"(?:/[\w.-]+)?/api/({'|'.join(OLLAMA)})/?")


def is_ollama(path: str) -> bool:
    """Whether a path is one of Ollama's, or nearly."""
    return any(form.fullmatch(path) for form in (_OLLAMA_PATH, _OLLAMA_ASTRAY))


def meant(path: str) -> str | None:
    """Return what to do about a path that no route has; None if nothing like it is served."""
    astray = _OLLAMA_ASTRAY.fullmatch(path)
    if astray is not None:
        right = f"/api/{astray[1]}"
        return f"there is no route {path[:100]}, but {right}: the base URL of this client is the server's address alone"
    route = path.strip("/")
    route = _LEAD.sub("", route, count=1) if _LEAD.match(route) else route
    if route not in (*OPENAI, *ANTHROPIC) or path == f"/v1/{route}":
        return None
    base = "the server's address, without /v1" if route in ANTHROPIC else "the server's address with /v1 at its end"
    return f"there is no route {path[:100]}, but /v1/{route}: the base URL of this client is {base}"
