"""The text for `eval`, from a user's files or the bundled conversation generator, as windows of token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rekindle.errors import BadRequest, ConfigError
from rekindle.pocket.conversations import conversation
from rekindle.text.messages import normalise_messages
from rekindle.text.prompt import PromptEncoder

CONVERSATION_WORDS = 600


def windows_of(
    encoder: PromptEncoder, paths: Sequence[Path], *, context: int, num_tokens: int, seed: int
) -> list[np.ndarray]:
    """Return up to `num_tokens` ids in windows of `context`, each after the tokens that begin a text for this model.

    Without paths the bundled generator supplies conversations, in the model's chat format if it has one. ConfigError if
    a file cannot be read or the text is shorter than one window.
    """
    leading = encoder.encode(encoder.render_text(""))
    room = context - len(leading)
    rest = _of_files(encoder, paths, len(leading)) if paths else _generated(encoder, num_tokens, seed, len(leading))
    count = min(num_tokens // context, len(rest) // room)
    if count < 1:
        raise ConfigError(f"the text has {len(rest)} tokens, less than one window of {context}: give more text")
    return [np.concatenate([leading, rest[at * room : (at + 1) * room]]) for at in range(count)]


def _of_files(encoder: PromptEncoder, paths: Sequence[Path], num_leading: int) -> np.ndarray:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path}: {error}") from error
    try:
        return encoder.encode(encoder.render_text("\n\n".join(texts)))[num_leading:]
    except BadRequest as error:
        raise ConfigError(f"--text: {error}") from error


def _generated(encoder: PromptEncoder, num_tokens: int, seed: int, num_leading: int) -> np.ndarray:
    chooser = random.Random(seed)
    pieces: list[np.ndarray] = []
    while sum(map(len, pieces)) < num_tokens:
        chat = conversation(chooser, CONVERSATION_WORDS)
        try:
            prompt = encoder.render_chat(normalise_messages(chat["messages"]), add_generation_prompt=False)
            pieces.append(encoder.encode(prompt))
        except BadRequest:  # no template, or one that wants other turns
            text = "\n".join(message["content"] for message in chat["messages"])
            pieces.append(encoder.encode(encoder.render_text(text))[num_leading:])
    return np.concatenate(pieces)
