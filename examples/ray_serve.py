"""Replicas of a server under Ray Serve: an agent's requests go to one of them, and its memory to all, by the tier.

    export REKINDLE_SECRET='the same text of 16 characters or more on every machine'
    export RAY_SERVE_SESSION_ID_HEADER_KEY=x-agent-id
    serve run ray_serve:build model=MODEL store=/data/kv tier=s3://bucket/prefix port=0

Arguments are settings of `rekindle serve`; REKINDLE_* variables count, too. See docs/fleet.md.
"""

import asyncio
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import ray
import uvicorn
from ray import serve

from rekindle import Engine
from rekindle.config import Settings
from rekindle.server.app import App, create_app
from rekindle.server.info import ADMIN
from rekindle.server.listening import open_listeners
from rekindle.server.observers.log import logging_to

CHECK_S = 5.0  # between health checks, with each of which a replica says where it listens


@serve.deployment(name="Replicas", ray_actor_options={"num_cpus": 0}, logging_config={"enable_access_log": False})
class Replicas:
    """Where each replica listens, as Prometheus discovers it over HTTP."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[float, dict[str, Any]]] = {}

    def heard(self, replica: str, target: dict[str, Any]) -> None:
        self._heard[replica] = time.monotonic(), target

    def targets(self) -> list[dict[str, Any]]:
        """Return those that were heard of lately."""
        return [target for at, target in self._heard.values() if time.monotonic() - at < 3 * CHECK_S]


@serve.deployment(
    name="Rekindle",
    autoscaling_config={"min_replicas": 2, "max_replicas": 8, "target_ongoing_requests": 8},
    max_ongoing_requests=64,
    request_router_config={
        "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    },
    health_check_period_s=CHECK_S,
    graceful_shutdown_timeout_s=60,
)
@serve.ingress()
class Rekindle:
    """One engine with its server, which answers what Ray routes to it, and on a port of its own."""

    def __init__(self, arguments: dict[str, Any], replicas: Any) -> None:
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        settings = Settings.load({"slot": "auto", "threads": max(1, int(cpus)), **arguments}, os.environ)
        self._replicas = replicas
        self._closing = ExitStack()
        self._closing.enter_context(logging_to(settings.server, sys.stderr))
        self._listeners = open_listeners(settings.server)
        self._engine = self._closing.enter_context(Engine(settings))
        self._app = create_app(self._engine, settings.server, model=settings.model.model)
        self._closing.callback(self._app.close)
        self._app.add_api_route("/fleet", self.fleet, dependencies=ADMIN, include_in_schema=False)
        host, port = self._listeners[0].getsockname()[:2]
        address = f"{ray.util.get_node_ip_address() if host == '0.0.0.0' else host}:{port}"
        self._target = {"targets": [address], "labels": {"slot": self._engine.settings.store.slot}}

    async def fleet(self) -> Any:
        """The address of every replica: its page is at /, its figures at /metrics."""
        return await self._replicas.targets.remote()

    async def __serve_build_asgi_app__(self) -> App:
        options: dict[str, Any] = {"lifespan": "off", "log_config": None, "access_log": False}  # Ray runs the lifespan
        self._own = uvicorn.Server(uvicorn.Config(self._app, timeout_graceful_shutdown=10, **options))
        self._serving = asyncio.create_task(self._own.serve(sockets=self._listeners))
        return self._app

    async def check_health(self) -> None:
        """Raise if a thread has died. A tier that does not answer is no reason to replace what is warm."""
        if deaths := self._engine.deaths():
            raise RuntimeError(str(deaths[0]))
        self._replicas.heard.remote(serve.get_replica_context().replica_tag, self._target)

    async def __del__(self) -> None:
        """Save everything; Ray calls this when the requests of a replica that stops have ended."""
        self._own.should_exit = True
        await self._serving
        self._closing.close()


def build(arguments: dict[str, Any]) -> Any:
    """Return the application, for `serve run` and `import_path`."""
    replica: Any = Rekindle  # deployments by now, which type checkers do not see
    replicas: Any = Replicas
    return replica.bind(arguments, replicas.bind())
