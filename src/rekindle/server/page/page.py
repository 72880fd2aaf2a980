"""Serves the files of the page at `/` from this package, with headers that restrict the browser.

They need no key: the page itself asks for one if it is needed. A browser loads scripts, styles and data from this
server only, runs no text as HTML or script, and does not show the page in a foreign frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from fastapi import APIRouter, Request
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.errors import NotFound
from rekindle.server.border import Router
from rekindle.server.extension import Extension
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


def page_router(
    engine: Engine, model: ServedModel, history: History, extensions: Sequence[Extension] = ()
) -> APIRouter:
    """The page with the views of extensions, its files, and the one route that serves it data."""
    router = Router()
    found = _files(extensions)

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


def _files(extensions: Sequence[Extension]) -> dict[str, _File]:
    """All files of the page by name: some 80 KB, read once."""
    parts = [(extension.name, extension.page) for extension in extensions if extension.page is not None]
    folders: list[Traversable] = [files("rekindle.server.page") / "static", *(folder for _, folder in parts)]
    entries = (entry for folder in folders for entry in folder.iterdir() if PurePath(entry.name).suffix in TYPES)
    content = {entry.name: entry.read_bytes() for entry in entries}
    content[INDEX] = _index(content[INDEX].decode(), {name: content.pop(f"{name}.html").decode() for name, _ in parts})
    return {
        name: _File(data, TYPES[PurePath(name).suffix], f'"{hashlib.sha256(data).hexdigest()[:24]}"')
        for name, data in content.items()
    }


def _index(index: str, views: Mapping[str, str]) -> bytes:
    """The page with a link and an element for each view, whose script has the view's name."""
    links = "".join(f'\n      <a href="#{name}" id="to-{name}">{name.capitalize()}</a>' for name in views)
    index = index.replace('data-views=""', f'data-views="{" ".join(views)}"')
    index = index.replace("\n      <!-- links -->", links)
    return index.replace("\n    <!-- views -->\n", "".join(views.values())).encode()
