"""Settings and options as keyword arguments, and prompts that are plain text or ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest, ConfigError
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start

HELLO = [{"role": "user", "content": "Hello!"}]


def test_an_engine_takes_settings_by_their_names(tmp_path: Path) -> None:
    engine = Engine(model=tmp_path, store="off", hot_bytes="1GiB", threads=1)
    assert engine.settings == Settings.load({"model": tmp_path, "store": "off", "hot_bytes": 1 << 30, "threads": 1})
    assert Engine().settings == Engine(Settings()).settings == Settings()
    with pytest.raises(ConfigError, match=r"^unknown setting 'hot_byte'; did you mean hot_bytes\?$"):
        Engine(hot_byte=1)
    with pytest.raises(ConfigError, match=r"^kv: must be one of auto, q4h"):
        Engine.from_pretrained(kv="int8")
    with pytest.raises(ConfigError, match="give Settings or keyword arguments, not both: threads"):
        Engine(Settings(), threads=1)


def test_a_misspelled_option_names_the_one_meant(start: Start) -> None:
    engine = start(store="off")
    with pytest.raises(TypeError, match=r"'temperatur'; did you mean temperature\?"):
        engine.chat("ada", HELLO, temperatur=0)
    with pytest.raises(TypeError, match=r"'max_token'; did you mean max_tokens\?"):
        engine.generate("Hello!", max_token=3)
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'tools'$"):
        engine.generate("Hello!", tools=[])
    with pytest.raises(TypeError, match=r"'open_ends'; did you mean open_end\?"):
        engine.prefill("ada", HELLO, open_ends=True)


def test_plain_text_and_ids_are_completed_without_a_template(start: Start) -> None:
    engine = start(store="off")
    text = "Once upon a time there was"
    params = SamplingParams(temperature=0, max_tokens=6)
    asked = engine.submit(GenerationRequest(text=text, reuse="off", params=params)).result()
    ids = asked.prompt_ids
    for prompt in (text, list(ids), np.array(ids)):
        found = engine.generate(prompt, temperature=0, max_tokens=6, reuse="off")
        assert (found.text, found.prompt_ids) == (asked.text, ids)
    named = engine.generate(text, agent="ada", namespace="team", temperature=0, max_tokens=6)
    assert named.text == asked.text and [info.agent for info in engine.agents("team")] == ["ada"]
    for wrong in (7, [1.5], [-1], None):
        with pytest.raises(BadRequest, match=r"prompt: .*ids"):
            engine.generate(wrong)
    with pytest.raises(BadRequest, match="must lie in 0 to"):
        engine.generate([1 << 30])


def test_one_text_stops_a_reply_as_a_list_of_it_does(start: Start) -> None:
    engine = start(store="off")
    whole = engine.generate("Once upon a time", temperature=0, max_tokens=12).text
    stop = whole[3:5]
    ended = [engine.generate("Once upon a time", temperature=0, max_tokens=12, stop=each) for each in (stop, [stop])]
    assert {each.text for each in ended} == {whole[: whole.index(stop)]}
    assert engine.chat(None, HELLO, temperature=0, max_tokens=3, stop="\n").finish_reason in ("stop", "length")
