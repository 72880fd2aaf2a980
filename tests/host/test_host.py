"""One server of several models, with a process for each: swaps, memory, keys, streams, and what is killed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from rekindle.config import ServerSettings
from rekindle.harness.client import ServerProcess
from tests.server.scripted import write_scripted_model
from tests.test_cli import run

FILE = """
max_loaded = 1
hot_bytes = "32MiB"
threads = 1
[api_keys]
team = "key-of-team"
[models.small]
model = "pocket"
[models.scripted]
model = "{scripted}"
[models.broken]
model = "{broken}"
"""
UNKNOWN = (
    ("GET", "/v1/responses/resp_x"),
    ("GET", "/v1/responses/resp_x/input_items"),
    ("DELETE", "/v1/responses/resp_x"),
    ("GET", "/v1/receipts/resp_x"),
)
WAIT_S = 120.0  # nothing here is timed; this bounds a failure
SAID = "talk about the copper key and the attic of the old house, and about who went there last"


class Host:
    """The server, and requests to it with a key."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{process.port}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, headers={"Authorization": "Bearer key"})

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.request(method, path, json=body, headers=named)

    def chat(self, model: str, agent: str = "ada", text: str = SAID) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4}
        answer = self.ask("POST", "/v1/chat/completions", body, x_agent_id=agent)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert found["model"] == model
        return found

    def loaded(self) -> list[str]:
        return [entry["name"] for entry in self.ask("GET", "/api/ps").json()["models"]]

    def now(self) -> str:
        """The model that is loaded, as a start takes six seconds of a core; "small" if none is."""
        for name in self.loaded():
            return name.removesuffix(":latest")
        self.chat("small")
        return "small"

    def child(self, model: str) -> psutil.Process:
        """The process of a model."""
        name = f"REKINDLE_SERVED_MODEL_NAME={model}"
        for each in psutil.Process(self.process.pid).children(recursive=True):
            named = f"REKINDLE_SERVED_MODEL_NAME={each.environ().get('REKINDLE_SERVED_MODEL_NAME')}"
            if named == name and "rekindle.harness.keeper" not in each.cmdline():
                return each
        raise AssertionError(f"{model} has no process")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "nothing"}')
    path = folder / "models.toml"
    path.write_text(FILE.format(scripted=write_scripted_model(folder / "scripted"), broken=broken))
    server = ServerSettings(port=0, api_key="key", stop_s=1)
    flags = ["--models", str(path), "--store", str(folder / "store")]
    with ServerProcess(flags, log=folder / "log", server=server) as process:
        process.wait_ready()
        yield Host(process)


def test_nothing_is_started_for_a_request_without_a_key_or_for_a_name_that_is_not_served(host: Host) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "talk"}]}
    assert httpx.post(f"{host.url}/v1/chat/completions", json=body).status_code == 401
    assert httpx.post(f"{host.url}/models/small/v1/chat/completions", json=body).status_code == 401
    for method in ("GET", "POST"):  # needs no key, once its model is loaded
        page = httpx.request(method, f"{host.url}/models/small/page/main.js")
        assert page.status_code == 503 and page.json()["error"]["code"] == "not_loaded"
    missing = host.ask("POST", "/v1/chat/completions", {**body, "model": "x"})
    assert missing.status_code == 404 and "'small', 'scripted', 'broken' are" in missing.json()["error"]["message"]
    assert host.ask("GET", "/favicon.ico").status_code == 404
    for method, path in UNKNOWN:
        unknown = host.ask(method, path)
        assert unknown.status_code == 404 and "is stored here" in unknown.json()["error"]["message"]
    for path, what in (("compact", "not compacted here"), ("resp_x/cancel", "in the background")):
        refused = host.ask("POST", f"/v1/responses/{path}", {"model": "small"})
        assert refused.status_code == 400 and what in refused.json()["error"]["message"]
    watched = host.ask("GET", "/models/small/overview")
    assert watched.status_code == 503 and watched.json()["error"]["code"] == "not_loaded"
    assert host.ask("POST", "/api/generate", {"model": "small", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert host.loaded() == [] and "starting" not in host.process.log_tail()
    assert [entry["rekindle"]["loaded"] for entry in host.ask("GET", "/v1/models").json()["data"]] == [False] * 3


def test_a_swap_away_and_back_reuses_the_agents_memory_and_every_model_has_its_own(host: Host) -> None:
    with ThreadPoolExecutor(2) as both:  # of which one waits for the other
        answers = list(both.map(host.chat, ("small", "scripted")))
    assert [answer["rekindle"]["reused_tokens"] for answer in answers] == [0, 0]
    back = "small" if host.loaded() == ["scripted:latest"] else "scripted"
    again = host.chat(back)["rekindle"]
    assert again["computed_tokens"] == 1 and again["warm_tokens"] == again["prompt_tokens"] - 1
    assert host.loaded() == [f"{back}:latest"]
    agents = host.ask("GET", f"/models/{back}/v1/agents").json()["data"]
    assert [agent["id"] for agent in agents] == ["ada"]
    team = {"Authorization": "Bearer key-of-team"}
    assert httpx.get(f"{host.url}/models/{back}/v1/agents", headers=team).json()["data"] == []
    assert httpx.get(f"{host.url}/models/{back}/metrics", headers=team).status_code == 403
    entry = host.ask("GET", f"/v1/models/{back}").json()
    assert entry["rekindle"]["loaded"] and entry["max_model_len"] > 0
    assert host.ask("GET", f"/models/{back}/health/ready").json()["status"] == "ok"


def test_an_agent_goes_through_the_server_as_a_file(host: Host) -> None:
    name = host.now()
    host.chat(name, "eve")
    file = host.ask("GET", f"/models/{name}/v1/agents/eve/export").content
    assert len(file) > 1_000
    came = host.http.post(f"/models/{name}/v1/agents/eve%2F2/import", content=file).json()
    assert (came["id"], came["kv_tokens"]) == ("eve/2", came["num_tokens"])
    another = {"small": "scripted", "scripted": "small"}[name]
    other = host.http.post("/v1/agents/eve/import", content=file, headers={"X-Rekindle-Model": another})
    assert other.status_code == 400 and "its token ids mean other texts" in other.json()["error"]["message"]


def test_a_stored_response_is_found_with_the_model_that_answered(host: Host) -> None:
    name = host.now()
    body = {"model": name, "input": "talk", "max_output_tokens": 16}
    made = host.ask("POST", "/v1/responses", body).json()
    assert host.ask("POST", "/api/generate", {"model": name, "keep_alive": 0}).status_code == 200
    team = {"Authorization": "Bearer key-of-team"}
    theirs = httpx.get(f"{host.url}/v1/responses/{made['id']}", headers=team, timeout=WAIT_S)
    assert theirs.status_code == 404, "another tenant's"
    found = host.ask("GET", f"/v1/responses/{made['id']}")
    assert found.json()["output"] == made["output"] and host.now() == name
    kept = host.ask("GET", f"/v1/receipts/{made['id']}").json()  # written with the response
    assert kept["identity"]["model"] == name and kept["endpoint"] == "/v1/responses"
    assert host.ask("DELETE", f"/v1/responses/{made['id']}").json()["deleted"]


def test_an_answer_of_another_model_is_known_and_says_that_the_model_changed(host: Host) -> None:
    def message(model: str, previous: str | None, authorization: str = "Bearer key") -> Any:
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": SAID}]}
        body |= {"diagnostics": {"previous_message_id": previous}}
        return host.ask("POST", "/v1/messages", body, authorization=authorization).json()

    def response(model: str, other: str | None) -> Any:
        body = {"model": model, "max_output_tokens": 16, "input": SAID, "store": False}
        body |= {"prompt_cache_options": {"comparison_response_id": other}}
        return host.ask("POST", "/v1/responses", body).json()

    name = host.now()
    said, answered = message(name, None), response(name, None)
    assert message(name, said["id"])["diagnostics"] is None
    another = {"small": "scripted", "scripted": "small"}[name]
    reason = message(another, said["id"])["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "model_changed" and reason["cache_missed_input_tokens"] >= 0
    found = response(another, answered["id"])["prompt_cache_diagnostics"]
    assert (found["type"], found["reason"]) == ("cache_miss", "model_changed")
    theirs = message(another, said["id"], "Bearer key-of-team")["diagnostics"]["cache_miss_reason"]
    assert theirs["type"] == "previous_message_not_found"


def test_a_target_that_is_no_path_reaches_no_other_host(host: Host) -> None:
    """After the address of a process it would: `http://127.0.0.1:PORT@HOST/`, with the key of the process."""
    name = host.now()
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(("127.0.0.1", host.process.port)) as to,
    ):
        target = f"@127.0.0.1:{other.getsockname()[1]}/"
        to.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n".encode())
        to.sendall(f"X-Rekindle-Model: {name}\r\n".encode() + b"Connection: close\r\n\r\n")
        assert to.recv(1 << 16).startswith(b"HTTP/1.1 404")
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.accept()


def test_a_stream_passes_as_it_comes_and_a_process_that_is_killed_ends_it_with_an_error(host: Host) -> None:
    host.chat("small")
    body = {"model": "small", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": SAID}]}
    with host.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data:"))
        first = [json.loads(next(lines).removeprefix("data:")) for _ in range(3)]
        host.child("small").kill()  # so the answer was not whole when its first tokens were here
        rest = list(lines)
    assert all("choices" in event for event in first)
    error = json.loads(rest[-1].removeprefix("data:"))["error"]
    assert error["code"] == "backend_failed" and "was ended by SIGKILL" in error["message"]
    assert host.chat("small")["rekindle"]["computed_tokens"] < 10  # started again, and what was on disk is there


def test_the_page_of_a_model_is_under_its_name(host: Host) -> None:
    found = host.http.get("/", follow_redirects=True)
    assert found.url.path == "/models/small/" and 'src="page/main.js"' in found.text
    assert host.http.get("/models/small/page/main.js").status_code == 200
    assert host.http.get("/models/small").headers["location"] == "small/"


def test_a_client_that_leaves_ends_its_request_there(host: Host) -> None:
    body = {"model": "small", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": SAID}]}
    with host.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + WAIT_S
    while (running := host.ask("GET", "/models/small/health/ready").json()["running"]) and time.monotonic() < end:
        time.sleep(0.02)
    assert running == 0


def test_a_model_that_cannot_start_says_why_once_and_commands_say_what_is_loaded(host: Host) -> None:
    name = host.now()
    flags = ["--url", host.url]
    env = {"REKINDLE_API_KEY": "key"}
    shown = run("ps", *flags, **env)
    assert shown.exit_code == 0 and name in shown.output and "CPU" in shown.output and "in 4 min" in shown.output
    listed = run("list", *flags, **env).output
    assert "not loaded" in listed and "bundled" in listed
    assert "was left" in run("stop", name, *flags, **env).output
    assert host.loaded() == [] and "is not loaded" in run("stop", name, *flags, **env).output
    body = {"model": "broken", "messages": [{"role": "user", "content": "talk"}]}
    for more in ("", "it is not tried again for"):
        refused = host.ask("POST", "/v1/chat/completions", body)
        message = refused.json()["error"]["message"]
        assert refused.status_code == 502 and "'broken' cannot be started" in message and "nothing" in message
        assert more in message


def test_the_processes_end_with_the_server_however_it_ends(host: Host) -> None:
    host.ask("POST", "/api/chat", {"model": "small", "keep_alive": "-1"})
    (entry,) = host.ask("GET", "/api/ps").json()["models"]
    assert entry["expires_at"].startswith("9999")
    child = host.child("small")
    host.process.kill()
    child.wait(WAIT_S)
