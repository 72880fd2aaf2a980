"""Prompts as bytes and ids: the one place where messages become a rendered prompt and a prompt becomes token ids.

Owns which tokens are control tokens and what is added around a sequence: nothing for chat, whose template writes
everything; the leading tokens once for completions; trailing tokens never. Knows no blocks and no branches. The key of
a prompt is complete: it is split at control tokens, and what is between them is encoded as text.

Always true: `key_of(encode(prompt)) == prompt.key`, and encoding from a safe cut gives the last ids of the whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadRequest, PromptTooLong
from rekindle.text.arguments import arguments_for_template, object_for_template, read_object
from rekindle.text.bounded import MOST_WRITTEN
from rekindle.text.length import PromptBound
from rekindle.text.messages import Message, check_json, check_text, map_strings, plainer_forms
from rekindle.text.pictures import (
    PICTURE_IDS,
    Picture,
    PictureForm,
    PromptPictures,
    content_for_template,
    content_pieces,
    name_of_picture,
)
from rekindle.text.splitters import PIECE_BYTES
from rekindle.text.template import ChatTemplate, read_config
from rekindle.text.tokenizer import Prefix, TextTokenizer, TokenizerFile, added_tokens, leading_ids
from rekindle.text.tools_text import ToolsInText
from rekindle.text.vocabulary import (
    CODE_BYTES,
    MARK,
    ControlTokens,
    Vocabulary,
    control_code,
    find_control_tokens,
    on_boundary,
    pieces_of,
)

ForTemplate = Callable[[str, Callable[[str], str]], Any]  # of arguments, with what is applied to every string


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as comparable bytes (see text/vocabulary).

    `num_unread`: how many calls in it have arguments that are no JSON object, for a template that writes objects only.
    """

    key: bytes
    num_unread: int = field(default=0, compare=False)


class PromptEncoder:
    """Renders, encodes and decodes for one tokenizer and template. Immutable: any thread may use it.

    With a `bound` (see `bounded`), a prompt that cannot fit is refused before it is tokenised: PromptTooLong.
    `tokenizer` handles the text between control tokens.
    """

    def __init__(self, file: TokenizerFile, config: Mapping[str, Any], template: ChatTemplate) -> None:
        controls = find_control_tokens(added_tokens(file, config), template.literals())
        self.template = template
        self.config = dict(config)  # of tokenizer_config.json
        self.controls = ControlTokens(controls)
        self.digest = file.digest
        self.bound: PromptBound | None = None
        self.tools_in_text: ToolsInText | None = None
        self.pictures: PictureForm | None = None  # of a model that sees
        self.tokenizer = TextTokenizer(file, controls)
        self._leading = leading_ids(file, config, self.controls)

    @classmethod
    def from_dir(cls, directory: Path, *, clock: Callable[[], datetime] = datetime.now) -> PromptEncoder:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelRefused."""
        file = TokenizerFile.from_dir(directory)
        return cls(file, read_config(directory), ChatTemplate.from_dir(directory, clock=clock))

    def bounded(self, max_context: int) -> PromptEncoder:
        """Return the same encoder for prompts of at most `max_context` tokens."""
        encoder = copy.copy(self)
        longest = max(self.vocabulary.longest, *(len(token.content.encode()) for token in self.controls.tokens), 1)
        encoder.bound = PromptBound(max_context, longest)
        return encoder

    def with_tools_in_text(self, tools: ToolsInText) -> PromptEncoder:
        """Return the same encoder for a template that has no place for tools."""
        encoder = copy.copy(self)
        encoder.tools_in_text = tools
        return encoder

    def with_pictures(self, form: PictureForm) -> PromptEncoder:
        """Return the same encoder for a model that sees."""
        encoder = copy.copy(self)
        encoder.pictures = form
        return encoder

    @property
    def vocabulary(self) -> Vocabulary:
        """The text of each id."""
        return self.tokenizer.vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id."""
        return self.vocabulary.size

    @property
    def prefix(self) -> Prefix:
        """Where the tokenizer puts a space before a text."""
        return self.tokenizer.prefix

    @property
    def compares_text(self) -> bool:
        """False if the tokenizer changes text too much: then prompts are compared by ids."""
        return not self.tokenizer.opaque

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> RenderedPrompt:
        """Render a conversation. Raises BadRequest if the template refuses it.

        Some refuse arguments that are no object, system messages, all or in the middle, user messages after others or
        after results, or reasoning and text next to calls: they get the conversation in a simpler form that they
        accept.
        """
        guard = self.controls.guard
        if self.bound is not None:
            self.bound.check_messages(messages, [*(tools or ()), template_kwargs])
        check_json(tools, "tools")
        if self.tools_in_text is not None:
            messages, tools = self.tools_in_text.written(messages, tools), None
        values = {name: map_strings(value, guard) for name, value in template_kwargs.items()}

        def rendered(asked: Sequence[Message], arguments: ForTemplate = arguments_for_template) -> str:
            shown = [self._for_template(message, arguments) for message in asked]
            return self.template.render(
                shown,
                map_strings(tools, guard),
                add_generation_prompt=add_generation_prompt,
                most_chars=MOST_WRITTEN if self.bound is None else min(MOST_WRITTEN, self.bound.max_sent),
                **values,
            )

        try:
            return self._rendered_prompt(rendered(messages), messages)
        except PromptTooLong:
            raise
        except BadRequest:
            num_unread = sum(read_object(call.arguments) is None for each in messages for call in each.tool_calls)
            with_objects = (object_for_template,) if num_unread else ()
            for form in (messages, *plainer_forms(messages)):
                for arguments in (arguments_for_template, *with_objects):
                    with suppress(BadRequest):
                        prompt = self._rendered_prompt(rendered(form, arguments), form)
                        return replace(prompt, num_unread=num_unread if arguments is object_for_template else 0)
            raise

    def placed(self, ids: np.ndarray, pictures: Mapping[str, Picture]) -> PromptPictures | None:
        """Return where pictures are in a prompt's ids, as `PictureForm.placed`; None for a model that does not see."""
        return None if self.pictures is None else self.pictures.placed(ids, pictures)

    def render_text(self, text: str, *, add_leading: bool = True) -> RenderedPrompt:
        """Render a completion's prompt: control tokens in the text are tokens; leading tokens come first, once."""
        pieces = self._split(check_text(text, "prompt"))
        leading = list(self._leading) if add_leading else []
        if pieces[: len(leading)] == leading:
            return self._bounded_prompt(pieces, starts_after=len(leading))
        return self._bounded_prompt([*leading, *pieces], starts_after=len(leading))

    def continued(self, prompt: RenderedPrompt, reply: str) -> RenderedPrompt:
        """Append the beginning of a reply to the prompt: a structured text (see text/replies)."""
        if self.bound is not None:
            self.bound.check_sent(len(reply))
        first, *others = self.reply_pieces(reply) or [""]
        if isinstance(first, int) or prompt.key[-CODE_BYTES:].startswith(MARK):
            return RenderedPrompt(prompt.key + self._prompt([first, *others], starts_after=-1).key)
        anchor = "."  # the reply continues the text before it, so no space is added
        text = self.tokenizer.normalise(anchor + first, at_start=False)
        text = text[len(self.tokenizer.normalise(anchor, at_start=False)) :]
        added = text.encode() if self.compares_text else self._codes(text)
        return RenderedPrompt(prompt.key + added + self._prompt(others, starts_after=-1).key)

    def reply_pieces(self, reply: str) -> list[str | int]:
        """Split a structured text (see text/replies) into texts and ids of control tokens."""
        return self.controls.split(self.controls.guard_structured(reply))

    def encode(self, prompt: RenderedPrompt, *, most: float = math.inf) -> np.ndarray:
        """The ids of the whole prompt [tokens], uint32; PromptTooLong as soon as there are more than `most`.

        Long texts are encoded piece by piece: apart from the ids, only one of them takes memory.
        """
        return self._encode_key(prompt.key, most=most)

    def encode_rest(self, prompt: RenderedPrompt, resume_byte: int, *, most: float = math.inf) -> np.ndarray:
        """The ids of the prompt from a byte of its key, adding nothing; at safe cuts, the last ids of the whole."""
        assert on_boundary(prompt.key, resume_byte), f"byte {resume_byte} is inside a character"
        return self._encode_key(prompt.key[resume_byte:], most=most)

    def count(self, prompt: RenderedPrompt) -> int:
        """Count the ids that `encode` gives, without holding them."""
        return sum(map(len, self._encoded(prompt.key)))

    def key_of(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The key of these ids, up to the first byte that is not UTF-8."""
        return self.vocabulary.key(ids)

    def byte_ends(self, ids: np.ndarray) -> np.ndarray:
        """Where each token ends in the key [tokens], int64."""
        return self.vocabulary.byte_ends(ids)

    def safe_cuts(self, key: bytes, limit: int, divergence: int) -> Iterator[int]:
        """Bytes at or before `limit` where encoding may resume, last first (see text/splitters)."""
        return self.tokenizer.cuts.before(key, limit, divergence)

    def canonical_tokens(self, ids: np.ndarray, *, known: int = 0) -> int:
        """Count the leading ids that equal a fresh encoding of the text of all.

        The first `known` ids come from one encoding: only what follows their last control token is encoded again.
        """
        marks = self.vocabulary.control_positions(ids[:known])
        start = int(marks[-1]) if len(marks) else 0
        rest = ids[start:]
        fresh = self._encode_key(self._text_key(rest))
        num = min(len(fresh), len(rest))
        differ = np.flatnonzero(fresh[:num] != rest[:num])
        return start + (int(differ[0]) if len(differ) else num)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ids for a reader: without tokens flagged special, bad bytes as U+FFFD."""
        return b"".join(self.vocabulary.shown(int(token_id)) for token_id in ids).decode("utf-8", "replace")

    def readable(self, key: bytes) -> str:
        """A piece of a key for display: control tokens as text, parts of characters dropped."""
        names = {token.id: token.content for token in self.controls.tokens}
        text, ids, is_picture = [], [], False
        for piece in pieces_of(key):
            was_picture, is_picture = is_picture, not isinstance(piece, bytes) and piece >= PICTURE_IDS
            if isinstance(piece, bytes):
                text.append(piece.decode("utf-8", "ignore"))
            elif is_picture:
                text += [] if was_picture else [name_of_picture(piece)]
            elif self.compares_text:
                text.append(names.get(piece, f"<{piece}>"))
            else:
                ids.append(piece)
        return "".join(text) if self.compares_text else self.decode(ids)

    def message_ends(self, prompt: RenderedPrompt, messages: Sequence[Message]) -> list[int]:
        """Where each message's content ends in the key, best effort: one that is not found ends where it begins.

        For content that the template shortened, the last line is searched.
        """
        ends, end = [], 0
        for message in messages:
            for text in (message.content, *(call.arguments for call in message.tool_calls)):
                for part in (text, text.strip().rpartition("\n")[2]):
                    needle = self.content_key(message, part)
                    at = prompt.key.find(needle, end) if needle else -1
                    if at >= 0:
                        end = at + len(needle)
                        break
            ends.append(end)
        return ends

    def content_key(self, message: Message, text: str) -> bytes:
        """`text` of this message as it is in keys, without blanks at its ends."""
        guard = self.controls.guard_reply if message.role == "assistant" else self.controls.guard
        pieces = content_pieces(text.strip(), self.pictures, lambda part: self.controls.split(guard(part)))
        return self._prompt(pieces).key.strip(b" ")

    def _for_template(self, message: Message, arguments: ForTemplate) -> dict[str, Any]:
        """A message as templates expect it, every look-alike of a control token guarded."""
        guard, reply = self.controls.guard, self.controls.guard_reply
        guarded = reply if message.role == "assistant" else guard
        result: dict[str, Any] = {"role": message.role, "content": content_for_template(message.content, guarded)}
        if message.name is not None:
            result["name"] = self.controls.guard_name(message.name)
        if message.tool_call_id is not None:
            result["tool_call_id"] = guard(message.tool_call_id)
        if message.reasoning is not None:
            result["reasoning_content"] = result["thinking"] = reply(message.reasoning)
        if message.tool_calls:
            result["tool_calls"] = [
                {
                    "id": guard(call.id or ""),
                    "type": "function",
                    "function": {
                        "name": self.controls.guard_name(call.name),
                        "arguments": arguments(call.arguments, guard),
                    },
                }
                for call in message.tool_calls
            ]
        return result

    def _prompt(self, pieces: Sequence[str | int], *, starts_after: int = 0) -> RenderedPrompt:
        """Join pieces to a key. The text after the first `starts_after` pieces is the first of the prompt."""
        return RenderedPrompt(b"".join(self._key_parts(pieces, starts_after)))

    def _bounded_prompt(self, pieces: Sequence[str | int], *, starts_after: int = 0) -> RenderedPrompt:
        """As `_prompt`; PromptTooLong as soon as the key cannot fit."""
        if self.bound is None:
            return self._prompt(pieces, starts_after=starts_after)
        # Normalising removes at most half of the characters; if ids are compared, it includes tokenising.
        num_chars = sum(1 if isinstance(piece, int) else len(piece) for piece in pieces)
        self.bound.check(num_chars // 2 if self.compares_text else num_chars)
        prompt = self._prompt(pieces, starts_after=starts_after)
        if self.compares_text:
            self.bound.check(len(prompt.key))
        return prompt

    def _rendered_prompt(self, text: str, messages: Sequence[Message]) -> RenderedPrompt:
        pieces, form = self._split(text), self.pictures
        return self._bounded_prompt(pieces if form is None else form.shown(pieces, [each.content for each in messages]))

    def _split(self, text: str) -> list[str | int]:
        """Split rendered text into pieces; raise PromptTooLong if it is several times too long."""
        if self.bound is not None:
            self.bound.check_sent(len(text))
        return self.controls.split(text)

    def _key_parts(self, pieces: Sequence[str | int], starts_after: int) -> Iterator[bytes]:
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                yield control_code(piece)
            else:
                text = self.tokenizer.normalise(piece, at_start=index == starts_after)
                yield text.encode("utf-8") if self.compares_text else self._codes(text)

    def _codes(self, text: str) -> bytes:
        (ids,) = self.tokenizer.encode([text])
        return self.vocabulary.key(ids)

    def _text_key(self, ids: np.ndarray) -> bytes:
        """The key of the text of ids; for tokenizers compared by ids, that text is encoded again."""
        if self.compares_text:
            return self.key_of(ids)
        pieces: list[str | int] = []
        start = 0
        for at in [*self.vocabulary.control_positions(ids), len(ids)]:
            pieces += [self.decode(ids[start:at])] if start < at else []
            pieces += [int(ids[at])] if at < len(ids) else []
            start = int(at) + 1
        return b"".join(control_code(piece) if isinstance(piece, int) else self._codes(piece) for piece in pieces)

    def _encode_key(self, key: bytes, *, most: float = math.inf) -> np.ndarray:
        parts, num_ids = [], 0
        for ids in self._encoded(key):
            num_ids += len(ids)
            if num_ids > most:
                raise self._too_long(most)
            parts.append(ids)
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint32)

    def _too_long(self, most: float) -> PromptTooLong:
        if self.bound is not None:
            return self.bound.refusal(int(most) + 1, "not counted further")
        return PromptTooLong.of(int(most) + 1, int(most) + 1, size="not counted further")

    def _encoded(self, key: bytes) -> Iterator[np.ndarray]:
        """The ids of a key that begins on a boundary, some pieces at a time."""
        pieces: list[bytes | int] = []
        size = 0
        for piece in pieces_of(key):
            for part in self.tokenizer.cuts.pieces(piece) if isinstance(piece, bytes) else (piece,):
                pieces.append(part)
                size += len(part) if isinstance(part, bytes) else CODE_BYTES
                if size >= PIECE_BYTES:
                    yield self._ids(pieces)
                    pieces, size = [], 0
        if pieces:
            yield self._ids(pieces)

    def _ids(self, pieces: Sequence[bytes | int]) -> np.ndarray:
        encoded = iter(self.tokenizer.encode([piece.decode("utf-8") for piece in pieces if isinstance(piece, bytes)]))
        parts = [next(encoded) if isinstance(piece, bytes) else np.array([piece], dtype=np.uint32) for piece in pieces]
        return np.concatenate(parts)
