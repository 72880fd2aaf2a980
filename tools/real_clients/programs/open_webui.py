"""Open WebUI in front of the server: sign up, list models, two turns of a chat, streamed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from typing import Any

import requests
from checks import HELLO, MORE, SAID, SYSTEM, TALK, URL, expect, run

START_S = 200.0
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
address, session = f"http://127.0.0.1:{port}", requests.Session()
SETTINGS = {
    "DATA_DIR": tempfile.mkdtemp(),
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": "none",
    "ENABLE_FORWARD_USER_INFO_HEADERS": "true",
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "false",
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
}


def post(path: str, **body: Any) -> requests.Response:
    """Send JSON; raise for an error."""
    answer = session.post(address + path, json=body, timeout=120)
    assert answer.ok, f"{answer.status_code} {answer.text[:200]}"
    return answer


def said(lines: str) -> str:
    """Return the text of a stream."""
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each.get("choices"))


def chat() -> None:
    """The first user signs up, and talks twice."""
    person = {"name": "Ada", "email": "ada@example.com", "password": "a copper key"}
    session.headers["Authorization"] = f"Bearer {post('/api/v1/auths/signup', **person).json()['token']}"
    models = session.get(f"{address}/api/models", timeout=60).json()["data"]
    assert models, "no model is listed"
    turns: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
    for asked, wanted in ((TALK, HELLO), (MORE, SAID)):
        turns.append({"role": "user", "content": asked})
        answer = post("/api/chat/completions", model=models[0]["id"], messages=turns, stream=True)
        expect(said(answer.text), wanted)
        turns.append({"role": "assistant", "content": wanted})


def wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until it answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if session.get(f"{address}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(1)
    raise RuntimeError("Open WebUI did not start")


command = ["open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
with subprocess.Popen(command, env={**os.environ, **SETTINGS}) as server:
    try:
        wait(server)
        run(chat)
    finally:
        server.terminate()
