"""HEAD requests: the head of what GET answers, on every route that has a GET.

Clients and load balancers ask with HEAD whether a server is there, and routes declare GET alone.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that runs a HEAD as a GET and drops the body of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a HEAD; pass everything else on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def receive_until_answered() -> Message:
            # A stream would never end: for it the client has left once the head is sent.
            return {"type": "http.disconnect"} if has_ended else await receive()

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                has_ended = True

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)
