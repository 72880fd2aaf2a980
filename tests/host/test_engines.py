"""Several models of which others compute two: a llama-server (the imitation), whose memory is kept, and a vLLM."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rekindle.config import ServerSettings
from rekindle.harness.client import ServerProcess
from tests.backends.llama import imitation
from tests.backends.llama.recording import write_model
from tests.backends.test_own_vllm import has_ended, put_on_path
from tests.host.test_host import WAIT_S, Host
from tests.server.scripted import write_scripted_model

HOT_BYTES = 16 << 20
FILE = """
max_loaded = 1
[models.away]
model = "{gguf}"
backend = "llama.cpp"
backend_flags = "-np 2 -c 4096"
hot_bytes = "{hot_bytes}"
[models.served]
model = "{scripted}"
backend = "vllm"
backend_flags = "--max-num-seqs 3"
[models.here]
model = "pocket"
threads = 1
"""
LONG = "talk about the copper key and the attic of the old house, and about who went there last, " * 8


class Engines(Host):
    """The server in a folder, with the programs that compute for it."""

    def __init__(self, process: ServerProcess, folder: Path, notes: Path) -> None:
        super().__init__(process)
        self.store, self.scripted, self.notes = folder / "store", folder / "scripted", notes

    def llama_servers(self) -> list[psutil.Process]:
        ours = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in ours if imitation.__file__ in each.cmdline()]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("host")
    scripted = write_scripted_model(folder / "scripted")
    made = FILE.format(gguf=write_model(folder), hot_bytes=HOT_BYTES, scripted=scripted)
    (folder / "models.toml").write_text(made)
    flags = ["--models", str(folder / "models.toml"), "--store", str(folder / "store")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_SERVER", str(imitation.write_program(folder / "llama-server")))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        notes = put_on_path(folder, patch)
        server = ServerSettings(port=0, api_key="key", stop_s=1)
        admin = {"admin_key": "root"}
        with ServerProcess(flags, log=folder / "log", server=server, variables=admin) as process:
            process.wait_ready()
            yield Engines(process, folder, notes)


def size(host: Engines, key: str = "root") -> int:
    """What /api/ps says to a key that the model takes that is loaded."""
    (entry,) = host.ask("GET", "/api/ps", authorization=f"Bearer {key}").json()["models"]
    return int(entry["size"])


def test_what_a_llama_server_keeps_of_a_token_and_what_it_takes_is_said(host: Engines) -> None:
    host.ask("POST", "/api/generate", {"model": "away"})
    before = size(host)
    (tag,) = (each for each in host.ask("GET", "/api/tags").json()["models"] if each["name"] == "away:latest")
    assert tag["details"]["format"] == "gguf" and before == tag["size"] > 1000
    host.chat("away", text=LONG)
    about = host.ask("GET", "/v1/models/away").json()["rekindle"]
    cells = 16
    assert about["kv_bytes_per_token"] == 2 * imitation.LAYERS * imitation.WIDTH + cells
    assert about["backend"] == "llama.cpp" and "kv_formats" not in about
    end = time.monotonic() + WAIT_S
    while (after := size(host)) == before and time.monotonic() < end:  # until its slot has rested, and is read
        time.sleep(0.05)
    assert before < after < before + HOT_BYTES / 2
    assert size(host, "key") == before, "a tenant sees nothing of what all tenants use"


def test_its_memory_outlives_a_swap_and_its_llama_server_ends_with_it(host: Engines) -> None:
    first = host.chat("away", "bo", f"bo: {LONG}")["rekindle"]
    assert first["computed_tokens"] > 100 and host.llama_servers()
    host.chat("here", "bo")
    assert not host.llama_servers()
    back = host.chat("away", "bo", f"bo: {LONG}")["rekindle"]
    assert back["computed_tokens"] <= 64 and back["warm_tokens"] > 100
    (agent,) = (each for each in host.ask("GET", "/models/away/v1/agents").json()["data"] if each["id"] == "bo")
    assert agent["num_tokens"] > 100


def test_a_prompt_that_is_too_long_for_it_is_refused_in_the_clients_dialect(host: Engines) -> None:
    said = {"model": "away", "messages": [{"role": "user", "content": LONG * 20}], "max_tokens": 4}
    for more in ({}, {"stream": True}):
        refused = host.ask("POST", "/v1/chat/completions", said | more)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = host.ask("POST", "/v1/messages", said)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert re.match(r"prompt is too long: \d+ tokens > 2047 maximum: shorten", refused.json()["error"]["message"])


def test_a_vllm_gets_its_models_name_its_flags_and_a_folder_of_its_own(host: Engines) -> None:
    """By a program of that name: its arguments are those of a front that serves one model."""
    body = {"model": "served", "messages": [{"role": "user", "content": "talk"}]}
    answer = host.ask("POST", "/v1/chat/completions", body, x_agent_id="ada")
    assert answer.status_code == 200 and answer.json()["model"] == "served", answer.text
    (line,) = host.notes.read_text().splitlines()
    pid, _, *given = json.loads(line)
    assert given[:2] == ["serve", str(host.scripted)] and given[-2:] == ["--max-num-seqs", "3"]
    connector = json.loads(given[given.index("--kv-transfer-config") + 1])
    place = Path(connector["kv_connector_extra_config"]["dir"])
    assert place.name == "vllm" and host.store / "models" / "served" in place.parents
    assert host.ask("POST", "/api/generate", {"model": "served", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert host.loaded() == [] and has_ended(pid)
