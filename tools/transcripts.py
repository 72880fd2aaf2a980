"""Run the same conversation through each client of Rekindle, and print messages, tool calls and token counts.

python tools/transcripts.py                              # starts a server on the bundled model
python tools/transcripts.py --url http://127.0.0.1:7354  # uses a running one

Each client states a fact, asks for it, and has two numbers added by a tool whose result it sends back. Each turn ends
with the tokens of its prompt and how many of them were cached. Needs the dev extras.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from rekindle.harness.client import ServerProcess

SYSTEM = "You are Mira, the archivist. Answer in one short sentence."
SAID = ("Remember that the copper key is in the attic.", "Where is the copper key?", "What is 17 plus 25?")
INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": INTEGERS, "required": ["a", "b"]}
ABOUT = {"name": "add", "description": "Add two whole numbers."}
FUNCTION: Any = {"type": "function", "function": {**ABOUT, "parameters": SCHEMA}}
RESULT = "(the result)"


class Caller:
    """Connection of one client: the address, and the headers that name its agent."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.headers = {"X-Agent-ID": f"{name.replace(' ', '-')}-{uuid4().hex[:6]}"}

    def openai(self) -> openai.OpenAI:
        """Return OpenAI's official client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", default_headers=self.headers)


def show(said: str, reply: str, prompt: int | None, cached: int | None) -> None:
    """Print one turn."""
    print(f"  > {said}\n  < {reply or '(calls a tool)'}    [prompt {prompt}, cached {cached}]")


def summed(call: str, arguments: Any) -> str:
    """Print a call and return the tool's result."""
    print(f"  = {call}({json.dumps(arguments)})")
    return json.dumps({"sum": arguments["a"] + arguments["b"]})


def with_anthropic(caller: Caller) -> None:
    """The official client: a stream of events, tool_use and tool_result, count_tokens."""
    client = anthropic.Anthropic(base_url=caller.url, api_key="unused", default_headers=caller.headers)
    tools: Any = [{**ABOUT, "input_schema": SCHEMA}]
    given: Any = {"model": "claude-opus-5-5", "system": SYSTEM, "tools": tools}
    messages: list[Any] = []

    def turn(said: Any, shown: str) -> list[Any]:
        messages.append({"role": "user", "content": said})
        counted = client.messages.count_tokens(**given, messages=messages).input_tokens
        options: Any = {"max_tokens": 64, "extra_body": {"temperature": 0}}
        with client.messages.stream(**given, **options, messages=messages) as stream:
            reply = "".join(stream.text_stream)
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        usage = message.usage
        read, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert counted == usage.input_tokens + read + created
        show(shown, reply, counted, read)
        return [block for block in message.content if block.type == "tool_use"]

    for call in [turn(said, said) for said in SAID][-1]:
        turn([{"type": "tool_result", "tool_use_id": call.id, "content": summed(call.name, call.input)}], RESULT)


def with_chat(caller: Caller) -> None:
    """OpenAI's client: chat completions."""
    client, messages = caller.openai(), [{"role": "system", "content": SYSTEM}]

    def turn(said: dict[str, Any], shown: str) -> list[Any]:
        messages.append(said)
        options: Any = {"model": "default", "temperature": 0, "max_tokens": 64, "tools": [FUNCTION]}
        answer: Any = client.chat.completions.create(messages=messages, **options)
        message, usage = answer.choices[0].message, answer.usage
        messages.append(message.model_dump(exclude_none=True))
        show(shown, message.content, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
        return message.tool_calls or []

    for call in [turn({"role": "user", "content": said}, said) for said in SAID][-1]:
        result = summed(call.function.name, json.loads(call.function.arguments))
        turn({"role": "tool", "tool_call_id": call.id, "content": result}, RESULT)


def with_completions(caller: Caller) -> None:
    """OpenAI's client: completions, the template written by the caller."""
    client, text = caller.openai(), f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    for said in SAID[:2]:
        text += f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        answer: Any = client.completions.create(model="default", prompt=text, temperature=0, max_tokens=64)
        reply, usage = answer.choices[0].text, answer.usage
        text += f"{reply}<|im_end|>\n"
        show(said, reply, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


def with_responses(caller: Caller) -> None:
    """OpenAI's client: responses, each continuing the previous one."""
    client, before = caller.openai(), None
    tools: Any = [{"type": "function", **ABOUT, "parameters": SCHEMA, "strict": False}]

    def turn(said: Any, shown: str) -> list[Any]:
        nonlocal before
        options: Any = {"model": "default", "instructions": SYSTEM, "temperature": 0, "max_output_tokens": 64}
        answer: Any = client.responses.create(input=said, previous_response_id=before, tools=tools, **options)
        before, usage = answer.id, answer.usage
        show(shown, answer.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens)
        return [item for item in answer.output if item.type == "function_call"]

    for call in [turn(said, said) for said in SAID][-1]:
        result = summed(call.name, json.loads(call.arguments))
        turn([{"type": "function_call_output", "call_id": call.call_id, "output": result}], RESULT)


def with_langchain(model: Any) -> None:
    """Run the conversation with a LangChain chat model."""
    chat, messages = model.bind_tools([FUNCTION]), [SystemMessage(SYSTEM)]

    def turn(said: Any, shown: str) -> list[Any]:
        messages.append(said)
        answer = chat.invoke(messages)
        messages.append(answer)
        usage = answer.usage_metadata
        show(shown, answer.text, usage["input_tokens"], usage["input_token_details"].get("cache_read"))
        return answer.tool_calls

    for call in [turn(HumanMessage(said), said) for said in SAID][-1]:
        turn(ToolMessage(summed(call["name"], call["args"]), tool_call_id=call["id"]), RESULT)


def with_chat_openai(caller: Caller, *, responses: bool = False) -> None:
    """LangChain's ChatOpenAI, over chat completions."""
    options: Any = {"base_url": f"{caller.url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 64}
    options |= {"default_headers": caller.headers, "use_responses_api": responses}
    with_langchain(ChatOpenAI(model="default", **options))


def with_chat_openai_responses(caller: Caller) -> None:
    """LangChain's ChatOpenAI, over responses."""
    with_chat_openai(caller, responses=True)


def with_chat_anthropic(caller: Caller) -> None:
    """LangChain's ChatAnthropic."""
    options: Any = {"base_url": caller.url, "api_key": "unused", "temperature": 0, "max_tokens": 64}
    with_langchain(ChatAnthropic(model="claude-opus-5-5", default_headers=caller.headers, **options))


CLIENTS: dict[str, Callable[[Caller], None]] = {
    "anthropic": with_anthropic,
    "chat": with_chat,
    "completions": with_completions,
    "responses": with_responses,
    "langchain chat": with_chat_openai,
    "langchain responses": with_chat_openai_responses,
    "langchain anthropic": with_chat_anthropic,
}


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """Yield the server at `url`; without one, run a server on the bundled model with a temporary store."""
    if url is not None:
        yield url.rstrip("/")
        return
    with (
        tempfile.TemporaryDirectory() as place,
        ServerProcess(["--store", f"{place}/store"], log=Path(place) / "log") as server,
    ):
        server.wait_ready()
        yield f"http://127.0.0.1:{server.port}"
        server.stop()


def main() -> None:
    """Print a transcript of each client, or of those given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all by default")
    parser.add_argument("--url", help="a running server; without it one is started")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with served(given.url) as url:
        for name in given.clients or CLIENTS:
            print(f"{name}: {CLIENTS[name].__doc__}")
            CLIENTS[name](Caller(url, name))
            print(flush=True)


if __name__ == "__main__":
    main()
