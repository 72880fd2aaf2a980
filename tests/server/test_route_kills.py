"""A SIGKILL right after the last byte of an answer: what the answer said is so when the next server asks the disk.

Every route that changes something, over HTTP, on one store: a server is started, asked whether the changes before it
are there, prepared for the next ones, asked for those and killed as soon as the last answer has been read.
`ROUTE_KILLS` says how often for each route (`make torture`): then each change is the last one before a kill of its own.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.server.handover import Handover
from rekindle.server.listening import open_listeners
from rekindle.server.serve import run_server
from tests.forks import forking
from tests.proofs import proved
from tests.tiny_models import tiny_model_dir

NUM_KILLS = int(os.environ.get("ROUTE_KILLS", "1"))
TOGETHER = 1 if "ROUTE_KILLS" in os.environ else 5  # changes that one server answers; a start takes longer than five
SESSIONS = "/v1/coordination/sessions"
WORDS = "The vault of {} opens at nine with the word marigold, and nobody else may know of it."
RUN = 4  # tokens, of which some run stands within one block
SHORT = {"max_tokens": 3, "temperature": 0}
PLAN = {"agents": [{"name": name} for name in ("Ada", "Bo")], "setting": "A short talk.", "sampling": SHORT}


def settings_of(model: Path, store: Path) -> Settings:
    flags = {"model": model, "store": store, "port": 0, "threads": 1, "hot_bytes": "8MiB", "block_tokens": 16}
    return Settings.load({**flags, "anticipate": "off"})


def serve(model: Path, store: Path, pipe: Connection) -> None:
    """What the process does until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = settings_of(model, store)
    listeners = open_listeners(settings.server)
    port = listeners[0].getsockname()[1]
    with proved(Engine(settings)) as engine:
        run_server(engine, settings, lambda banner: pipe.send(port), handover=Handover(listeners))


@dataclass(frozen=True)
class Client:
    """Requests to one server, each over a connection of its own."""

    port: int

    def send(self, method: str, path: str, body: Any = None, *, agent: str | None = None) -> tuple[int, bytes]:
        """Status and body, once the last byte of that has been read."""
        headers = {"X-Agent-ID": agent} if agent else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ask(self, method: str, path: str, body: Any = None, *, agent: str | None = None) -> Any:
        """The JSON of an answer that is 200."""
        status, raw = self.send(method, path, body, agent=agent)
        assert status == 200, (method, path, status, raw)
        return json.loads(raw)

    def is_gone(self, path: str) -> bool:
        return self.send("GET", path)[0] == 404


@contextmanager
def running(model: Path, store: Path) -> Iterator[Client]:
    """A server in a process of its own, killed when this is left."""
    context = forking()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(model, store, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Client(ours.recv())
    finally:
        process.kill()
        process.join()
        ours.close()
    assert process.exitcode == -signal.SIGKILL


def spoken(client: Client, name: str, turns: int = 1) -> Any:
    """An agent that has answered so many turns, all of them on disk; how it stands."""
    said: list[dict[str, str]] = []
    for _ in range(turns):
        said.append({"role": "user", "content": WORDS.format(name)})
        reply = client.ask("POST", "/v1/chat/completions", {"messages": said, **SHORT}, agent=name)
        said.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    return client.ask("POST", f"/v1/agents/{name}/offload")


def pinned(client: Client, name: str) -> Any:
    spoken(client, name)
    return client.ask("POST", f"/v1/agents/{name}/pin")


def responded(client: Client, name: str) -> Any:
    return client.ask("POST", "/v1/responses", {"input": WORDS.format(name), "max_output_tokens": 3}, agent=name)


def secret_of(client: Client, name: str) -> Any:
    """An agent with a response, and how its words are spelled in files: runs of token ids, its id, the response's."""
    spoken(client, name)
    ids = np.array(client.ask("POST", "/v1/tokenize", {"text": name})["ids"], dtype="<u4")
    runs = [ids[at : at + RUN].tobytes() for at in range(len(ids) - RUN + 1)]
    return [each.hex() for each in (name.encode(), responded(client, name)["id"].encode(), *runs)]


def begun(client: Client, name: str) -> Any:
    """The path of a session in which each agent has spoken."""
    path = f"{SESSIONS}/{client.ask('POST', SESSIONS, PLAN)['id']}"
    client.ask("POST", f"{path}/round")
    return path


def texts(client: Client, path: str, hears: str) -> list[str]:
    """What was said in a session, as far as it reached one."""
    return [each["text"] for each in client.ask("GET", f"{path}/messages?hears={hears}")["data"]]


@dataclass(frozen=True)
class Route:
    """`prepare` before the change, `change` with what that gave, and whether it is there with what it answered."""

    prepare: Callable[[Client, str], Any]
    change: Callable[[Client, str, Any], Any]
    holds: Callable[[Client, str, Any, Any], bool]


def agent_route(
    prepare: Callable[[Client, str], Any], method: str, action: str, body: Any, holds: Callable[..., bool]
) -> Route:
    def change(client: Client, name: str, _: Any) -> Any:
        sent = {"target": f"{name}-twin"} if action == "/fork" else body
        return client.ask(method, f"/v1/agents/{name}{action}", sent)

    return Route(prepare, change, holds)


def shown(client: Client, name: str) -> Any:
    return client.ask("GET", f"/v1/agents/{name}")


def forked(client: Client, name: str, before: Any, answer: Any) -> bool:
    twin = shown(client, f"{name}-twin")
    return bool(twin["saved_tokens"] == twin["num_tokens"] == before["num_tokens"] == shown(client, name)["num_tokens"])


def rewound(client: Client, name: str, before: Any, answer: Any) -> bool:
    """A reply that is tokenised anew may differ from the one that was generated: then each turn is a branch."""
    lengths = [branch["num_tokens"] for branch in shown(client, name)["branch_infos"]]
    return (
        len(lengths) == before["branches"] and answer["num_tokens"] in lengths and before["num_tokens"] not in lengths
    )


def purged(client: Client, name: str, traces: list[str], answer: Any) -> bool:
    return answer["purged"] and client.is_gone(f"/v1/agents/{name}")


def continued(client: Client, name: str, before: Any, answer: Any) -> bool:
    assert answer["store"] is True, answer
    found = client.ask("GET", f"/v1/responses/{answer['id']}")
    more = {"input": "And then?", "previous_response_id": answer["id"], "max_output_tokens": 2}
    after = client.ask("POST", "/v1/responses", more, agent=name)
    return bool(found == answer and after["previous_response_id"] == answer["id"])


def streamed(client: Client, name: str, _: Any) -> Any:
    body = {"input": WORDS.format(name), "max_output_tokens": 3, "stream": True}
    status, raw = client.send("POST", "/v1/responses", body, agent=name)
    assert status == 200, raw
    return json.loads(raw.decode().strip().rpartition("data: ")[2])["response"]


def session_route(method: str, action: str, body: Any, holds: Callable[[Client, str, Any], bool]) -> Route:
    return Route(
        begun,
        lambda client, _, path: client.ask(method, f"{path}{action}", body),
        lambda client, _, path, answer: holds(client, path, answer),
    )


def heard_by(*names: str) -> Callable[[Client, str, Any], bool]:
    """Whether those and no others have heard what was put in."""

    def holds(client: Client, path: str, answer: Any) -> bool:
        return [name for name in ("Ada", "Bo") if answer["text"] in texts(client, path, name)] == list(names)

    return holds


def ada_tokens(client: Client, path: str) -> int:
    """How long the context of Ada is."""
    return int(client.ask("GET", f"{path}/compare?agents=Ada,Bo")["num_tokens"]["Ada"])


def context_route(action: str, body: Any) -> Route:
    """What is done to the context of Ada, which is longer or shorter after it; Bo was told something alone."""

    def prepare(client: Client, name: str) -> tuple[str, int]:
        path = begun(client, name)
        client.ask("POST", f"{path}/whisper", {"text": "Only you know.", "to": ["Bo"]})
        return path, ada_tokens(client, path)

    return Route(
        prepare,
        lambda client, _, before: client.ask("POST", f"{before[0]}/agents/Ada/{action}", body),
        lambda client, _, before, answer: ada_tokens(client, before[0]) != before[1],
    )


def joined(client: Client, path: str, answer: Any) -> bool:
    """Whether Cy takes part, with as much KV on disk as it was forked with."""
    names = [each["name"] for each in client.ask("GET", path)["agents"]]
    twin = shown(client, f"{answer['id']}%2FCy")
    return names == ["Ada", "Bo", "Cy"] and bool(twin["saved_tokens"] == twin["num_tokens"] > 0)


def tallied(client: Client, path: str, answer: Any) -> bool:
    decisions = client.ask("GET", path)["decisions"]
    return len(decisions) == 1 and decisions[0] == answer["decision"]


ROUTES = {
    "offload": Route(
        lambda c, n: None,
        lambda c, n, _: spoken(c, n),
        lambda c, n, b, a: shown(c, n)["saved_tokens"] == a["num_tokens"],
    ),
    "pin": agent_route(spoken, "POST", "/pin", {"ttl_s": 5000.0}, lambda c, n, b, a: shown(c, n)["pinned"]),
    "unpin": agent_route(pinned, "DELETE", "/pin", None, lambda c, n, b, a: not shown(c, n)["pinned"]),
    "fork": agent_route(spoken, "POST", "/fork", None, forked),
    "rewind": agent_route(lambda c, n: spoken(c, n, 2), "POST", "/rewind", {"turns": 1}, rewound),
    "delete": agent_route(spoken, "DELETE", "", None, lambda c, n, b, a: c.is_gone(f"/v1/agents/{n}")),
    "purge": agent_route(secret_of, "POST", "/purge", None, purged),
    "responses": Route(lambda c, n: None, lambda c, n, _: responded(c, n), continued),
    "responses-stream": Route(lambda c, n: None, streamed, continued),
    "responses-delete": Route(
        responded,
        lambda c, n, b: c.ask("DELETE", f"/v1/responses/{b['id']}"),
        lambda c, n, b, a: c.is_gone(f"/v1/responses/{b['id']}"),
    ),
    "session": Route(
        lambda c, n: None,
        lambda c, n, _: c.ask("POST", SESSIONS, PLAN),
        lambda c, n, b, a: c.ask("GET", f"{SESSIONS}/{a['id']}")["id"] == a["id"],
    ),
    "turn": session_route("POST", "/turn", None, lambda c, p, a: c.ask("GET", p)["num_turns"] == 3),
    "messages": session_route("POST", "/messages", {"text": "Everybody, listen."}, heard_by("Ada", "Bo")),
    "whisper": session_route("POST", "/whisper", {"text": "Only you.", "to": ["Ada"]}, heard_by("Ada")),
    "interrupt": session_route("POST", "/interrupt", {"text": "Stop it.", "stop": "round"}, heard_by("Ada", "Bo")),
    "vote": session_route("POST", "/vote", {"question": "Shall we go?", "options": ["yes", "no"]}, tallied),
    "session-fork": session_route("POST", "/agents/Ada/fork", {"target": "Cy"}, joined),
    "session-rewind": context_route("rewind", {"turns": 1}),
    "merge": context_route("merge", {"source": "Bo"}),
    "session-delete": session_route("DELETE", "", None, lambda c, p, a: c.is_gone(p)),
}


def find_nothing(store: Path, traces: list[str]) -> None:
    """No file of the store holds any of these bytes."""
    found = found_in(store, traces)
    assert not found, f"{[bytes.fromhex(trace) for trace in found]} of a purged agent are left"


def found_in(store: Path, traces: list[str]) -> set[str]:
    contents = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    return {trace for trace in traces if any(bytes.fromhex(trace) in content for content in contents)}


@dataclass(frozen=True)
class Change:
    """One that a server is prepared for, and then answers."""

    route: str
    name: str
    before: Any

    def made(self, client: Client) -> tuple[str, Callable[[Client], bool]]:
        """Its name, and whether a later server has it."""
        answer, holds = ROUTES[self.route].change(client, self.name, self.before), ROUTES[self.route].holds
        return self.name, lambda later: holds(later, self.name, self.before, answer)


def prepared(client: Client, route: str, number: int, store: Path) -> Change:
    name = f"{route}-{number}"
    before = ROUTES[route].prepare(client, name)
    assert route != "purge" or len(found_in(store, before)) > 2, "nothing to be found at all"
    return Change(route, name, before)


@pytest.mark.timeout(120 + 30 * NUM_KILLS * len(ROUTES))
def test_what_was_answered_is_there_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, store = tiny_model_dir("llama", "fp32", tmp_path / "model"), tmp_path / "store"
    store.mkdir()
    routes = list(ROUTES)
    groups = [routes[at : at + TOGETHER] for at in range(0, len(routes), TOGETHER)] * NUM_KILLS
    counts: Counter[str] = Counter()
    due: list[tuple[str, Callable[[Client], bool]]] = []
    for group in [*groups, []]:
        with running(model, store) as client:
            assert [name for name, holds in due if not holds(client)] == [], "what was answered is not there"
            changes = [prepared(client, route, counts[route], store) for route in group]
            due = [each.made(client) for each in changes]
        counts.update(group)
        for each in changes:
            if each.route == "purge":
                find_nothing(store, each.before)
    with proved(Engine(settings_of(model, store))) as engine:
        engine.check()
    with capsys.disabled():
        print(f"\n{len(groups)} servers killed right after an answer; of each route {min(counts.values())} answers")
