"""examples/ray_serve.py on a Ray of its own, as the manifest configures it; ends with all of its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kuberay" / "rayservice.yaml"
WAIT_S = 240.0  # nothing here is timed; this bounds a failure
T = TypeVar("T")
SECRET, KEY = "the same text on every replica", "key-of-a-caller"


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running fleet: `url` is Ray's, `targets` where each replica listens itself, by its slot."""

    url: str
    log: Path

    def targets(self) -> dict[str, str]:
        listed = get(f"{self.url}/fleet")
        return {each["labels"]["slot"]: f"http://{address}" for each in listed for address in each["targets"]}

    def ask(self, agent: str, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
        """The reply, and what was reused; asked again while Ray has not noticed that a replica is gone."""
        body = {"messages": messages, "max_tokens": 12, "temperature": 0}
        answer = until(lambda: get(f"{self.url}/v1/chat/completions", body, agent=agent), f"an answer to {agent}")
        return answer["choices"][0]["message"]["content"], answer["rekindle"]

    def kill(self, url: str) -> None:
        """End the process that listens there, with no chance to save anything."""
        port = int(url.rpartition(":")[2])
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        (pid,) = {each.pid for each in listening if each.laddr.port == port}
        os.kill(pid, signal.SIGKILL)


def get(url: str, body: Any = None, *, agent: str | None = None) -> Any:
    """What a route answers: JSON, or a text. With a body, the request is a POST."""
    headers = {"Authorization": f"Bearer {KEY}"} | ({} if agent is None else {"X-Agent-ID": agent})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
        body = response.read()
        return json.loads(body) if response.headers.get_content_type() == "application/json" else body.decode()


def until(look: Callable[[], T], what: str) -> T:
    """What `look` returns once that is true; servers that are not there, or fail, are waited for."""
    end, last = time.monotonic() + WAIT_S, ""
    while time.monotonic() < end:
        try:
            if found := look():
                return found
        except (urllib.error.URLError, OSError) as error:
            last = str(error)
        time.sleep(0.1)
    raise AssertionError(f"waited in vain for {what} {last}")


@contextmanager
def fleet(directory: Path) -> Iterator[Fleet]:
    """Two replicas of the bundled model, each with a slot and a tier in the directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = directory / "serve.yaml"
    config.write_text(yaml.safe_dump(configured(directory, port)))
    place = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)  # pytest's are too long for sockets
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            str(ROOT / part) for part in ("src", "packages/vllm/src", "pocket/src", "examples")
        ),
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": place.name,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_SESSION_ID_HEADER_KEY": "x-agent-id",
        "REKINDLE_SECRET": SECRET,
        "REKINDLE_API_KEY": KEY,
    }
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=heed_interrupts
        )
    running = Fleet(f"http://127.0.0.1:{port}", directory / "log")
    try:
        until(lambda: process.poll() is not None or len(running.targets()) == 2, "two replicas")
        assert process.poll() is None, "Ray Serve has ended"
        yield running
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
    finally:
        end_session(process)
        print(running.log.read_text()[-4000:])
        place.cleanup()


def configured(directory: Path, port: int) -> dict[str, Any]:
    """The manifest's configuration of Serve, for this machine instead of Kubernetes."""
    manifests = yaml.safe_load_all(MANIFEST.read_text())
    (text,) = (each["spec"]["serveConfigV2"] for each in manifests if each["kind"] == "RayService")
    config: dict[str, Any] = yaml.safe_load(text)
    (application,) = config["applications"]
    del application["args"]["model"]
    application["args"] |= {"store": str(directory / "store"), "tier": str(directory / "tier")}
    application["args"] |= {"host": "127.0.0.1", "port": 0, "hot_bytes": "64MiB", "tier_wait_s": 30}
    (deployment,) = application["deployments"]
    del deployment["max_replicas_per_node"]
    deployment["autoscaling_config"]["max_replicas"] = 2
    deployment["ray_actor_options"] = {"num_cpus": 0.5}
    return config | {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}


def heed_interrupts() -> None:
    """Let a program be interrupted: a shell makes what it runs in the background ignore that, and all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what a process has started and left, and itself."""
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == process.pid:
                each.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # it has ended by itself
    process.wait()
