"""The grammar library: its view of a vocabulary, its limits, and a walk that finds what a reply could not follow.

Nothing here bounds how long compiling takes: some schemas of a hundred bytes take minutes, and the library cannot be
interrupted. So the `sandbox` compiles first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rekindle.text.constraints.satisfiable import is_satisfiable
from rekindle.text.constraints.schema import repeats

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_STEP_S = 0.1  # of processor time for one token of one reply: others wait for it
WALK_TOKENS = 32
TOO_COMPLEX = "this is too complex, in time or in memory: simplify it"
IMPOSSIBLE = "no reply can satisfy this"
OVERLAPPING = "schemas in oneOf may overlap: use anyOf, or require a property that has another const in each of them"
REPEATED = "minProperties counts names that come twice: require as many names, or set additionalProperties to false"
_OF_ONE_OF = "oneOf constraints"  # in the library's error for them
_IMPOSSIBLE = "NoExtension"  # the library's word for that
_OF_LIMITS = ("limit", "fuel")  # in its errors that speak of limits which callers cannot set


@dataclass(frozen=True, slots=True)
class Words:
    """A vocabulary: the bytes of each token, which ids are control tokens, which ones end a reply; and `encode`, which
    the library calls where a grammar leaves one continuation."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    ends: Sequence[int]
    encode: Callable[[bytes], list[int]]
    bos_token_id: None = None

    @property
    def eos_token_id(self) -> int:
        """One of the tokens that end a reply."""
        return self.ends[0]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize."""
        return self.encode(text.encode() if isinstance(text, str) else text)


def unenforced(grammar: str) -> str:
    """Return why the library would not enforce one of the schemas in a grammar that it compiles; empty if it does."""
    schemas = [each["json_schema"] for each in json.loads(grammar)["grammars"] if "json_schema" in each]
    if not all(map(is_satisfiable, schemas)):
        return IMPOSSIBLE
    return REPEATED if any(map(repeats, schemas)) else ""


class Compiler:
    """Compiles grammars for one vocabulary. Any thread."""

    def __init__(self, words: Words) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper  # a tenth of a second, and few replies are constrained

        self._ends = words.ends
        self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=list(words.ends))

    def compiled(self, grammar: str) -> LLMatcher:
        """Return the matcher of a grammar, which may be in error."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            # 100 tools of 8 arguments take an eighth of these two; with the library's, a regex of 23 bytes took 160 MB.
            initial_lexer_fuel=100_000,
            max_grammar_size=100_000,
            max_lexer_states=25_000,  # of up to 2 kB
            verbose_errors=False,  # which quote the tokens that a reply has so far
        )
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)

    def fault(self, grammar: str) -> str:
        """Return why a grammar cannot be compiled or satisfied, or why a walk through it ends; empty for a good one."""
        return unenforced(grammar) or self.walk(self.compiled(grammar))

    def walk(self, matcher: LLMatcher) -> str:
        """Take some tokens that a matcher allows; return as `fault` does."""
        if matcher.is_error():
            error = str(matcher.get_error())
            if error.startswith(_OF_ONE_OF):
                return OVERLAPPING
            return TOO_COMPLEX if any(word in error for word in _OF_LIMITS) else error
        chosen = np.random.default_rng(0)
        for _ in range(WALK_TOKENS):
            began = time.process_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), self._ends)
            if len(allowed):
                matcher.consume_token(int(chosen.choice(allowed)))
            if matcher.is_error() or time.process_time() - began > MOST_STEP_S:
                return IMPOSSIBLE if str(matcher.get_error()).startswith(_IMPOSSIBLE) else TOO_COMPLEX
            if not len(allowed) or matcher.is_stopped():
                break
        return ""
