"""Compare prompts: of two agents of a session, and of one agent from turn to turn.

Finds where a template prevents a prompt from extending the previous one, by rendering a sample session with the layout
of real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.text.messages import Message
from rekindle.text.prompt import RenderedPrompt
from rekindle.text.replies import opened_by
from rekindle.text.replies.channels import ANALYSIS, ChannelForm
from rekindle.text.replies.format import ReplyFormat
from rekindle.text.vocabulary import agreeing
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.types import Entry, Participant, Plan, Speak, TurnEnded
from rekindle_sessions.service.events import Extension

NUM_ROUNDS = 5
_REPLY = "We should look at what was said before, and then say in one sentence what is still open to us."
_REASONING = "What was said before is known; one sentence is enough."
_SAMPLE = Plan((Participant("Ada", "You are careful."), Participant("Ben"), Participant("Cleo")), setting="They talk.")


@dataclass(frozen=True, slots=True)
class Picture:
    """Snapshot of an agent's context and prompt."""

    name: str
    context: tuple[Entry, ...]
    prompt: tuple[Message, ...]

    @classmethod
    def of(cls, machine: Coordination, name: str) -> Picture:
        """Return a snapshot of the current state."""
        return cls(name, machine.context(name), machine.prompt(name, cue=False))


def compared(engine: Engine, one: Picture, other: Picture) -> dict[str, Any]:
    """Return where two contexts diverge, their shared tokens and each agent's last words; encodes two prompts."""
    names = (one.name, other.name)
    prompts = [engine.encoder.encode(_rendered(engine, each.prompt)) for each in (one, other)]
    contexts = [each.context for each in (one, other)]
    num_entries = _num_common(contexts[0], contexts[1])
    size = min(map(len, prompts))
    differing = np.flatnonzero(prompts[0][:size] != prompts[1][:size])
    return {
        "agents": list(names),
        "shared_entries": num_entries,
        "shared_tokens": int(differing[0]) if len(differing) else size,
        "num_tokens": {name: len(ids) for name, ids in zip(names, prompts, strict=True)},
        "parts_at": {
            name: _described(context[num_entries]) if num_entries < len(context) else None
            for name, context in zip(names, contexts, strict=True)
        },
        "last_words": {
            name: next((each.text for each in reversed(context) if each.kind == "said"), None)
            for name, context in zip(names, contexts, strict=True)
        },
    }


def _rendered(engine: Engine, prompt: tuple[Message, ...]) -> RenderedPrompt:
    return engine.render(GenerationRequest(messages=prompt))


def _num_common(one: tuple[Entry, ...], other: tuple[Entry, ...]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _described(entry: Entry) -> dict[str, Any]:
    return {"kind": entry.kind, "by": entry.by, "text": entry.text, "number": entry.number}


def measured_extension(engine: Engine) -> Extension:
    """Measure whether the model's template extends prompts as a session grows; about 30 renderings."""
    begun = _reasoning_start(engine.reply_format)
    reasoning = _REASONING if begun else None
    machine = Coordination(_SAMPLE)
    stored: dict[str, tuple[bytes, ...]] = {}
    lost, why = 0.0, None
    try:
        for _ in range(NUM_ROUNDS):
            done = machine.apply(machine.next_round())
            while speaking := [each.turn for each in done if isinstance(each, Speak)]:
                turn = speaking[0]
                prompt = _rendered(engine, machine.prompt(turn.speaker, cue=False))
                if turn.speaker in stored:
                    num_lost, before = min((len(key) - agreeing(key, prompt.key), key) for key in stored[turn.speaker])
                    lost = num_lost / len(prompt.key)
                    why = _why(engine, before, len(before) - num_lost) if lost else why
                stored[turn.speaker] = tuple(_replied(engine, prompt, begun))
                done = machine.apply(TurnEnded(turn.number, _REPLY, reasoning))
    except BadRequest as error:
        return Extension(False, 1.0, f"the template refuses such a conversation: {error}")
    return Extension(why is None, round(lost, 4), why)


def _reasoning_start(form: ReplyFormat) -> str:
    """Return how a reasoning model's reply begins, as structured text; empty for other models."""
    if isinstance(form.tools, ChannelForm):
        return f"{form.tools.header(ANALYSIS)}{_REASONING}"
    thinking = form.leading_reasoning
    return "" if thinking is None else f"{thinking.open}{thinking.lead}{_REASONING}"


def _replied(engine: Engine, prompt: RenderedPrompt, begun: str) -> Iterator[bytes]:
    """Yield the keys of the prompt followed by a reply, after its reasoning (`begun`) if any.

    One variant begins with a blank: some templates put one between the generation prompt and the text.
    """
    form = engine.reply_format
    written = f"{begun}{form.bridged(begun, _REPLY)}".removeprefix(opened_by(form, engine.encoder, prompt))
    for blank in ("", " "):
        yield engine.encoder.continued(prompt, f"{blank}{written}").key


def _why(engine: Engine, stored: bytes, at: int) -> str:
    """Describe which part of a stored prompt and reply is rendered differently the next time."""
    rest = engine.encoder.readable(stored[at:]).strip()
    quoted = rest[:60] + ("…" if len(rest) > 60 else "")
    where = "the last reply" if stored.count(_REPLY.encode(), at) <= 1 else "what was said earlier"
    return f"the template renders {where} otherwise in the next turn, from {quoted!r} on"
