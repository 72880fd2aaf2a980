"""Templates render as transformers renders them, and fail as the caller's fault."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rekindle.errors import BadRequest, ModelRefused
from rekindle.text.arguments import arguments_for_template
from rekindle.text.growth import analyse_growth
from rekindle.text.messages import GUARD
from rekindle.text.template import ChatTemplate
from tests.text import factories
from tests.tiny_models import PARTS_TEMPLATE

FEATURES = (
    "{%- set ns = namespace(n=0) -%}\n"
    "{% for m in messages %}\n"
    "    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
    "    {% set ns.n = ns.n + 1 %}\n"
    "{% generation %}[{{ ns.n }}:{{ m.role }}] {{ m.content | trim | tojson }}{% endgeneration %}\n"
    "{% endfor %}{{ dict(a=1) | tojson(indent=2) }} {{ '<é>' | tojson }} {{ '<é\"😀>' | tojson(ensure_ascii=True) }}"
    "{% if tools %}{{ tools | tojson(sort_keys=True, separators=(',', ':')) }}{% endif %}{{ missing }}"
)
MESSAGES = [
    {"role": "user", "content": " Zürich <b> "},
    {"role": "skip", "content": ""},
    {"role": "assistant", "content": "ok"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d<é>"}}]


@pytest.mark.parametrize("source", [FEATURES, factories.CHAT, factories.MOVES_SYSTEM, factories.TRIMS])
def test_renders_like_transformers(source: str) -> None:
    (expected,), _ = render_jinja_template([MESSAGES], tools=TOOLS, chat_template=source, add_generation_prompt=True)
    assert ChatTemplate({"default": source}, {}).render(MESSAGES, TOOLS) == expected


def test_content_is_in_parts_where_a_template_writes_nothing_else() -> None:
    """As of models that see: of a text they would write each character's part, which is nothing."""
    template = ChatTemplate({"default": PARTS_TEMPLATE}, {})
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    (expected,), _ = render_jinja_template([parts], chat_template=PARTS_TEMPLATE, add_generation_prompt=True)
    assert template.render(MESSAGES) == template.render(parts) == expected
    assert "Zürich" in expected and template.takes_parts
    assert not ChatTemplate({"default": factories.CHAT}, {}).takes_parts and not ChatTemplate({}, {}).takes_parts


def test_the_template_of_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}), "utf-8")
    assert ChatTemplate.from_dir(tmp_path).sources == {"default": "of the processor"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the tokenizer"}), "utf-8")
    assert ChatTemplate.from_dir(tmp_path).sources == {"default": "of the tokenizer"}


def test_arguments_print_as_generated() -> None:
    source = "{% set x = messages[0].args %}{{ x | tojson }} {{ x.a }} {% for k, v in x.items() %}{{ k }}{% endfor %}"
    value = arguments_for_template('{"a":1.0,"b":"x"}', str)
    assert ChatTemplate({"default": source}, {}).render([{"args": value}]) == '{"a":1.0,"b":"x"} 1.0 ab'


def test_escaping_leaves_the_guard_visible() -> None:
    text = ChatTemplate({"default": "{{ messages[0].content | tojson(ensure_ascii=True) }}"}, {}).render(
        [{"content": f"é{GUARD}\\"}]
    )
    assert text == f'"\\u00e9{GUARD}\\\\"'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{{ messages[0].nope.deeper }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}"],
)
def test_failures_are_bad_requests(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate({"default": source}, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_templates_cannot_reach_python(source: str) -> None:
    template = ChatTemplate({"default": source + "reached"}, {})
    with pytest.raises(BadRequest):
        template.render(MESSAGES)


def test_missing_and_broken_templates() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        ChatTemplate({}, {}).render(MESSAGES)
    with pytest.raises(ModelRefused, match="line 1"):
        ChatTemplate({"default": "{% if %}"}, {})


@pytest.mark.parametrize("entry", [{"x": 1}, "default", None, {"name": "default"}])
def test_templates_without_a_name_are_refused(tmp_path: Path, entry: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [entry]}))
    with pytest.raises(ModelRefused, match="each entry of chat_template needs a name and a template"):
        ChatTemplate.from_dir(tmp_path)


def test_read_from_a_directory(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": None,
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}plain"},
            {"name": "tool_use", "template": "tools"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_dir(tmp_path)
    assert template.render(MESSAGES) == "<s>plain"
    assert template.render(MESSAGES, TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_dir(tmp_path).render(MESSAGES) == "file"
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools of a file")
    template = ChatTemplate.from_dir(tmp_path)
    assert (template.render(MESSAGES), template.render(MESSAGES, TOOLS)) == ("file", "tools of a file")


def test_a_model_without_a_template_is_said_to_have_none(tmp_path: Path) -> None:
    template = ChatTemplate.from_dir(tmp_path)
    assert not template.exists and ChatTemplate({"default": ""}, {}).exists
    said = analyse_growth(template).summary()
    assert said == "this model has none, so it continues texts (/v1/completions) and takes no messages"


def test_literals_are_what_may_be_printed() -> None:
    literals = ChatTemplate({"default": "{# <no> #}<yes>{{ '\\u003cescaped>' }}"}, {}).literals()
    assert "<yes>" in literals
    assert "<escaped>" in literals
    assert not any("<no>" in text for text in literals)


def test_growth_of_conversations() -> None:
    def growth(source: str) -> tuple[str, ...]:
        found = analyse_growth(ChatTemplate({"default": source}, {}))
        assert found.summary()
        return found.plain, found.trailing_blank, found.thinking, found.tools

    assert growth(factories.CHAT) == ("nothing", "nothing", "nothing", "nothing")
    assert growth(factories.TRIMS) == ("nothing", "reply", "nothing", "nothing")
    assert growth(factories.STRIPS_THINKING) == ("nothing", "nothing", "reply", "nothing")
    assert growth(factories.MOVES_SYSTEM) == ("last_user",) * 4
    assert growth("{{ raise_exception('never') }}") == ("refused",) * 4
    tools_last = factories.CHAT.replace(
        "{{ m.content }}", "{% if loop.last and tools %}TOOLS{% endif %}{{ m.content }}"
    )
    assert growth(tools_last) == ("nothing", "nothing", "nothing", "last_user")
    cue = factories.CHAT + "{% if add_generation_prompt %}<think></think>{% endif %}"
    assert growth(cue)[0] == "cue"


def test_growth_sees_clocks_and_alternation() -> None:
    template = ChatTemplate({"default": factories.DATED}, {}, clock=lambda: datetime(2024, 1, 1))
    assert analyse_growth(template).dated
    assert not analyse_growth(ChatTemplate({"default": factories.CHAT}, {})).dated
    strict = analyse_growth(ChatTemplate({"default": factories.REFUSES_TWO_USERS}, {}))
    assert (strict.two_users, strict.plain) == (False, "nothing")
    assert analyse_growth(ChatTemplate({"default": factories.CHAT}, {})).two_users
