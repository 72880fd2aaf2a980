"""How a model writes replies is found by what its template makes of probes; an odd template has no form."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rekindle.errors import BadRequest
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.replies import (
    ParsedReply,
    ReplyFormat,
    ReplyStream,
    ThinkingFormat,
    begin_reply,
    find_reply_ends,
    find_reply_format,
    opened_by,
)
from rekindle.text.replies.channels import ChannelForm
from rekindle.text.replies.envelope import EnvelopeForm
from rekindle.text.replies.keyed import KeyedForm
from rekindle.text.replies.named import NamedForm, NameKeyForm
from rekindle.text.replies.pythonic import PythonicForm
from rekindle.text.replies.reader import CallMarks
from rekindle.text.replies.tagged import TaggedForm, Tags
from rekindle.text.stream import structured
from rekindle_pocket import MODEL_DIR
from tests.text.factories import CHAT, KINDS, STRIPS_THINKING, encoder_of
from tests.text.families import FAMILIES, SILENT, encoder_for, encoder_with, read_reply

G = "\ufdd0"
THINK = ThinkingFormat("<think>", "</think>", "\n", "\n", "\n\n")
QWEN = EnvelopeForm(CallMarks("<tool_call>", "</tool_call>", "\n"))
ARG_KEYS = Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "", lines=False)


def invoke(prefix: str) -> Tags:
    """The tags of calls that are invoked by name, with words that begin like this."""
    return Tags(
        (f'<{prefix}invoke name="', '">'),
        (f'<{prefix}parameter name="', '"'),
        ("", f"</{prefix}parameter>"),
        f"</{prefix}invoke>",
        lines=False,
    )


ASKED = Message("user", "What is in the attic?")
ARGUMENTS = '{"floor": 3, "place": "the \\"old\\" attic\\n<b>"}'
HOLDS_ONE = ("llama", "channels")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"properties": {"floor": {"type": "integer"}, "place": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize(
    ("family", "thinking", "tools"),
    [
        ("hermes", THINK, QWEN),
        ("opened", THINK, QWEN),
        ("empty", THINK, QWEN),
        ("spelled", THINK, QWEN),
        ("stripped", THINK, None),
        ("coder", None, TaggedForm(CallMarks("<tool_call>", "</tool_call>", "\n", tag="<function="))),
        ("glm", None, TaggedForm(CallMarks("<tool_call>", "</tool_call>", "\n"), "", ARG_KEYS)),
        (
            "glm_dense",
            None,
            TaggedForm(
                CallMarks(G + "<tool_call>", G + "</tool_call>"),
                "",
                replace(ARG_KEYS, key=(G + "<arg_key>", G + "</arg_key>")),
            ),
        ),
        (
            "invoked",
            None,
            TaggedForm(
                CallMarks("<minimax:tool_call>", "</minimax:tool_call>", "\n", tag='<invoke name="'), tags=invoke("")
            ),
        ),
        (
            "dsml",
            None,
            TaggedForm(
                CallMarks(
                    *(f"<{end}{G}|DSML|function_calls>" for end in ("", "/")),
                    "\n\n",
                    tag=f'<{G}|DSML|invoke name="',
                ),
                tags=invoke(G + "|DSML|"),
            ),
        ),
        (
            "seed",
            None,
            TaggedForm(
                CallMarks(G + "<seed:tool_call>", G + "</seed:tool_call>", "\n", tag="<function="),
                tags=Tags(lines=False),
            ),
        ),
        (
            "actions",
            None,
            EnvelopeForm(
                CallMarks(G + "<|START_ACTION|>", G + "<|END_ACTION|>", listed=True),
                "parameters",
                "",
                name_key="tool_name",
            ),
        ),
        ("functions", None, NamedForm(CallMarks("<function=", "</function>"), ">")),
        (
            "kimi",
            None,
            NamedForm(
                CallMarks(G + "<|tool_call_begin|>", G + "<|tool_call_end|>"),
                G + "<|tool_call_argument_begin|>",
                is_named_by_id=True,
            ),
        ),
        (
            "distilled",
            None,
            NamedForm(
                CallMarks(f"{G}<|tool▁call▁begin|>function{G}<|tool▁sep|>", f"{G}<|tool▁call▁end|>"),
                "```json",
                blank="\n",
            ),
        ),
        (
            "name_then_fence",
            None,
            NamedForm(CallMarks("<tool_call>", "</tool_call>", "\n"), "```json", blank="\n"),
        ),
        (
            "name_keys",
            ThinkingFormat(G + "<|inner_prefix|>", G + "<|inner_suffix|>"),
            NameKeyForm(CallMarks(G + "<|tools_prefix|>", G + "<|tools_suffix|>", listed=True)),
        ),
        ("silent_list", None, EnvelopeForm(CallMarks(G + "<|tool_call|>", listed=True), blank="")),
        (
            "silent_pythonic",
            None,
            PythonicForm(CallMarks(G + "<|tool_call_start|>", G + "<|tool_call_end|>", listed=True, item="")),
        ),
        ("silent_hermes", None, EnvelopeForm(CallMarks("<tool_call>", "</tool_call>"))),
        (
            "pythonic",
            None,
            PythonicForm(CallMarks(G + "<|tool_call_start|>", G + "<|tool_call_end|>", listed=True, item="")),
        ),
        (
            "python_lines",
            None,
            PythonicForm(
                CallMarks("<function_calls>", "</function_calls>", "\n", listed=True, item=""), blank="\n", lead=""
            ),
        ),
        ("llama", None, EnvelopeForm(CallMarks("", tag=G + "<|python_tag|>"), "parameters", "")),
        ("mistral_list", None, EnvelopeForm(CallMarks(G + "[TOOL_CALLS]", listed=True), blank=" ")),
        (
            "mistral_args",
            ThinkingFormat(G + "[THINK]", G + "[/THINK]"),
            NamedForm(CallMarks(G + "[TOOL_CALLS]"), G + "[ARGS]"),
        ),
        ("mistral_id", None, NamedForm(CallMarks(G + "[TOOL_CALLS]"), G + "[ARGS]", G + "[CALL_ID]")),
        (
            "keyed",
            ThinkingFormat(G + "<|channel>thought", G + "<channel|>", "\n", "\n"),
            KeyedForm(CallMarks(G + "<|tool_call>", G + "<tool_call|>"), G + '<|"|>'),
        ),
        (
            "keyed_first",
            ThinkingFormat(G + "<|channel>thought", G + "<channel|>", "\n"),
            KeyedForm(CallMarks(G + "<|tool_call>", G + "<tool_call|>"), G + '<|"|>'),
        ),
        ("fenced", None, EnvelopeForm(CallMarks("```tool_code", "```", "\n"), "parameters")),
        (
            "channels",
            ThinkingFormat(f"{G}<|channel|>analysis{G}<|message|>", G + "<|end|>"),
            ChannelForm(
                *(G + mark for mark in ("<|start|>", "<|channel|>", "<|message|>")),
                (G + "<|end|>", G + "<|return|>", G + "<|call|>"),
                (" to=functions.", f"{G}<|channel|>commentary json{G}<|message|>"),
                G + "<|constrain|>",
            ),
        ),
    ],
)
def test_the_form_is_what_the_template_writes(family: str, thinking: ThinkingFormat | None, tools: object) -> None:
    found = find_reply_format(encoder_for(family))
    assert found.thinking == thinking
    assert found.tools == tools
    assert found.one_call == (family in HOLDS_ONE)
    assert found.call_ids == ("short" if family.startswith("mistral") else "long")


@cache
def format_of(family: str, kind: str) -> ReplyFormat:
    return find_reply_format(encoder_for(family, kind))


@pytest.mark.parametrize("kind", [*KINDS, "lower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_makes_no_difference(family: str, kind: str) -> None:
    """But for a blank behind a mark, which some tokenizers add themselves."""
    found, expected = (format_of(family, each) for each in (kind, "cl100k"))
    assert str(found.tools).replace("blank=''", "blank=' '") == str(expected.tools).replace("blank=''", "blank=' '")
    assert found.thinking == expected.thinking


@pytest.mark.parametrize("family", FAMILIES)
def test_only_marks_are_visible(family: str) -> None:
    encoder = encoder_for(family)
    found = find_reply_format(encoder)
    names = {token.id: token.content for token in encoder.controls.tokens}
    assert {G + names[token_id] for token_id in found.visible} == set(found.specials)
    assert {names[token_id] for token_id in found.visible} <= set(FAMILIES[family].special)
    assert not {"<|im_end|>", "</s>", "<|eot|>", "<turn|>"} & {names[token_id] for token_id in found.visible}
    assert all(mark not in found.specials for mark in ("[INST]", "<bos>"))


def test_the_bundled_model_calls_tools_and_does_not_think() -> None:
    found = find_reply_format(PromptEncoder.from_dir(MODEL_DIR))
    assert found == ReplyFormat(tools=EnvelopeForm())


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.tool_calls[0].function.name }}{% endfor %}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}{% endfor %}",
        "<|user|>{% for m in messages %}<|user|>{{ m.reasoning_content }}<|user|>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
    ],
)
def test_other_templates_have_no_form(template: str) -> None:
    assert find_reply_format(encoder_of("gpt2", template)) == ReplyFormat()


def test_a_name_and_json_behind_a_mark_are_a_form() -> None:
    assert find_reply_format(encoder_of("gpt2", CHAT)).tools == NamedForm(CallMarks("<tool_call>"), "")


def test_a_template_that_takes_thoughts_out_knows_their_marks() -> None:
    assert find_reply_format(encoder_of("cl100k", STRIPS_THINKING)).thinking == THINK


def test_reasoning_that_a_cue_opens_in_words_is_known() -> None:
    cue = "{% if add_generation_prompt %}<|user|>Here are my reasoning steps:\n{% endif %}"
    template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}" + cue
    found = find_reply_format(encoder_of("cl100k", template)).thinking
    assert found == ThinkingFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "\n", "\n", "\n")


def test_a_template_that_takes_no_tools_has_no_known_form() -> None:
    template = "Never write <tool_call>. {% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    assert find_reply_format(encoder_of("cl100k", template)).tools is None


@pytest.mark.parametrize(
    ("family", "text", "calls", "left"),
    [
        ("name_then_fence", "A <tool_call>element {the tag} is here.", [], None),
        ("name_then_fence", '<tool_call>look\n```\n{"p": 1}\n```\n</tool_call>', [("look", '{"p": 1}')], ""),
        ("name_then_fence", '<tool_call>look\n{"p": 1}</tool_call>', [("look", '{"p": 1}')], ""),
        ("name_keys", f'{G}<|tools_prefix|>[{{"": {{}}}}]{G}<|tools_suffix|>', [], None),
        ("name_keys", f'{G}<|tools_prefix|>[{{"\\ud800": {{}}}}]{G}<|tools_suffix|>', [], None),
        (
            "kimi",
            f"{G}<|tool_call_begin|>functions.look:0{G}<|tool_call_argument_begin|>{G}<|tool_call_end|>",
            [("look", "{}")],
            "",
        ),
        (
            "kimi",
            f"{G}<|tool_call_begin|>functions.:0{G}<|tool_call_argument_begin|>{{}}{G}<|tool_call_end|>",
            [],
            None,
        ),
    ],
)
def test_odd_calls_are_read_or_stay_text(
    family: str, text: str, calls: list[tuple[str, str]], left: str | None
) -> None:
    stream, said = ReplyStream(find_reply_format(encoder_for(family)), tools=True), ParsedReply()
    for event in [*(event for sign in text for event in stream.push(sign)), *stream.finish()]:
        said.take(event)
    assert [(call.name, call.arguments) for call in said.calls] == calls
    assert left is None or said.text == left


def test_ids_that_a_model_writes_twice_are_told_apart() -> None:
    call = f"{G}<|tool_call_begin|>functions.look:0{G}<|tool_call_argument_begin|>{{}}{G}<|tool_call_end|>"
    stream, said = ReplyStream(find_reply_format(encoder_for("kimi")), tools=True), ParsedReply()
    for event in stream.push(call * 2) + stream.finish():
        said.take(event)
    first, second = (call.id for call in said.calls)
    assert first == "functions.look:0" != second


def reply_of(encoder: PromptEncoder, message: Message) -> tuple[np.ndarray, str]:
    """The ids of a reply as the template writes it, up to its end, and the text of the whole."""
    prompt = encoder.render_chat([ASKED])
    whole = encoder.render_chat([ASKED, message], add_generation_prompt=False)
    assert whole.key.startswith(prompt.key)
    return encoder.encode_rest(whole, len(prompt.key)), structured(encoder, encoder.encode(whole))


def until_end(encoder: PromptEncoder, ids: np.ndarray, family: str) -> np.ndarray:
    """The ids that a model would have generated before its last token."""
    ends = {token.id for token in encoder.controls.tokens if token.content in FAMILIES[family].ends}
    return ids[: [int(token_id) in ends for token_id in ids].index(True)]


DROPS_TEXT = ("llama", "mistral_list", "channels", "keyed_first")
THINKS = ("hermes", "spelled", "special", "keyed", "channels")


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("opened", "empty", "stripped", "keyed_first", *SILENT)]
)
@pytest.mark.parametrize("kind", ["cl100k", "prepend", "first"])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_what_the_template_writes_is_read_back_and_written_the_same(family: str, kind: str, num_calls: int) -> None:
    encoder = encoder_for(family, kind)
    num_calls = 1 if family in HOLDS_ONE else num_calls
    form = find_reply_format(encoder)
    calls = tuple(ToolCall(id_for(family, form, number), "look", ARGUMENTS) for number in range(num_calls))
    text = "" if family in DROPS_TEXT else "Let me see."
    thought = "Up there?" if family in THINKS else None
    ids, whole = reply_of(encoder, Message("assistant", text, tool_calls=calls, reasoning=thought))
    said = read_reply(form, encoder, until_end(encoder, ids, family), tools=TOOLS)
    again = said.message()
    assert (again.content, again.reasoning) == (text, thought)
    assert [(call.name, call.arguments) for call in again.tool_calls] == [("look", ARGUMENTS)] * num_calls
    assert all(call.whole for call in said.calls) and said.has_whole_call
    _, rewritten = reply_of(encoder, again)
    assert [call.id for call in said.calls] == [call.id for call in again.tool_calls]
    for old, new in zip(calls, again.tool_calls, strict=True):
        rewritten = rewritten.replace(str(new.id), str(old.id))
    assert rewritten == whole


def id_for(family: str, form: ReplyFormat, number: int) -> str:
    """An id for a call of the tool `look`, as its model would write it or as it is made here."""
    return f"functions.look:{number}" if family == "kimi" else form.new_id()


def test_the_id_that_a_model_writes_is_that_of_its_call() -> None:
    """Its template renders nothing else of a call: with another id the name would be lost."""
    encoder = encoder_for("kimi")
    calls = tuple(ToolCall(f"functions.look:{number}", "look", ARGUMENTS) for number in (4, 5))
    ids, _ = reply_of(encoder, Message("assistant", "", tool_calls=calls))
    said = read_reply(find_reply_format(encoder), encoder, until_end(encoder, ids, "kimi"), tools=TOOLS)
    assert [(call.id, call.name) for call in said.calls] == [("functions.look:4", "look"), ("functions.look:5", "look")]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("opened", "empty", "keyed_first")])
def test_plain_replies_are_text(family: str) -> None:
    encoder = encoder_for(family)
    ids, _ = reply_of(encoder, Message("assistant", "Dust, <b>mostly</b>. {1: 2}"))
    for tools in (True, False):
        said = read_reply(find_reply_format(encoder), encoder, until_end(encoder, ids, family), tools=tools)
        assert (said.reasoning, said.text, said.calls) == ("", "Dust, <b>mostly</b>. {1: 2}", [])


@pytest.mark.parametrize("family", ["special", "mistral_list", "mistral_args", "mistral_id", "keyed", "channels"])
def test_text_that_looks_like_a_mark_is_text(family: str) -> None:
    """A reply whose text spells a call, token by token of text, calls nobody."""
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    call = ToolCall(form.new_id(), "look", ARGUMENTS)
    ids, _ = reply_of(encoder, Message("assistant", "", tool_calls=(call,)))
    spelled = structured(encoder, until_end(encoder, ids, family)).replace(G, "")
    as_text = encoder.encode(encoder.render_chat([Message("user", spelled)]))
    start = structured(encoder, as_text).partition(spelled)[0]
    said = read_reply(form, encoder, as_text[len(encoder.encode(encoder.continued(EMPTY, start))) :], tools=True)
    assert not said.calls
    assert spelled in said.text or family == "channels"


EMPTY = RenderedPrompt(b"")


@pytest.mark.parametrize(
    ("family", "opened"),
    [
        ("hermes", ""),
        ("opened", "<think>\n"),
        ("empty", "<think>\n\n</think>\n\n"),
        ("llama", ""),
        ("mistral_args", ""),
        ("keyed", ""),
        ("keyed_first", f"{G}<|channel>thought\n{G}<channel|>"),
        ("channels", ""),
    ],
)
def test_what_the_cue_has_begun(family: str, opened: str) -> None:
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    prompt = encoder.render_chat([Message("user", "<think>"), Message("assistant", "<think>\n"), ASKED])
    assert opened_by(form, encoder, prompt) == opened
    long = encoder.render_chat([Message("user", "é" * 3_000 + "<think>\n")])
    assert opened_by(form, encoder, long) == opened


def test_variables_of_the_template_open_and_close_thoughts() -> None:
    encoder = encoder_for("keyed")
    form = find_reply_format(encoder)
    prompt = encoder.render_chat([ASKED], enable_thinking=False)
    assert opened_by(form, encoder, prompt) == f"{G}<|channel>thought\n{G}<channel|>"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("stripped", *SILENT)])
def test_a_forced_call_is_told_when_the_model_goes_on(family: str) -> None:
    """The opening of a call, behind what the cue has begun, is tokens of the model; what follows are its arguments."""
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    prefix = form.opening("look")
    assert prefix is not None
    cue = encoder.render_chat([ASKED])
    prompt, opening = begin_reply(form, encoder, prompt=cue, prefix=prefix)
    assert structured(encoder, encoder.encode(prompt)).endswith(opening)
    assert opening.startswith(opened_by(form, encoder, cue))
    call = ToolCall(id_for(family, form, 0), "look", ARGUMENTS)
    ids, whole = reply_of(
        encoder_for({"opened": "hermes", "empty": "hermes", "keyed_first": "keyed"}.get(family, family)), _calling(call)
    )
    del ids
    rest = _arguments_of(whole, family)
    said = read_reply(form, encoder, encoder.encode(encoder.continued(EMPTY, rest)), opening=opening, tools=TOOLS)
    assert [(each.name, each.arguments, each.whole) for each in said.calls] == [("look", ARGUMENTS, True)]
    assert (said.reasoning, said.text) == ("", "")


def _calling(call: ToolCall) -> Message:
    return Message("assistant", "", tool_calls=(call,))


def _arguments_of(whole: str, family: str) -> str:
    """What follows the beginning of the call in a rendered reply, without the end of the turn."""
    behind = {
        "coder": "=look>\n",
        "seed": "=look>\n",
        "glm": "look\n",
        "glm_dense": "look",
        "invoked": '"look">\n',
        "dsml": '"look">\n',
        "pythonic": "look(",
        "actions": '"tool_name": "look", "parameters":',
        "functions": "=look>",
        "kimi": "look:",
        "distilled": "```json\n",
        "name_then_fence": "```json\n",
        "name_keys": '"look": ',
        "python_lines": "look(",
        "keyed": "look{",
        "keyed_first": "look{",
        "mistral_args": "[ARGS]",
        "mistral_id": "[ARGS]",
    }
    behind["channels"] = "json" + G + "<|message|>"
    mark = behind.get(family, ' "look", "parameters":' if "parameters" in whole else ' "look", "arguments":')
    rest = whole.rpartition(mark)[2]
    ends = [at for end in FAMILIES[family].ends if (at := rest.find(G + end)) >= 0]
    return rest[: min(ends)]


@pytest.mark.parametrize(
    ("family", "bridge"),
    [
        ("hermes", ""),
        ("opened", "<think>\n\n</think>\n\n"),
        ("empty", "<think>\n\n</think>\n\n"),
        ("channels", f"{G}<|channel|>final{G}<|message|>"),
    ],
)
def test_text_can_be_put_into_a_models_mouth(family: str, bridge: str) -> None:
    encoder = encoder_for(family)
    form = find_reply_format(encoder)
    prompt, opening = begin_reply(form, encoder, prompt=encoder.render_chat([ASKED]), prefix="The answer <is")
    assert opening == bridge + "The answer <is"
    assert structured(encoder, encoder.encode(prompt)).endswith(opening)
    rest = encoder.encode(encoder.continued(EMPTY, "> dust"))
    said = read_reply(form, encoder, rest, opening=opening, tools=True)
    assert (said.reasoning, said.text) == ("", "> dust")


def test_no_prefix_changes_no_prompt() -> None:
    encoder = encoder_for("opened")
    prompt = encoder.render_chat([ASKED])
    assert begin_reply(find_reply_format(encoder), encoder, prompt=prompt) == (prompt, "<think>\n")


def test_thoughts_and_text_beside_a_call_are_joined_where_the_template_refuses_them() -> None:
    call = (ToolCall("1", "look", "{}"),)
    encoder = encoder_for("channels")
    both = encoder.render_chat([ASKED, Message("assistant", "Wait.", tool_calls=call, reasoning="Hm.")])
    assert both == encoder.render_chat([ASKED, Message("assistant", "Hm.\n\nWait.", tool_calls=call)])
    hermes = encoder_for("hermes").render_chat([Message("assistant", "Wait.", tool_calls=call, reasoning="Hm.")])
    assert b"<think>" not in hermes.key and b"Hm.\n\nWait." not in hermes.key
    with pytest.raises(BadRequest, match="nine characters"):
        encoder_for("mistral_args").render_chat([Message("assistant", "a", tool_calls=call, reasoning="b")])


def test_ids_are_as_the_template_takes_them() -> None:
    short = find_reply_format(encoder_for("mistral_list"))
    ids = {short.new_id() for _ in range(1_000)}
    assert len(ids) == 1_000
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert find_reply_format(encoder_for("hermes")).new_id().startswith("call_")


ENDS = {
    "llama": {"<|eot|>"},
    "keyed": {"<turn|>"},
    "keyed_first": {"<turn|>"},
    "fenced": {"<end_of_turn>"},
    **{name: {"</s>"} for name in ("mistral_list", "mistral_args", "mistral_id")},
    "channels": {"<|return|>", "<|call|>"},
}


def ends_of(encoder: PromptEncoder) -> set[str]:
    contents = {token.id: token.content for token in encoder.controls.tokens}
    return {contents[each] for each in find_reply_ends(encoder)}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_after_a_reply_ends_one(name: str) -> None:
    assert ends_of(encoder_for(name)) == ENDS.get(name, {"<|im_end|>"})


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
THOUGHTS = "{% if false %}a thinker's mark{% endif %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TURN, {"<|im_end|>"}),
        (TURN + "<|im_start|>assistant\n", {"<|im_end|>"}),  # the cue comes in any case
        (THOUGHTS + TURN, set()),  # it may end thoughts as well, which are not shown
        (TURN.replace("<|im_end|>", "{{ '</s>' if m.role == 'assistant' else '<|im_end|>' }}") + THOUGHTS, {"</s>"}),
        (TURN.replace("<|im_end|>\n", "\n"), set()),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_only_what_ends_a_whole_reply_is_an_end(template: str, ends: set[str]) -> None:
    assert ends_of(encoder_with(template, ("<|im_start|>", "<|im_end|>", "</s>"))) == ends
