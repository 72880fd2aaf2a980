"""LiteLLM's proxy in front of the server: chat with tools, a stream, a format, through openai's client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from checks import AGE, HELLO, LOOK, NAME, PERSON, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from openai import APIConnectionError, OpenAI

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}
FIELDS = {"name": {"type": "string"}, "age": {"type": "integer"}}
PERSON_SCHEMA: Any = {
    "type": "object",
    "properties": FIELDS,
    "required": ["name", "age"],
    "additionalProperties": False,
}
KEY, START_S = "sk-none", 120.0

with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def said(text: str) -> list[Any]:
    """Return a prompt."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def tools() -> None:
    """A tool's call and result."""
    messages = said(LOOK)
    call = client.chat.completions.create(model="local", messages=messages, tools=[TOOL]).choices[0].message
    messages.append(call)
    for each in call.tool_calls or []:
        result = weather(**json.loads(each.function.arguments))
        messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    answer = client.chat.completions.create(model="local", messages=messages, tools=[TOOL])
    expect(answer.choices[0].message.content, SUNNY)


def stream() -> None:
    """A streamed answer."""
    chunks = client.chat.completions.create(model="local", messages=said(TALK), stream=True)
    expect("".join(each.choices[0].delta.content or "" for each in chunks if each.choices), HELLO)


def schema() -> None:
    """A format."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}
    answer = client.chat.completions.create(model="local", messages=said(PERSON), response_format=form)
    expect(json.loads(answer.choices[0].message.content or ""), {"name": NAME, "age": AGE})


def wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the proxy answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.models.list()
            return
        except APIConnectionError:
            time.sleep(0.5)
    raise RuntimeError("the proxy did not start")


config = {"model": "openai/default", "api_base": f"{URL}/v1", "api_key": "none"}
path = Path("litellm.json")
path.write_text(json.dumps({"model_list": [{"model_name": "local", "litellm_params": config}]}), "utf-8")
command = ["litellm", "--config", str(path), "--host", "127.0.0.1", "--port", str(port)]
with subprocess.Popen(command, env={**os.environ, "LITELLM_MASTER_KEY": KEY}) as proxy:
    try:
        wait(proxy)
        run(tools, stream, schema)
    finally:
        proxy.terminate()
