"""Libraries, command line tools and evaluators: each runs a program of `programs`, or its own command, twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.real_clients.client import Client, Command, Place, write
from tools.real_clients.install import Packages
from tools.real_clients.script import Call, Reply, Script, structured

TORCH = "torch==2.13.0"  # as in constraints.txt: others bring CUDA along
PROGRAMS = Path(__file__).parent / "programs"
SUNNY, HELLO, SAID = "It is sunny in Paris.", "Hello, clerk here.", "I said hello."
PERSON = {"name": "Ada", "age": 36}
FUNCTION = "def weather(city: str) -> str:\n    '''The weather'''\n    return f'sunny in {city}'\n"
CODE = 'final_answer(weather("Paris"))'
LOOKED = Reply("I look.", [Call("weather", {"city": "Paris"})])
SCRIPT = Script(
    {
        "look": [LOOKED, Reply(SUNNY)],
        "talk": [Reply(HELLO)],
        "more": [Reply(SAID)],
        "person": [structured(PERSON)],
        "call-person": [Reply("", [Call("Person", PERSON)])],
        "agent-person": [Reply("", [Call("Person", PERSON)])],
        "final-person": [Reply("", [Call("final_result", PERSON)])],
        "smol-look": [LOOKED, Reply("Done.", [Call("final_answer", {"answer": "sunny in Paris"})])],
        "smol-code": [Reply(f"Thought: I look.\n<code>\n{CODE}\n</code>")],
        "smol-json": [structured({"thought": "I look.", "code": CODE})],
    }
)


def _twice(*calls: Sequence[str]) -> Sequence[Command]:
    return [Command(phase, call) for phase in ("day", "new") for call in calls]


def _library(name: str, program: str, *packages: str) -> Client:
    """Return a client that runs a program with the server's address."""

    def commands(place: Place) -> Sequence[Command]:
        return _twice(["python", str(PROGRAMS / program), place.url])

    return Client(name, Packages("pypi", packages), lambda place: SCRIPT, commands, edits=False)


def _llm_commands(place: Place) -> Sequence[Command]:
    llm = ["llm", "-m", "rekindle", "-s", f"You are a clerk. {'Speak of the weather, and be brief. ' * 80}"]
    return [
        Command("day", [*llm, "Hello! step:talk"], ["talk"], output=HELLO),
        Command("day", ["llm", "-c", "What did you say? step:more"], ["more"], output=SAID),
        Command("day", [*llm, "--schema", "name, age int", "Who? step:person"], ["person"], output='"Ada"'),
        Command("day", [*llm, "--functions", FUNCTION, "How is Paris? step:look"], ["look"], output=SUNNY),
        Command("new", [*llm, "--functions", FUNCTION, "How is Paris? step:look"], ["look"], output=SUNNY),
    ]


def _llm_configure(place: Place) -> None:
    model = f"model_id: rekindle, model_name: default, api_base: {place.url}/v1"
    line = f"- {{{model}, supports_schema: true, supports_tools: true}}\n"
    write(place.home / ".config" / "io.datasette.llm" / "extra-openai-models.yaml", line)


def _key(place: Place) -> Mapping[str, str]:
    return {"OPENAI_API_KEY": "none"}


def _lm_eval_commands(place: Place) -> Sequence[Command]:
    model = f"model=default,base_url={place.url}/v1/chat/completions,num_concurrent=2"
    own = [
        "--include_path",
        str(place.directory),
        "--apply_chat_template",
        "--output_path",
        str(place.directory / "results"),
    ]
    return _twice(
        ["lm_eval", "run", "--model", "local-chat-completions", "--model_args", model, "--tasks", "clerk", *own]
    )


def _lm_eval_configure(place: Place) -> None:
    lines = [{"question": f"Hello number {number}! step:talk", "answer": HELLO} for number in range(4)]
    write(place.directory / "clerk.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": "clerk",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place.directory / "clerk.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match"}],
    }
    write(place.directory / "clerk.yaml", json.dumps(task))


def _promptfoo_commands(place: Place) -> Sequence[Command]:
    evaluate = ["promptfoo", "eval", "--no-cache", "-c"]
    return _twice(*([*evaluate, str(place.directory / f"{name}.json")] for name in ("talk", "person")))


def _promptfoo_configure(place: Place) -> None:
    options = {"apiBaseUrl": f"{place.url}/v1", "apiKey": "none"}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _schema()}}}
    for name, more, wanted in (("talk", {}, HELLO), ("person", form, "Ada")):
        provider = {"id": "openai:chat:default", "config": {**options, **more}}
        test = {"vars": {"step": f"step:{name}"}, "assert": [{"type": "icontains", "value": wanted}]}
        config = {"prompts": ["Speak. {{step}}"], "providers": [provider], "tests": [test]}
        write(place.directory / f"{name}.json", json.dumps(config))


def _schema() -> dict[str, object]:
    fields = {"name": {"type": "string"}, "age": {"type": "integer"}}
    return {"type": "object", "properties": fields, "required": ["name", "age"], "additionalProperties": False}


def _guidellm_commands(place: Place) -> Sequence[Command]:
    tokenizer = place.directory.parents[1] / "model"
    run = ["guidellm", "run", "--disable-progress", "--profile", "kind=synchronous"]
    run += ["--backend", f"kind=openai_http,target={place.url}", "--constraint", "kind=max_requests,count=3"]
    run += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    return _twice([*run, "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16"])


# Wanted, and on neither registry as more than a name.
UNTESTED = {
    "Crush": "its package on npm downloads the program from GitHub",
    "goose": "its program is downloaded from GitHub; packages of that name on PyPI and npm are others",
}
LIBRARIES = (
    _library("LangChain", "langchain_library.py", "langchain", "langchain-openai", "langgraph"),
    _library("OpenAI Agents SDK", "agents_library.py", "openai-agents"),
    _library("pydantic-ai", "pydantic_ai_library.py", "pydantic-ai-slim[openai,anthropic]"),
    _library("smolagents", "smolagents_library.py", "smolagents[openai]"),
    Client("llm", Packages("pypi", ("llm",)), lambda _: SCRIPT, _llm_commands, _key, _llm_configure, edits=False),
    _library("openai", "openai_library.py", "openai"),
    _library("anthropic", "anthropic_library.py", "anthropic"),
    Client(
        "lm-eval",
        Packages("pypi", ("lm-eval[api]",)),
        lambda _: SCRIPT,
        _lm_eval_commands,
        _key,
        _lm_eval_configure,
        edits=False,
    ),
    _library("LiteLLM proxy", "litellm_proxy.py", "litellm[proxy]"),
    _library("Open WebUI", "open_webui.py", "open-webui", TORCH),
    Client("guidellm", Packages("pypi", ("guidellm", TORCH)), lambda _: SCRIPT, _guidellm_commands, edits=False),
    Client(
        "promptfoo",
        Packages("npm", ("promptfoo",)),
        lambda _: SCRIPT,
        _promptfoo_commands,
        configure=_promptfoo_configure,
        edits=False,
    ),
)
