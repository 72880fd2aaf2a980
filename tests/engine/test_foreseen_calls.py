"""A caller that works with tools, on templates that rewrite what was generated: each step computes what is new in it.

The scripted model's replies depend on all KV before them, so that wrong reuse would show in what is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.coding_day.script import script_of
from benchmarks.coding_day.scripted import write_scripted_model
from benchmarks.coding_day.templates import TEMPLATES, Behaviour
from benchmarks.coding_day.texts import Texts
from rekindle.engine.api import Engine
from rekindle.engine.types import ChatResult, GenerationRequest, Reuse
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message
from rekindle.text.replies import ParsedReply, ReplyStream
from tests.engine.conftest import Start
from tests.engine.idle import until_idle

TEXTS = Texts(0)
TOOLS = [
    {
        "type": "function",
        "function": {k: tool[k] for k in ("name", "description")} | {"parameters": tool["input_schema"]},
    }
    for tool in TEXTS.tools(("Read", "Bash"))
]
SYSTEM = TEXTS.instructions(rules=4)
NUM_STEPS = 6


@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda behaviour: behaviour.name)
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    behaviour: Behaviour = request.param
    directory = tmp_path_factory.mktemp("scripted") / "model"
    return write_scripted_model(directory, script_of(behaviour), template=behaviour.template, corpus=TEXTS.corpus())


def reply_of(engine: Engine, asked: GenerationRequest) -> tuple[Message, ChatResult]:
    """A reply as a server hands it out: parts, and calls with ids of its own."""
    generation = engine.submit(asked)
    result = generation.result()
    said, stream = ParsedReply(), ReplyStream(engine.reply_format, tools=TOOLS, opening=generation.opening)
    for event in [*stream.push(result.text), *stream.finish()]:
        said.take(event)
    return said.message(), result


def session(engine: Engine, reuse: Reuse | None = None) -> Iterator[tuple[ChatResult, str]]:
    """What was said, and what was new in the prompt of each step: results, which sometimes come with words.

    Templates that refuse words behind results get them inside the last result, as a server of such a model sends them.
    """
    refuses = "AVAILABLE_TOOLS" in engine.encoder.template.sources["default"]
    new = TEXTS.task(0)
    messages = [Message("system", SYSTEM), Message("user", new)]
    for number in range(NUM_STEPS):
        asked = GenerationRequest(
            messages=tuple(messages),
            agent="ada",
            tools=TOOLS,
            params=SamplingParams(temperature=0.0, max_tokens=256),
            structured=True,
            echoes_thoughts=True,
            reuse=reuse,
        )
        message, result = reply_of(engine, asked)
        yield result, new
        messages.append(message)
        words_too = number % 3 == 1
        if message.tool_calls:
            new = f"{number} rows were looked at and {7 * number} of them changed."
            new += TEXTS.reminder(number) if words_too and refuses else ""
            messages += [Message("tool", new, tool_call_id=call.id) for call in message.tool_calls]
        if (words_too and not (refuses and message.tool_calls)) or not message.tool_calls:
            words = TEXTS.reminder(number) if message.tool_calls else TEXTS.task(number + 1)
            messages.append(Message("user", words))
            new = new + words if message.tool_calls else words


def test_each_step_computes_what_is_new_in_it(start: Start, scripted: Path) -> None:
    engine = start(scripted, anticipate="on", min_reuse_tokens=1, hot_bytes=64 << 20)
    said, encoder = [], engine.encoder
    for number, (result, new) in enumerate(session(engine)):
        said.append(result.token_ids)
        num_new = len(encoder.encode(encoder.render_text(new)))
        if number:
            assert result.report.computed_tokens <= num_new + 48, f"step {number}: {result.report}"
            assert result.report.outcome != "miss"
        until_idle(engine)
    engine.check()
    engine = start(scripted, store="off", hot_bytes=64 << 20)
    assert [result.token_ids for result, _ in session(engine, reuse="off")] == said
