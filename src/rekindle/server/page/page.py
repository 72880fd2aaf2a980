"""Serves the files of the page at `/` from this package, with headers that restrict the browser.

They need no key: the page itself asks for one if it is needed. A browser loads scripts, styles and data from this
server only, runs no text as HTML or script, and does not show the page in a foreign frame.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.errors import NotFound
from rekindle.server.border import Router
from rekindle.server.models import ServedModel
from rekindle.server.observers.history import History
from rekindle.server.page.overview import overview_router

INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # revalidated each time, sent again only if it changed
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file as it is sent; `tag` identifies its content."""

    content: bytes
    kind: str
    tag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser already has it."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "Content-Type": self.kind})


def page_router(engine: Engine, model: ServedModel, history: History) -> APIRouter:
    """The page, its files, and the one route that serves it data."""
    router = Router()
    found = _files()

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return found[INDEX].response(request)

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in found:
            raise NotFound(f"the page has no file {name!r}", param="name")
        return found[name].response(request)

    router.include_router(overview_router(engine, model, history))
    return router


def _files() -> dict[str, _File]:
    """All files of the page by name: some 80 KB, read once."""
    found = {}
    for entry in (files("rekindle.server.page") / "static").iterdir():
        kind = TYPES.get(PurePath(entry.name).suffix)
        if kind is not None:
            content = entry.read_bytes()
            found[entry.name] = _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:24]}"')
    return found
