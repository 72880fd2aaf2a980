"""`rekindle serve` whose sampler prefers the tokens of a script; all else is the product's.

    python -m tools.real_clients.scripted_serve serve --script FILE --asked FILE [flags of rekindle serve]

The score of the next token of the script's reply is raised above all others, and then the product's sampler draws.
A token that a constraint (a schema, a grammar) forbids keeps its score of minus infinity, so a text that is no JSON
does not come out where JSON is demanded. If all texts of the script are forbidden, the shortest way to the end of a
JSON value is preferred. `--asked` receives a line for each reply: its step, its place, its prompt's number of tokens;
the prompts themselves are written next to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer

from rekindle.cli import main as rekindle
from rekindle.model import runner
from rekindle.model.adjustments import History
from rekindle.model.drawing import Drawing
from rekindle.model.sampler import Draw
from tools.real_clients.script import END, Asked, answer

ABOVE = 1000.0
MOST_REPLIES = 64  # in progress at once
CLOSING = (END, '"', "}", "]")  # what ends a JSON value, or opens a key or a string that it ends next


class ScriptedSampler:
    """Draws as the product does, after raising the score of the script's next token."""

    def __init__(self, script: dict[str, Any], tokenizer: Tokenizer, asked: Path) -> None:
        self._script, self._tokenizer, self._log = script, tokenizer, asked
        self._num_asked = 0
        self._replies: OrderedDict[bytes, Asked] = OrderedDict()
        self._closing = [tokenizer.encode(sign).ids[0] for sign in CLOSING]

    def __call__(self, logits: torch.Tensor, draws: Sequence[Draw], **others: Any) -> Drawing:
        """Draw from `logits` [rows, vocab], as `Drawing`."""
        logits = logits.clone()
        for draw in draws:
            allowed = torch.isfinite(logits[draw.row])
            if draw.mask is not None:
                size = min(len(draw.mask), len(allowed))
                allowed[:size] &= torch.from_numpy(draw.mask[:size])
                allowed[size:] = False
            wanted = self._next(draw.history, allowed)
            if wanted is not None:
                logits[draw.row, wanted] = logits[draw.row].max() + ABOVE
        return Drawing(logits, draws, **others)

    def _next(self, history: History, allowed: torch.Tensor) -> int | None:
        """Return the id that the script wants next; None if it wants none."""
        for token in (*self._continued(self._reply(history).texts, history.reply.tolist()), *self._closing):
            if allowed[token]:
                return token
        return None

    def _continued(self, texts: Sequence[str], said: list[int]) -> Iterator[int]:
        """Yield what could follow, the preferred one first; also where other ids wrote the beginning of a text."""
        for text in texts:
            ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._closing[0]]
            written = self._tokenizer.decode(said, skip_special_tokens=False)
            if said == ids[: len(said)]:
                yield from ids[len(said) : len(said) + 1]
            elif text.startswith(written):
                rest = self._tokenizer.encode(text[len(written) :], add_special_tokens=False).ids
                yield rest[0] if rest else self._closing[0]

    def _reply(self, history: History) -> Asked:
        key = history.prompt.tobytes()
        if key not in self._replies or not len(history.reply):
            prompt = self._tokenizer.decode(history.prompt.tolist(), skip_special_tokens=False)
            found = answer(self._script, prompt)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found.recorded(len(history.prompt))) + "\n")
            self._num_asked += 1
            self._log.with_name(f"prompt-{self._num_asked:03}.txt").write_text(prompt, "utf-8")
            self._replies[key] = found
            while len(self._replies) > MOST_REPLIES:
                self._replies.popitem(last=False)
        return self._replies[key]


def main() -> None:
    """Serve with the flags that are not this module's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--asked", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    given, others = parser.parse_known_args()
    tokenizer = Tokenizer.from_file(str(given.model / "tokenizer.json"))
    sampler = ScriptedSampler(json.loads(given.script.read_text("utf-8")), tokenizer, given.asked)
    sys.argv = [sys.argv[0], *others, "--model", str(given.model)]
    with patch.object(runner, "Drawing", sampler):
        rekindle()


if __name__ == "__main__":
    main()
