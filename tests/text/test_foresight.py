"""What is anticipated begins whatever prompt comes, in text and in ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text.messages import Message, ToolCall
from rekindle.text.places import anticipated
from rekindle.text.prompt import PromptEncoder
from tests.engine.rewriting import REWRITING
from tests.text.factories import KINDS, encoder_of
from tests.tiny_models import write_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
CALLS = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}{{- '<|tool|>' + m.tool_call_id + ':' + m.content + '<|tool|>' -}}"
    "{%- elif m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "{{- '<|tool|>' + c.function.name + (c.function.arguments | tojson) + ID + '<|im_end|>' -}}{%- endfor -%}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
)
WITH_IDS = CALLS.replace("ID", "' id ' + c.id")
WITHOUT_IDS = CALLS.replace("ID", "''").replace("m.tool_call_id + ':' + ", "")
words = st.text(max_size=12).filter(lambda text: "\ufdd0" not in text)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptEncoder]:
    made = {}
    for name, template in {**REWRITING, "ids": WITH_IDS, "no ids": WITHOUT_IDS}.items():
        directory: Path = tmp_path_factory.mktemp("template")
        write_tokenizer(directory, template)
        made[name] = PromptEncoder.from_dir(directory)
    return made


@given(
    name=st.sampled_from(sorted(REWRITING)),
    system=words,
    said=st.lists(st.tuples(words, words), max_size=3),
    next_words=words,
)
def test_whatever_the_user_says_next(
    encoders: dict[str, PromptEncoder], name: str, system: str, said: list[tuple[str, str]], next_words: str
) -> None:
    encoder, messages = encoders[name], [Message("system", system)]
    for question, answer in said:
        messages += [Message("user", question), Message("assistant", answer)]
    common = anticipated(encoder, messages, TOOLS, template_kwargs={}, probes="user")
    if common is None:
        return
    whole = encoder.render_chat([*messages, Message("user", next_words)], TOOLS)
    assert whole.key.startswith(common.key)
    ids = encoder.encode(common)
    assert encoder.encode(whole)[: len(ids)].tolist() == ids.tolist()


@given(kind=st.sampled_from(KINDS), said=words, blanks=st.text("\n ", max_size=3), next_words=words)
def test_whatever_the_tokenizer(kind: str, said: str, blanks: str, next_words: str) -> None:
    encoder, messages = encoder_of(kind), [Message("system", said + blanks)]
    common = anticipated(encoder, messages, TOOLS, template_kwargs={}, probes="user")
    whole = encoder.render_chat([*messages, Message("user", blanks + next_words)], TOOLS)
    assert common is not None and whole.key.startswith(common.key)
    ids = encoder.encode(common)
    assert encoder.encode(whole)[: len(ids)].tolist() == ids.tolist()


def test_nearly_all_of_the_past_is_in_it(encoders: dict[str, PromptEncoder]) -> None:
    messages = [Message("system", "Be brief."), Message("user", "Why?"), Message("assistant", "So it is, they say.")]
    for name in sorted(REWRITING):
        common = anticipated(encoders[name], messages, TOOLS, template_kwargs={}, probes="user")
        assert common is not None
        whole = encoders[name].render_chat([*messages, Message("user", "Oh.")], TOOLS)
        cue = len(encoders[name].encode(whole)) - len(encoders[name].encode(common))
        assert cue <= 25, name


def called(*ids: str | None) -> Message:
    return Message("assistant", "", tool_calls=tuple(ToolCall(each, "look", '{"n":1}') for each in ids))


@pytest.mark.parametrize("name", ["ids", "no ids"])
def test_results_of_calls_whose_ids_nobody_knows_yet(encoders: dict[str, PromptEncoder], name: str) -> None:
    encoder, user = encoders[name], Message("user", "Look!")
    common = anticipated(encoder, [user, called(None, None)], TOOLS, template_kwargs={}, probes="tool")
    assert common is not None
    results = [Message("tool", "Nothing.", tool_call_id=each) for each in ("x1", "y2")]
    whole = encoder.render_chat([user, called("x1", "y2"), *results], TOOLS)
    assert whole.key.startswith(common.key)
    text = encoder.readable(common.key)
    assert text.count('look{"n":1}') == (1 if name == "ids" else 2), "the first id ends what is common"


def test_words_behind_results_may_rewrite_what_was_before(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, REWRITING["thoughts dropped"])
    encoder = PromptEncoder.from_dir(tmp_path)
    messages = [Message("user", "Look!"), replace(called(None), content="thinking I look.")]
    plain, with_words = (
        anticipated(encoder, messages, TOOLS, template_kwargs={}, probes=probes) for probes in ("tool", "tool_user")
    )
    assert plain is not None and with_words is not None
    assert b"thinking" in plain.key and b"thinking" not in with_words.key and b"I look." in with_words.key


def test_with_known_ids_they_are_part_of_it(encoders: dict[str, PromptEncoder]) -> None:
    messages = [Message("user", "Look!"), called("x1", "y2")]
    known = anticipated(encoders["ids"], messages, TOOLS, template_kwargs={}, probes="tool", call_ids=["x1", "y2"])
    assert known is not None and "y2<|im_end|><|tool|>" in encoders["ids"].readable(known.key)


def test_where_nothing_can_be_foreseen(tmp_path: Path) -> None:
    for template in ("{{ raise_exception('no') }}", "{{ messages[-1].content }}", ""):
        (tmp_path / "m").mkdir(exist_ok=True)
        write_tokenizer(tmp_path / "m", template)
        encoder = PromptEncoder.from_dir(tmp_path / "m")
        assert anticipated(encoder, [Message("system", "Hm.")], None, template_kwargs={}, probes="user") is None


def test_what_the_template_is_told_counts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "{{ mood }}<|im_start|>{{ messages[-1].content }}")
    encoder = PromptEncoder.from_dir(tmp_path)
    common = anticipated(encoder, [], None, template_kwargs={"mood": "calm"}, probes="user")
    assert common is not None and encoder.readable(common.key) == "calm<|im_start|>"
