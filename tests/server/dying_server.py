"""A server whose threads end when they are named on its standard input; each is answered with a line."""

from __future__ import annotations

import sys
import threading

from rekindle import Engine
from rekindle.server.handover import Handover
from rekindle.server.listening import open_listeners
from rekindle.server.serve import run_server
from tests.engine.dying import died, poison
from tests.given import settings_of
from tests.proofs import proved


def end_threads(engine: Engine) -> None:
    """One a line."""
    for line in sys.stdin:
        print(died(poison(engine, line.strip())), flush=True)


def main() -> None:
    """Serve a model, the first argument, with a store, the second; the first line is the port."""
    flags = {"model": sys.argv[1], "store": sys.argv[2], "threads": 1, "hot_bytes": "64MiB", "readers": 1, "port": 0}
    settings = settings_of(**flags)
    listeners = open_listeners(settings.server)
    port = listeners[0].getsockname()[1]
    with proved(Engine(settings)) as engine:
        threading.Thread(target=end_threads, args=(engine,), daemon=True).start()

        def ready(banner: str) -> None:
            print(port, flush=True)

        run_server(engine, settings, ready, handover=Handover(listeners))
    print("closed", flush=True)


if __name__ == "__main__":
    main()
