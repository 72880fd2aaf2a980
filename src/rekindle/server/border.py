"""The border of a route: bodies come in read strictly, and what its code raises that is no `Exception`, such as a panic
of a library, ends this request.

Without it such an error passes every handler of errors, and the client reads the plain text of the HTTP server; a
SystemExit from a worker thread would end the event loop.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from rekindle.server.errors import HttpError
from rekindle.server.json_body import StrictRequest
from rekindle.worker import MEANT_FOR_THE_LOOP, contained, failure_of

logger = logging.getLogger("rekindle.server")
P = ParamSpec("P")
T = TypeVar("T")


class Route(APIRoute):
    """A route whose errors all reach the handlers of errors."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if not inspect.iscoroutinefunction(endpoint):
            signature = inspect.signature(endpoint, eval_str=True)
            endpoint = contained(endpoint)
            endpoint.__dict__["__signature__"] = signature
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's, but for what is no Exception."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(StrictRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, HttpError):  # how FastAPI wraps what reading a body raised
                    raise error.__cause__ from None
                raise
            except (Exception, *MEANT_FOR_THE_LOOP):
                raise
            except BaseException as error:
                logger.exception("%s %s failed", request.method, request.url.path)
                raise failure_of(error) from error

        return answer


class Router(APIRouter):
    """A router of such routes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=Route, **options)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns or raises on a worker thread."""
    return await run_in_threadpool(contained(work), *args, **kwargs)
