"""`rekindle serve --backend llama.cpp` that asks llama-server for the words of a script; all else is the product's.

    python -m tools.real_clients.scripted_llama serve --script FILE --asked FILE --model FILE.gguf [other flags]

Each request for a reply carries a grammar of token ids that admits one text: what the script says to its prompt. Those
that carry a constraint already are left as they are. No token of a text may end inside a character, as llama-server's
grammars admit none that does. `--asked` receives a line for each, as `scripted_serve` writes it; ids of prompt and
reply are written next to it, so that they can be sent to another llama-server.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from rekindle.cli import main as rekindle
from rekindle.engine.request import Request
from rekindle.model.checkpoint import Source
from rekindle.text.tokenizer import whole_tokenizer
from rekindle_backends.llama.calls import LlamaCalls
from rekindle_backends.wire import Call
from tools.real_clients.llama_model import as_scripted
from tools.real_clients.script import answer

CONSTRAINTS = {"grammar", "json_schema"}


def grammar(ids: Sequence[int]) -> str:
    """Return the grammar that admits these tokens and then the end, in llama-server's notation."""
    return f"root ::= {' '.join(f'<[{each}]>' for each in ids)}"


class ScriptedCalls:
    """Adds to the call of a request what the script says to its prompt, and records both."""

    def __init__(self, script: Mapping[str, Any], tokenizer: Tokenizer, asked: Path) -> None:
        self._script, self._tokenizer, self._log = script, tokenizer, asked
        self._num_asked = len(asked.read_text("utf-8").splitlines()) if asked.exists() else 0

    def add(self, call: Call, request: Request) -> Call:
        """Return the call with a grammar; the same one if it asks for no reply, or if a constraint is there."""
        if request.sequence.task != "generate" or CONSTRAINTS & call.body.keys():
            return call
        prompt = [int(each) for each in request.sequence.prompt_ids]
        found = answer(self._script, as_scripted(self._tokenizer.decode(prompt, skip_special_tokens=False)))
        ids = self._tokenizer.encode(found.texts[0], add_special_tokens=False).ids
        line = found.recorded(len(prompt)) | {"number": self._num_asked}
        self._log.with_name(ids_name(self._num_asked)).write_text(json.dumps({"prompt": prompt, "reply": ids}), "utf-8")
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._num_asked += 1
        return replace(call, body={**call.body, "grammar": grammar(ids)})


def ids_name(number: int) -> str:
    """Return the name of the file with the ids of the prompt and the reply of this number."""
    return f"ids-{number:03}.json"


def main() -> None:
    """Serve with the flags that are not this module's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--asked", type=Path, required=True)
    parser.add_argument("--model", required=True)
    given, others = parser.parse_known_args()
    tokenizer = whole_tokenizer(Source.find(given.model, None).fetch_texts())
    scripted = ScriptedCalls(json.loads(given.script.read_text("utf-8")), tokenizer, given.asked)
    unscripted = LlamaCalls.call

    def call(calls: LlamaCalls, request: Request) -> Call:
        return scripted.add(unscripted(calls, request), request)

    sys.argv = [sys.argv[0], *others, "--model", given.model, "--backend", "llama.cpp"]
    with patch.object(LlamaCalls, "call", call):
        rekindle()


if __name__ == "__main__":
    main()
