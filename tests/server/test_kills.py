"""Some SIGKILLs at random moments: the store opens, every record passes its check, every durable turn is warm.

The moments begin with the first durable turn, however long that takes here. The server runs in a forked process whose
imports are done already, so that each takes some seconds. `SERVER_KILLS=100` makes it a hundred (`make torture`);
tests/store/test_killed.py kills processes that hold a store and no model, twenty times as fast.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.errors import RequestFailed
from rekindle.harness.client import Client, free_port
from rekindle.server.handover import Handover
from rekindle.server.listening import open_listeners
from rekindle.server.serve import run_server
from rekindle.spec import KVLayout
from rekindle.store.warm import WarmStore
from rekindle_pocket import conversations
from tests.forks import forking
from tests.proofs import proved

NUM_KILLS = int(os.environ.get("SERVER_KILLS", "5"))
NUM_AGENTS = 2
AFTER_S = 1.5  # the last of the random moments after the first durable turn
History = list[dict[str, str]]


def settings_of(store: Path, port: int) -> Settings:
    return Settings.load({"store": store, "port": port, "threads": 1, "hot_bytes": "32MiB"})


def serve(store: Path, port: int) -> None:
    settings = settings_of(store, port)
    listeners = open_listeners(settings.server)
    with proved(Engine(settings)) as engine:
        run_server(engine, settings, lambda banner: None, handover=Handover(listeners))


def talk(client: Client, agent: str, seed: int, durable: dict[str, History], first: threading.Event) -> None:
    """Turn after turn until the server is gone; a prompt is durable once its agent's tokens are all saved."""
    r = random.Random(seed)
    said: History = [{"role": "system", "content": conversations.story(random.Random(0), 30)}]
    memory = conversations.Memory("Nadia", "archivist")
    try:
        while True:
            said.append({"role": "user", "content": f"Remember that {conversations.fact(r, memory)[1]}."})
            reply = client.chat(said, agent=agent, max_tokens=12)
            while (info := client.json("GET", f"/v1/agents/{agent}"))["saved_tokens"] < info["num_tokens"]:
                time.sleep(0.001)
            durable[agent] = [*said]
            first.set()
            said.append({"role": "assistant", "content": reply.text})
    except RequestFailed:
        return


def kill_while_talking(store: Path, number: int, moment_s: float) -> dict[str, History]:
    """Serve until a turn is durable and a moment more, SIGKILL; the prompts that were durable by then."""
    port, durable, first = free_port(), dict[str, History](), threading.Event()
    context = forking()
    process = context.Process(target=serve, args=(store, port), daemon=True)
    process.start()
    client = Client(port)
    while process.is_alive():
        try:
            client.json("GET", "/health/ready")
            break
        except RequestFailed:
            time.sleep(0.02)
    assert process.is_alive(), "the server did not start"
    names = [f"agent-{number}-{index}" for index in range(NUM_AGENTS)]
    threads = [
        threading.Thread(target=talk, args=(client, name, seed, durable, first))
        for seed, name in enumerate(names, number * 100)
    ]
    for thread in threads:
        thread.start()
    assert first.wait(300), "no turn became durable"
    time.sleep(moment_s)
    process.kill()
    process.join()
    for thread in threads:
        thread.join()
    return durable


def check_records(directory: Path, layout: KVLayout) -> None:
    """Open what the kill left and read every record of it."""
    (index,) = directory.glob("*/index.db")
    fingerprint = bytes.fromhex(index.parent.name)
    settings = settings_of(directory, 0).store
    store = WarmStore.open(directory, fingerprint=fingerprint, layout=layout, settings=settings)
    try:
        store.start()
        store.check("records")
        assert store.stats().num_blocks > 0
    finally:
        store.close()


@pytest.mark.timeout(180 * NUM_KILLS)
def test_every_durable_turn_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    r, num_durable = random.Random(5), 0
    with Engine(Settings.load({"store": "off", "threads": 1, "hot_bytes": "32MiB"})) as engine:
        layout = engine.spec.layout
    for number in range(NUM_KILLS):
        durable = kill_while_talking(tmp_path, number, r.uniform(0.0, AFTER_S))
        assert durable
        num_durable += len(durable)
        check_records(tmp_path, layout)
        with proved(Engine(settings_of(tmp_path, 0))) as engine:
            engine.check()
            for agent, said in durable.items():
                report = engine.chat(agent, said, max_tokens=1, temperature=0).report
                assert report.outcome == "exact", (number, agent, report)
                assert report.reused_tokens == report.prompt_tokens - 1
                assert report.warm_tokens > 0
            engine.check()
    with capsys.disabled():
        print(f"\n{NUM_KILLS} servers killed; {num_durable} durable conversations were warm after it")
