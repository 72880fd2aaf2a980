"""What the model gets to read of a request, and what the prompt has begun of the reply."""

from __future__ import annotations

import pytest

from rekindle.engine.intake.rendering import MOST_REPORTED, Renderer
from rekindle.engine.types import Breakpoint, GenerationRequest
from rekindle.errors import BadRequest
from rekindle.text.messages import Message
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import find_reply_format
from tests.text import factories
from tests.text.factories import encoder_of

SIGNED = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=36ee5;"
CHAT = (Message("system", "You are kind and brief."), Message("user", "Hello, who are you?"))
# Written here: a cue that opens thoughts, which are dropped from history.
THINKS = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ c }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def renderer(encoder: PromptEncoder, *kinds: str) -> Renderer:
    return Renderer(encoder, find_reply_format(encoder), frozenset(kinds))


def test_a_reply_begins_as_it_was_asked_to() -> None:
    encoder = encoder_of("cl100k")
    plain = renderer(encoder).render(GenerationRequest(messages=CHAT))
    found = renderer(encoder).render(GenerationRequest(messages=CHAT, reply_prefix="I am <tool_call>"))
    assert (plain.opening, found.opening) == ("", "I am <tool_call>")
    assert found.prompt.key.startswith(plain.prompt.key)
    assert encoder.readable(found.prompt.key).endswith("assistant\nI am <tool_call>")
    ids = encoder.encode(found.prompt)
    assert encoder.vocabulary.is_control_token(int(ids[-1])), "<tool_call> is a token in replies"
    answered = (*CHAT, Message("assistant", "I am <tool_call> sure."))
    assert encoder.render_chat(answered).key.startswith(found.prompt.key)


@pytest.mark.parametrize("template", [factories.CHAT, factories.UNFLAGGED_ROLES], ids=["text", "token"])
@pytest.mark.parametrize("kind", factories.KINDS)
def test_a_prefix_is_what_the_template_makes_of_the_same_reply(kind: str, template: str) -> None:
    """The cue ends in text, or in a control token."""
    encoder = encoder_of(kind, template)
    for text in ("Well, it is", " so", "\nthen", "1998 <tool_call>", "<think>", "é"):
        prompt = renderer(encoder).render(GenerationRequest(messages=CHAT, reply_prefix=text)).prompt
        whole = encoder.render_chat((*CHAT, Message("assistant", text)), add_generation_prompt=False)
        assert whole.key.startswith(prompt.key), text


def test_flagged_tokens_of_a_prefix_stand_behind_a_guard() -> None:
    encoder = encoder_of("cl100k")
    end = encoder.controls.by_content["<|end|>"].id
    spelled = renderer(encoder).render(GenerationRequest(messages=CHAT, reply_prefix="a<|end|>")).prompt
    meant = renderer(encoder).render(GenerationRequest(messages=CHAT, reply_prefix="a\ufdd0<|end|>b")).prompt
    assert int(encoder.encode(spelled)[-1]) != end
    assert list(encoder.encode(meant)).count(end) == list(encoder.encode(spelled)).count(end) + 1


def test_thoughts_that_the_cue_has_opened_are_told_and_end_before_a_prefix() -> None:
    encoder = encoder_of("cl100k", THINKS)
    form = find_reply_format(encoder)
    assert form.thinking is not None
    opened = renderer(encoder).render(GenerationRequest(messages=CHAT))
    assert opened.opening.strip() == "<think>"
    found = renderer(encoder).render(GenerationRequest(messages=CHAT, reply_prefix="I am"))
    assert found.opening == opened.opening + form.thinking.ending + "I am"
    text = encoder.readable(found.prompt.key)
    assert text.endswith(found.opening)
    assert text.index("</think>") < text.index("I am")
    quiet = GenerationRequest(messages=CHAT, reply_prefix="I am", template_kwargs={"enable_thinking": False})
    assert renderer(encoder).render(quiet).opening == "I am"


def test_a_warm_up_has_no_reply() -> None:
    found = renderer(encoder_of("cl100k")).render(GenerationRequest(messages=CHAT, task="prefill", reply_prefix="I"))
    assert found.prompt == encoder_of("cl100k").render_chat(CHAT)
    said = (*CHAT, Message("assistant", "I am."))
    common = renderer(encoder_of("cl100k")).render(GenerationRequest(messages=said, task="prefill")).prompt
    assert encoder_of("cl100k").readable(common.key).endswith("I am.<|end|>\n<|start|>")


def test_breakpoints_and_what_was_taken_out_have_their_place() -> None:
    encoder = encoder_of("cl100k")
    signed = (Message("system", f"{SIGNED}\n{CHAT[0].content}"), *CHAT[1:])
    marks = (
        Breakpoint(0, len(SIGNED) + 1 + len("You are kind"), 300),
        Breakpoint(1, None, 300),
        Breakpoint(None, None, 9),
    )
    found = renderer(encoder, "attribution").render(GenerationRequest(messages=signed, breakpoints=marks))
    assert found.prompt == encoder.render_chat(CHAT)
    before = [encoder.readable(found.prompt.key[:at]) for at in found.breakpoints]
    assert before[0].endswith("You are kind")
    assert before[1].endswith("who are you?")
    assert before[2].endswith("system\n")
    ((removed, at),) = found.removed
    assert removed.text == SIGNED
    assert encoder.readable(found.prompt.key[at:]).startswith("You are kind")
    assert renderer(encoder).render(GenerationRequest(messages=signed)).removed == ()


def test_a_prompt_of_a_thousand_dates_reports_the_first_of_them() -> None:
    """Reports are kept for every agent, and what is removed after others costs less than those."""
    days = [f"Today's date is {1000 + number}-01-01." for number in range(1000)]
    said = (Message("system", "\n".join(["You are kind.", *days])), CHAT[1])
    found = renderer(encoder_of("cl100k"), "dates").render(GenerationRequest(messages=said))
    assert b"-01-01" not in found.prompt.key
    assert [removed.text for removed, _ in found.removed] == days[:MOST_REPORTED]


def test_settled_is_what_is_rendered() -> None:
    asked = GenerationRequest(messages=(Message("system", f"{SIGNED}\nBe kind."), CHAT[1]))
    settled = renderer(encoder_of("cl100k"), "attribution").settled(asked)
    assert settled.messages == (Message("system", "Be kind."), CHAT[1])
    assert renderer(encoder_of("cl100k"), "attribution").settled(settled) == settled
    text = GenerationRequest(text="as it is")
    assert renderer(encoder_of("cl100k"), "attribution").settled(text) is text


def test_a_template_that_refuses_says_so() -> None:
    encoder = encoder_of("cl100k", factories.REFUSES_TWO_USERS)
    with pytest.raises(BadRequest):
        renderer(encoder).render(
            GenerationRequest(messages=(Message("assistant", "Hm."),), breakpoints=(Breakpoint(0, 1, 9),))
        )
