"""Explanations name the message, the texts and the likely cause, and quote stored text only to its owner."""

from __future__ import annotations

from datetime import datetime

import pytest

from rekindle.matching.explain import Explanation, explain, explain_elsewhere
from rekindle.matching.matcher import Matcher, StoredBranch
from rekindle.spec import Change
from rekindle.text.messages import Message, ToolCall
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from tests.text import factories
from tests.text.factories import encoder_of, make_encoder

RULES = "You are kind and brief, and you know the rules of this house by heart. " * 4
CHAT = [
    Message("system", RULES),
    Message("user", "What is the first rule?"),
    Message("assistant", "Be kind to guests."),
    Message("user", "And the second?"),
]


def run(
    encoder: PromptEncoder,
    before: list[Message],
    after: list[Message],
    *,
    reply: str = "",
    agent: str = "a",
    later: PromptEncoder | None = None,
) -> Explanation | None:
    """Store a prompt and its reply for agent "a", then explain what another prompt of `agent` is matched to."""
    spelled = encoder.render_chat(before).key + encoder.render_text(reply).key
    ids = encoder.encode(RenderedPrompt(spelled))
    matcher = Matcher(encoder)
    matcher.add(StoredBranch("ns", "a", 0, ids, len(ids)))
    prompt = (later or encoder).render_chat(after)
    return explain(matcher.match("ns", agent, prompt), prompt, after, encoder=encoder)


def test_nothing_to_explain() -> None:
    encoder = encoder_of("cl100k")
    assert run(encoder, CHAT[:2], CHAT[:2]) is None
    assert run(encoder, CHAT[:2], CHAT, reply="Be kind to guests.") is None


def test_edited_text() -> None:
    changed = [*CHAT[:1], Message("user", "What is the last rule?"), *CHAT[2:]]
    found = run(encoder_of("cl100k"), CHAT, changed)
    assert found is not None
    assert (found.cause, found.message_index) == ("text_differs", 1)
    assert found.stored is not None and found.stored.startswith("What is the first rule?<|end|>")
    assert found.sent is not None and found.sent.startswith("What is the last rule?<|end|>")
    assert "message 1" in found.detail


@pytest.mark.parametrize("moved", [[*CHAT[:2], Message("user", "One more thing.")], [CHAT[0], *CHAT[3:]]])
def test_messages_added_or_removed(moved: list[Message]) -> None:
    found = run(encoder_of("cl100k"), CHAT, moved)
    assert found is not None
    assert found.cause == "text_differs"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("It is 2024-05-06 10:30:12 UTC.", "It is 2024-05-07 09:01:59 UTC."),
        ("Today: Monday, 6 May 2024", "Today: Tuesday, 17 June 2024"),
        ("Current date: May 6, 2024.", "Current date: Jan 31, 2025."),
        ("ts=1715000000123", "ts=1715009999456"),
        ("at 2024-05-06T10:30:12.123Z", "at 2025-01-01T00:00:00Z"),
    ],
)
def test_date_lines(old: str, new: str) -> None:
    before = [Message("system", f"{RULES}\n{old}\nBe kind."), *CHAT[1:]]
    after = [Message("system", f"{RULES}\n{new}\nBe kind."), *CHAT[1:]]
    found = run(encoder_of("cl100k"), before, after)
    assert found is not None
    assert (found.cause, found.message_index) == ("date_line", 0)
    other = run(encoder_of("cl100k"), before, [Message("system", f"{RULES}\n{new} Or not.\nBe kind."), *CHAT[1:]])
    assert other is not None
    assert other.cause == "text_differs"


def test_date_by_the_template() -> None:
    today = make_encoder("cl100k", factories.DATED, moment=datetime(2024, 5, 6))
    tomorrow = make_encoder("cl100k", factories.DATED, moment=datetime(2024, 5, 7))
    found = run(today, CHAT, CHAT, later=tomorrow)
    assert found is not None
    assert found.cause == "date_line"


@pytest.mark.parametrize(
    ("template", "reply", "sent_back"),
    [
        (
            factories.STRIPS_THINKING,
            "<think>\nhm, guests\n</think>\n\nBe kind.",
            "<think>\nhm, guests\n</think>\n\nBe kind.",
        ),
        (factories.STRIPS_THINKING, "<think>\nhm, guests\n</think>\n\nBe kind.", "Be kind."),
        (factories.TRIMS, " Be kind. \n", " Be kind. \n"),
    ],
)
def test_templates_that_rewrite_replies(template: str, reply: str, sent_back: str) -> None:
    after = [*CHAT[:2], Message("assistant", sent_back), Message("user", "And the second?")]
    found = run(encoder_of("cl100k", template), CHAT[:2], after, reply=reply)
    assert found is not None
    assert (found.cause, found.message_index) == ("template_rewrote_history", 2)


SIGNED = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SIGNED.format("36ee5") + "\n", SIGNED.format("0aaa9") + "\n"),
        (SIGNED.format("36ee5"), SIGNED.format("0aaa9")),
        (SIGNED.format("36ee5") + "\n", ""),
        ("", SIGNED.format("36ee5") + "\n"),
    ],
)
def test_the_line_that_signs_each_request(old: str, new: str) -> None:
    before = [Message("system", f"{old}{RULES}"), *CHAT[1:]]
    found = run(encoder_of("cl100k"), before, [Message("system", f"{new}{RULES}"), *CHAT[1:]])
    assert found is not None
    assert (found.cause, found.message_index) == ("attribution_header", 0)
    edited = [Message("system", f"{old}{RULES}"), Message("user", "What is the last rule?")]
    found = run(encoder_of("cl100k"), before, edited)
    assert found is not None
    assert (found.cause, found.message_index) == ("text_differs", 1)


TOOLS = (
    "{% if tools %}<|start|>system\nTools:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    + factories.CHAT
)
# Written here: tools stand before the last user message, wherever that is.
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tool(name: str, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "description": f"It can {name}.", **more}}


def run_tools(template: str, before: list[object], after: list[object], history: list[Message]) -> Explanation | None:
    encoder = encoder_of("cl100k", template)
    ids = encoder.encode(encoder.render_chat(CHAT[:2], before))
    matcher = Matcher(encoder)
    matcher.add(StoredBranch("ns", "a", 0, ids, len(ids)))
    prompt = encoder.render_chat(history, after)
    match = matcher.match("ns", "a", prompt)
    return explain(match, prompt, history, encoder=encoder, num_tokens=len(encoder.encode(prompt)))


def test_tools_in_another_order() -> None:
    tools: list[object] = [tool("look"), tool("ask"), tool("write")]
    found = run_tools(TOOLS, tools, [*tools[1:], tools[0]], CHAT[:2])
    assert found is not None
    assert (found.cause, found.message_index) == ("tool_order", 0)
    keys = {"function": {"description": "It can look.", "name": "look"}, "type": "function"}
    found = run_tools(TOOLS, tools, [keys, *tools[1:]], CHAT[:2])
    assert found is not None
    assert found.cause == "tool_order"
    found = run_tools(TOOLS, tools, [tool("look", parameters={}), *tools[1:]], CHAT[:2])
    assert found is not None
    assert found.cause == "text_differs"
    for added in ([*tools, tool("run")], [tool("run"), *tools], tools[1:]):
        found = run_tools(TOOLS, tools, added, CHAT[:2])
        assert found is not None
        assert found.cause == "text_differs"


def test_tools_that_the_template_moves() -> None:
    tools: list[object] = [tool("look"), tool("ask")]
    later = [*CHAT[:3], Message("user", 'Call "name": "ask", then "name": "look".')]
    found = run_tools(TOOLS_LAST, tools, tools, later)
    assert found is not None
    assert (found.cause, found.message_index) == ("template_rewrote_history", 1)


def test_calls_that_the_template_writes_otherwise() -> None:
    called = Message("assistant", "", tool_calls=(ToolCall("c", "look", '{"at": "it"}'),))
    found = run(encoder_of("cl100k"), CHAT[:2], [*CHAT[:2], called], reply='to=look <tool_call>{"at":"it"}')
    assert found is not None
    assert (found.cause, found.message_index) == ("template_rewrote_history", 2)


def test_what_a_difference_cost() -> None:
    encoder = encoder_of("cl100k")
    tools: list[object] = [tool("look"), tool("ask")]
    found = run_tools(TOOLS, tools, tools[::-1], CHAT[:2])
    stored = encoder_of("cl100k", TOOLS).encode(encoder_of("cl100k", TOOLS).render_chat(CHAT[:2], tools))
    head = encoder.encode(encoder.render_text('<|start|>system\nTools:\n{"type": "function", "function": {"name": "'))
    assert found is not None
    cost = int(found.detail.rpartition("up to ")[2].split()[0])
    assert abs(len(stored) - len(head) - cost) <= 2


def test_a_sub_agent_that_shares_nothing_has_nothing_stored() -> None:
    encoder = encoder_of("cl100k")
    ids = encoder.encode(encoder.render_chat(CHAT))
    matcher = Matcher(encoder)
    matcher.add(StoredBranch("ns", "main", 0, ids, len(ids)))
    prompt = encoder.render_chat([Message("user", "A task of its own.")])
    match = matcher.match("ns", "sub", prompt, parent="main")
    found = explain(match, prompt, [Message("user", "A task of its own.")], encoder=encoder)
    assert match.relation == "none"
    assert found is not None
    assert (found.cause, found.stored) == ("not_stored", None)
    assert "its parent's prompt" in found.detail


def test_templates_that_move_the_system_prompt() -> None:
    after = [*CHAT, Message("assistant", "Be brief."), Message("user", "Thanks.")]
    encoder = encoder_of("cl100k", factories.MOVES_SYSTEM)
    rules_last = [Message("system", "Only two rules."), *CHAT[1:]]
    found = run(
        encoder,
        [Message("system", "Only two rules."), Message("user", RULES)],
        [*rules_last[:1], Message("user", RULES), *after[2:]],
    )
    assert found is not None
    assert found.cause == "template_rewrote_history"


def test_shared_text_is_not_quoted() -> None:
    secret = [Message("system", RULES), Message("user", "My password is swordfish.")]
    found = run(encoder_of("cl100k"), secret, CHAT, agent="b")
    assert found is not None
    assert (found.cause, found.message_index, found.stored) == ("not_stored", 1, None)
    assert "swordfish" not in repr(found)


def test_nothing_stored_and_what_the_engine_knows() -> None:
    encoder = encoder_of("cl100k")
    prompt = encoder.render_chat(CHAT)
    match = Matcher(encoder).match("ns", "a", prompt)
    found = explain(match, prompt, CHAT, encoder=encoder)
    assert found is not None
    assert found.cause == "not_stored"
    told = explain_elsewhere([Change("kv", "q8h", "q4h"), Change("block_tokens", "64", "128")])
    assert (told.cause, told.stored, told.sent) == ("other_fingerprint", None, None)
    assert told.detail.endswith("(KV was q8h, now q4h; blocks had 64 tokens, now 128)")
    assert "does not say what differs" in explain_elsewhere([]).detail


def test_completions_and_differences_inside_characters() -> None:
    encoder = encoder_of("gpt2")
    matcher = Matcher(encoder)
    ids = encoder.encode(encoder.render_text("word " * 30 + "🙂 smile"))
    matcher.add(StoredBranch("ns", "a", 0, ids, len(ids)))
    prompt = encoder.render_text("word " * 30 + "🙃 frown")
    found = explain(matcher.match("ns", "a", prompt), prompt, None, encoder=encoder)
    assert found is not None
    assert found.message_index is None
    assert found.stored is not None and found.stored.endswith("🙂 smile")
    assert found.sent is not None and found.sent.endswith("🙃 frown")


def test_opaque_text_is_still_readable() -> None:
    encoder = encoder_of("lower")
    changed = [*CHAT[:1], Message("user", "something else entirely"), *CHAT[2:]]
    found = run(encoder, CHAT, changed)
    assert found is not None
    assert (found.cause, found.message_index) == ("text_differs", 1)
    assert found.sent is not None and "something else" in found.sent
