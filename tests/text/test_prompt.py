"""Rendering, encoding and keys: ids and text say the same, control strings in content are text, threads do not race."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from rekindle.errors import BadRequest, ModelRefused
from rekindle.text.messages import GUARD, Message, ToolCall
from rekindle.text.prompt import PromptEncoder
from rekindle.text.template import ChatTemplate
from rekindle.text.tokenizer import TokenizerFile
from rekindle.text.vocabulary import MARK, AddedToken, ControlTokens, control_code, control_id, find_control_tokens
from tests.text import factories
from tests.text.factories import KINDS, encoder_of, full_tokenizer, odd_ids, plain_texts, texts


def special(kind: str, spelling: str) -> int:
    token_id = full_tokenizer(kind).token_to_id(spelling)
    assert token_id is not None
    return int(token_id)


def count(ids: np.ndarray, token_id: int) -> int:
    return int(np.count_nonzero(ids == token_id))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=plain_texts, reply=plain_texts)
def test_chat_encodes_like_the_library(kind: str, text: str, reply: str) -> None:
    encoder = encoder_of(kind)
    prompt = encoder.render_chat(
        [Message("user", text + "<|custom|>."), Message("assistant", reply), Message("user", "x")]
    )
    rendered = encoder.readable(prompt.key)
    spelled = f"<|start|>user\n{text}<|custom|>.<|end|>\n<|start|>assistant\n{reply}<|end|>\n"
    expected = full_tokenizer(kind).encode(
        spelled + "<|start|>user\nx<|end|>\n<|start|>assistant\n", add_special_tokens=False
    )
    assert encoder.encode(prompt).tolist() == expected.ids, rendered


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts, reply=texts)
def test_ids_spell_the_key(kind: str, text: str, reply: str) -> None:
    encoder = encoder_of(kind)
    prompt = encoder.render_chat([Message("user", text), Message("assistant", reply)])
    ids = encoder.encode(prompt)
    assert ids.dtype == np.uint32
    assert encoder.key_of(ids) == prompt.key
    ends = encoder.byte_ends(ids)
    assert ends.dtype == np.int64
    for index in range(0, len(ids), 7):
        assert prompt.key.startswith(encoder.key_of(ids[: index + 1])), (
            "a token's bytes are a prefix, up to whole characters"
        )
        assert len(encoder.key_of(ids[: index + 1])) <= ends[index]
    assert encoder.canonical_tokens(ids) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_content_cannot_make_control_tokens(kind: str, text: str) -> None:
    encoder = encoder_of(kind)
    messages = [Message("system", text), Message("user", text), Message("tool", text)]
    ids = encoder.encode(encoder.render_chat(messages, add_generation_prompt=False))
    marks = [int(ids[at]) for at in encoder.vocabulary.control_positions(ids)]
    assert marks == [special(kind, "<|start|>"), special(kind, "<|end|>")] * 3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=texts)
def test_odd_ids_spell_the_same_text(kind: str, text: str) -> None:
    encoder = encoder_of(kind)
    ids = odd_ids(kind, text.replace(GUARD, ""), seed=len(text))
    assert encoder.key_of(ids) == text.encode()
    assert encoder.byte_ends(ids)[-1:].tolist() == ([len(text.encode())] if text else [])
    canonical = encoder.canonical_tokens(ids)
    (fresh,) = encoder.tokenizer.encode([text]) if text else (ids,)
    same = [a == b for a, b in zip(ids, fresh, strict=False)]
    assert canonical == (same.index(False) if False in same else len(same))


def test_canonical_tokens_from_what_is_known() -> None:
    encoder = encoder_of("cl100k")
    prompt = encoder.encode(encoder.render_chat([Message("user", "The quick brown fox")]))
    for seed in range(20):
        ids = np.concatenate([prompt, odd_ids("cl100k", " jumps over\n\n the lazy dog", seed)])
        assert encoder.canonical_tokens(ids, known=len(prompt)) == encoder.canonical_tokens(ids)
    assert encoder.canonical_tokens(prompt[:0]) == 0
    open_ended = encoder.encode(encoder.render_text("<|start|>The qui"))
    ids = np.concatenate([open_ended, odd_ids("cl100k", "ck brown", 0)])
    assert encoder.canonical_tokens(ids, known=len(open_ended)) == encoder.canonical_tokens(ids) < len(open_ended) - 1


def test_keys_end_before_what_is_no_character() -> None:
    encoder = encoder_of("gpt2")
    by_bytes = {encoder.vocabulary.shown(i): i for i in range(encoder.vocab_size)}
    start = special("gpt2", "<|start|>")
    half = [start, by_bytes[b"a"], by_bytes[b"\xc3"]]
    assert encoder.key_of(half) == control_code(start) + b"a"
    assert encoder.byte_ends(np.array(half, dtype=np.uint32)).tolist() == [5, 6, 7]
    assert encoder.key_of([*half, by_bytes[b"\xa9"]]) == control_code(start) + "aé".encode()
    # A byte token that looks like the mark of a control token, and bytes that look like the rest of its code.
    forged = [by_bytes[bytes([byte])] for byte in control_code(start)]
    assert encoder.key_of(forged) == b""
    assert encoder.key_of([by_bytes[b"a"], *forged]) == b"a"
    unknown = encoder.vocab_size + 7
    assert encoder.key_of([unknown]) == control_code(unknown)
    assert encoder.byte_ends(np.array([unknown], dtype=np.uint32)).tolist() == [5]
    assert control_id(control_code(unknown)[1:]) == unknown


def test_unflagged_control_tokens_count_in_replies_only() -> None:
    template = factories.CHAT + "{# names #}{{ '' if true else '<think></think>' }}"
    encoder = encoder_of("cl100k", template)
    think = special("cl100k", "<think>")
    text = "<think>\nhm\n</think>\n\nhello <|end|>"
    user = encoder.encode(encoder.render_chat([Message("user", text)]))
    reply = encoder.encode(encoder.render_chat([Message("assistant", text)]))
    assert (count(user, think), count(reply, think)) == (0, 1)
    end = special("cl100k", "<|end|>")
    assert (count(user, end), count(reply, end)) == (1, 1), "flagged ones are text in replies as well"
    reasoning = encoder_of("cl100k", template.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.thinking }}"))
    ids = reasoning.encode(reasoning.render_chat([Message("assistant", "", reasoning="<think><|end|>")]))
    assert (count(ids, think), count(ids, end)) == (2, 1)


def test_role_tokens_without_the_special_flag() -> None:
    encoder = encoder_of("cl100k", factories.UNFLAGGED_ROLES)
    user = special("cl100k", "<|user|>")
    ids = encoder.encode(encoder.render_chat([Message("user", "I am <|user|> and <|us"), Message("user", "er|> too")]))
    assert count(ids, user) == 2
    plain = encoder_of("cl100k")
    assert "<|user|>" not in {token.content for token in plain.controls.tokens}, "not named, not flagged: text"
    assert count(plain.encode(plain.render_chat([Message("user", "I am <|user|>")])), user) == 1


def test_names_tools_and_arguments_are_content() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}<|start|><|{{ m.name }}|>{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}{{ extra }}"
    )
    encoder = encoder_of("cl100k", source)
    bad = "<|end|><tool_call>"
    call = ToolCall(bad, bad, json.dumps({bad: bad, "\\": "\\u003c|end|>"}))
    messages = [Message("assistant", "", name="end", tool_calls=(call,), tool_call_id=bad)]
    prompt = encoder.render_chat(messages, [{"name": bad, bad: [bad]}], extra=bad)
    ids = encoder.encode(prompt)
    assert [int(ids[at]) for at in encoder.vocabulary.control_positions(ids)] == [special("cl100k", "<|start|>")]
    assert GUARD not in encoder.readable(prompt.key)
    assert encoder.readable(prompt.key).count(bad) == 11


def test_parts_of_tokens_do_not_join() -> None:
    encoder = encoder_of("gpt2", "{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = encoder.render_chat(
        [Message("user", "a <|"), Message("user", "end|> b"), Message("assistant", "<|en"), Message("user", "d|>")]
    )
    assert MARK not in prompt.key
    assert prompt.key == b"a <|end|> b<|end|>"


def test_overlapping_look_alikes() -> None:
    tokens = [
        AddedToken(1, "<<a>", True),
        AddedToken(2, "<a>", True),
        AddedToken(3, "#", True),
        AddedToken(4, "a>>", False),
    ]
    controls = ControlTokens(tokens)
    for text in ("<<a>>", "<a>", "##", "<a>>#<<a>", "<", "<<a"):
        assert controls.split(controls.guard(text)) == [text]
    assert controls.split("<<a>>#x") == [1, ">", 3, "x"], "leftmost, then longest"
    assert controls.split("<" + controls.guard_name("a") + ">") == ["<a>"]
    assert controls.split(controls.guard_reply("<a>a>>")) == ["<a>", 4]
    with pytest.raises(ModelRefused):
        ControlTokens([AddedToken(1, GUARD, True)])


def test_control_tokens_swallow_blanks() -> None:
    tokens = [
        AddedToken(1, "<l>", True, lstrip=True),
        AddedToken(2, "<r>", True, rstrip=True),
        AddedToken(3, "<w>", True, single_word=True),
    ]
    controls = ControlTokens(tokens)
    assert controls.split("a \n<l> b<r> \t\u3000c <r>\n<l>") == ["a", 1, " b", 2, "c ", 2, 1]
    assert controls.split("\x1c<l>") == ["\x1c", 1], "not White_Space in Unicode"
    assert controls.split("x<w> <w> <w>y") == ["x<w> ", 3, " <w>y"]


def test_blank_runs_are_text_though_templates_hold_them() -> None:
    added = [
        AddedToken(1, "\n\n", False),
        AddedToken(2, "▁▁", False),
        AddedToken(3, "<u>", False),
        AddedToken(4, "<x>", False),
    ]
    assert [token.id for token in find_control_tokens(added, ["a\n\n  b▁▁<u>"])] == [3]


@pytest.mark.parametrize("kind", ["bos", "cl100k", "prepend", "first"])
def test_completions_get_leading_tokens_once(kind: str) -> None:
    encoder, full = encoder_of(kind), full_tokenizer(kind)
    for text in ("Hello world", " Hello", "", "a<|end|> b<|custom|>c"):
        assert encoder.encode(encoder.render_text(text)).tolist() == full.encode(text).ids, text
    bos = special(kind, "<s>")
    ids = encoder.encode(encoder.render_text("<s>Hello<s>"))
    assert count(ids, bos) == 2, "its own is not doubled"
    template = encoder_of(kind, factories.UNFLAGGED_ROLES)
    chat = template.encode(template.render_chat([Message("user", "Hello")]))
    assert count(chat, bos) == 1, "a chat has what its template writes"
    with pytest.raises(BadRequest):
        encoder.render_text(f"a{GUARD}")


def test_bos_by_config() -> None:
    file = TokenizerFile(factories.tokenizer_json("cl100k").encode())
    encoder = PromptEncoder(file, {"bos_token": "<s>", "add_bos_token": True}, ChatTemplate({}, {}))
    bos = special("cl100k", "<s>")
    assert encoder.encode(encoder.render_text("x"))[0] == bos
    assert count(encoder.encode(encoder.render_text("<s>x")), bos) == 1


def test_the_library_renumbers_and_ids_are_mapped_back() -> None:
    encoder, full = encoder_of("cl100k"), full_tokenizer("cl100k")
    for spelling in factories.KEPT:
        token_id = special("cl100k", spelling)
        data = json.loads(factories.tokenizer_json("cl100k"))
        controls = {token.content for token in encoder.controls.tokens}
        data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] not in controls]
        assert full.from_str(json.dumps(data)).token_to_id(spelling) != token_id, "the trap exists"
        assert token_id in encoder.encode(encoder.render_chat([Message("user", f"see {spelling}!")]))


def test_ids_of_the_file_are_the_truth() -> None:
    data = json.loads(factories.tokenizer_json("cl100k"))
    for entry in data["added_tokens"]:
        entry["id"] += 500 if entry["content"] in factories.KEPT else 0
    encoder = PromptEncoder(TokenizerFile(json.dumps(data).encode()), {}, ChatTemplate({}, {}))
    gaps = encoder.encode(encoder.render_text("<|custom|>"))
    assert gaps.tolist() == [special("cl100k", "<|custom|>") + 500]
    assert encoder.key_of(gaps) == b"<|custom|>"


def test_control_words_of_the_model_are_not_found_in_text() -> None:
    """A model with `ignore_merges` takes a whole pre-token from its words, also one that is a control token."""
    data = json.loads(factories.tokenizer_json("unknown"))
    data["model"]["ignore_merges"] = True
    assert "<s>" in data["model"]["vocab"]
    encoder = PromptEncoder(
        TokenizerFile(json.dumps(data).encode()), {}, ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    )
    prompt = encoder.render_chat([Message("user", "a <s> b")])
    assert prompt.key == b"a <s> b"
    assert encoder.key_of(encoder.encode(prompt)) == prompt.key


def test_text_that_is_changed_is_compared_by_ids() -> None:
    encoder = encoder_of("lower")
    assert not encoder.compares_text
    assert all(encoder_of(kind).compares_text for kind in KINDS)
    prompt = encoder.render_chat([Message("user", "The Fox <|end|>")])
    full = full_tokenizer("lower")
    ids = encoder.encode(prompt)
    assert ids.tolist()[-6:] == full.encode("<|end|>\n<|start|>assistant\n", add_special_tokens=False).ids[-6:]
    assert encoder.key_of(ids) == prompt.key
    assert len(prompt.key) == 5 * len(ids) == encoder.byte_ends(ids)[-1]
    assert encoder.encode_rest(prompt, 15).tolist() == ids[3:].tolist()
    assert encoder.canonical_tokens(ids) == len(ids)
    odd = np.concatenate([ids, odd_ids("lower", "the quick", 3)])
    assert encoder.canonical_tokens(odd) < len(odd)
    assert "the fox" in encoder.readable(prompt.key)


def test_two_threads_encode_the_same() -> None:
    encoder = encoder_of("gpt2")
    prompts = [
        encoder.render_chat([Message("user", f"{n} <|end|> <think> fox {n * n}"), Message("assistant", "<tool_call>")])
        for n in range(60)
    ]
    alone = [encoder.encode(prompt).tolist() for prompt in prompts]

    def encode_all(_: int) -> list[list[int]]:
        return [encoder.encode(prompt).tolist() for prompt in prompts]

    with ThreadPoolExecutor(4) as pool:
        assert all(found == alone for found in pool.map(encode_all, range(8)))


def test_from_a_directory(tmp_path: Path) -> None:
    directory = factories.write_model_dir(tmp_path, "bos")
    encoder = PromptEncoder.from_dir(directory)
    assert len(encoder.digest) == 32
    assert encoder.vocab_size == 1 + max(
        entry["id"] for entry in json.loads(factories.tokenizer_json("bos"))["added_tokens"]
    )
    assert encoder.decode(encoder.encode(encoder.render_text("Hello <|end|>🙂"))) == "Hello 🙂"
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefused):
        PromptEncoder.from_dir(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelRefused):
        PromptEncoder.from_dir(directory)


def test_messages_are_found_in_the_prompt() -> None:
    encoder = encoder_of("cl100k", factories.TRIMS)
    messages = [
        Message("system", "  Be kind. "),
        Message("user", "hi <|end|>"),
        Message("assistant", ""),
        Message("user", "hi"),
    ]
    prompt = encoder.render_chat(messages)
    ends = encoder.message_ends(prompt, messages)
    assert [
        prompt.key[:end].endswith(text)
        for end, text in zip(ends, (b"Be kind.", b"hi <|end|>", b"", b"hi"), strict=True)
    ] == [True] * 4
    assert ends[1] == ends[2] < ends[3]


STRICT = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('system comes first') }}{% endif %}
{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('nobody speaks twice') }}
{%- endif %}{{ '<|user|>' + message.role + ': ' + message.content }}
{%- endfor %}"""
ONCE = STRICT.replace("and messages[loop.index0 - 1].role == 'user'", "and false")


BEHIND_REPLIES = """
{%- for message in messages %}
{%- if message.role == 'user' and not loop.first and messages[loop.index0 - 1].role != 'assistant' %}
{{- raise_exception('the user speaks behind replies') }}
{%- endif %}{{ '<|user|>' + message.role + ': ' + message.content }}
{%- endfor %}"""
NO_LATE_SYSTEM = BEHIND_REPLIES.replace(
    "{%- endif %}{{ '",
    "{%- elif message.role == 'system' and not loop.first %}"
    "{{- raise_exception('system comes first') }}{%- endif %}{{ '",
)


def test_words_behind_a_result_go_into_it_where_a_template_refuses_them() -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("t", "look", "{}"),))
    result, word, late = Message("tool", "b", tool_call_id="t"), Message("user", "c"), Message("system", "d")
    head = [Message("user", "a"), call]
    encoder = encoder_of("gpt2", BEHIND_REPLIES)
    folded = Message("tool", "b\n\nc", tool_call_id="t")
    assert encoder.render_chat([*head, result, result, word]) == encoder.render_chat([*head, result, folded])
    assert encoder.render_chat([*head, result, word, late]) == encoder.render_chat([*head, folded, late])
    strict, all_folded = encoder_of("gpt2", NO_LATE_SYSTEM), Message("tool", "b\n\nc\n\nd", tool_call_id="t")
    assert strict.render_chat([*head, result, word, late]) == strict.render_chat([*head, all_folded])
    turns = encoder_of("gpt2", STRICT)
    spoken = [*head, result, word, word]
    assert turns.render_chat(spoken) == turns.render_chat([*head, result, Message("user", "c\n\nc")]), "not refused"


def test_a_conversation_that_a_template_refuses_is_told_in_a_form_that_it_takes() -> None:
    system, asked, late = Message("system", "a"), Message("user", "b"), Message("system", "c")
    messages = [system, Message("system", "d"), asked, late, Message("user", "e"), Message("assistant", "f"), late]
    once = [Message("system", "a\n\nd"), asked, Message("user", "c"), *messages[4:6], Message("user", "c")]
    turns = [once[0], Message("user", "b\n\nc\n\ne"), Message("assistant", "f"), Message("user", "c")]
    for template, form in ((ONCE, once), (STRICT, turns)):
        encoder = encoder_of("gpt2", template)
        assert encoder.render_chat(messages) == encoder.render_chat(form)
        assert encoder.readable(encoder.render_chat(form).key).count("c") == 2
    free = encoder_of("gpt2", ONCE.replace("{{- raise_exception('system comes first') }}", ""))
    assert free.readable(free.render_chat(messages).key).count("system: c") == 2, "what is taken stays as it is"
    none = encoder_of("gpt2", factories.REFUSES_TWO_USERS)
    assert none.render_chat(messages[:3]) == none.render_chat([Message("user", "a\n\nd\n\nb")])
    with pytest.raises(BadRequest, match="never"):
        encoder_of("gpt2", "{{ raise_exception('never') }}").render_chat(messages)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"id": 4_000_000_000, "content": "<|far|>"}, "id 4000000000, ids are below 16777216"),
        ({"id": -1, "content": "<|less|>"}, "id -1"),
        ({"id": 9, "content": ""}, "added token 9 is empty"),
        ({"id": None, "content": "<|none|>"}, "TypeError"),
        ({"content": "<|bare|>"}, "KeyError"),
        ("<|word|>", "AttributeError"),
    ],
)
def test_added_tokens_that_no_key_can_spell_are_refused(entry: Any, reason: str) -> None:
    data = json.loads(factories.tokenizer_json("bos"))
    data["added_tokens"].append(entry)
    with pytest.raises(ModelRefused, match=rf"tokenizer\.json cannot be read: .*{reason}"):
        TokenizerFile(json.dumps(data).encode())
