"""Several models of which one is computed by a llama-server (the imitation): what is said of it, and its memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from rekindle.config import ServerSettings
from rekindle.harness.client import ServerProcess
from tests.backends.llama import imitation
from tests.backends.llama.recording import write_model
from tests.host.test_host import WAIT_S, Host

HOT_BYTES = 16 << 20
FILE = """
max_loaded = 1
hot_bytes = "{hot_bytes}"
[models.away]
model = "{gguf}"
backend = "llama.cpp"
backend_flags = "-np 2 -c 4096"
[models.here]
model = "pocket"
threads = 1
"""
LONG = "talk about the copper key and the attic of the old house, and about who went there last, " * 8


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    (folder / "models.toml").write_text(FILE.format(gguf=write_model(folder), hot_bytes=HOT_BYTES))
    flags = ["--models", str(folder / "models.toml"), "--store", str(folder / "store")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMA_SERVER", str(imitation.write_program(folder / "llama-server")))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        server = ServerSettings(port=0, api_key="key", stop_s=1)
        with ServerProcess(flags, log=folder / "log", server=server) as process:
            process.wait_ready()
            yield Host(process)


def size(host: Host) -> int:
    """What /api/ps says that the model takes that is loaded."""
    (entry,) = host.ask("GET", "/api/ps").json()["models"]
    return int(entry["size"])


def test_what_a_llama_server_keeps_of_a_token_and_what_it_takes_is_said(host: Host) -> None:
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
