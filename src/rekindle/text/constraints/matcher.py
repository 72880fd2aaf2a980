"""Which tokens may come next in a reply that is constrained.

Owns the library's view of the vocabulary, made at the first constraint, and the grammars that were compiled last.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle.errors import BadRequest, RequestFailed
from rekindle.text.constraints.grammar import MOST_CHARS, ReplyGrammar, answer_grammar
from rekindle.text.constraints.schema import fault
from rekindle.text.constraints.types import Constraint
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64  # grammars that stay compiled


class ReplyMatcher:
    """Follows one reply. Not safe on several threads at once."""

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens

    def copy(self) -> ReplyMatcher:
        """Return a matcher in the same state."""
        return ReplyMatcher(self._matcher.deep_copy(), self._num_tokens)

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, bool [tokens of the vocabulary]; RequestFailed if that is too complex."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(words, bitorder="little")[: self._num_tokens].view(np.bool_)

    def take(self, token_id: int) -> None:
        """Follow a token that is allowed."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end of the reply may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        """Raise RequestFailed if the grammar is too complex to be followed."""
        if self._matcher.is_error():
            raise RequestFailed(f"the reply's grammar cannot be followed: {self._matcher.get_error()[:300]}")


class _Words:
    """The vocabulary in the shape that the library reads."""

    def __init__(self, encoder: PromptEncoder, end: int) -> None:
        vocabulary = encoder.vocabulary
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.size)]
        self.special_token_ids = [at for at in range(vocabulary.size) if vocabulary.is_control_token(at)]
        self.eos_token_id, self.bos_token_id = end, None
        self._encoder = encoder

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize; the library asks for that where a grammar leaves one continuation, to skip ahead."""
        given = text if isinstance(text, str) else text.decode("utf-8", "replace")
        (ids,) = self._encoder.tokenizer.encode([given])
        return [int(token_id) for token_id in ids]


class ReplyConstraints:
    """Makes matchers for one model. `ends`: ids that end its replies. Any thread may ask."""

    def __init__(self, encoder: PromptEncoder, form: ReplyFormat, *, ends: Collection[int]) -> None:
        self._encoder = encoder
        self._grammar = ReplyGrammar(form, encoder.reply_pieces, ends)
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, ReplyMatcher] = OrderedDict()

    def matcher(self, constraint: Constraint, *, opening: str, calls: bool) -> ReplyMatcher:
        """Return a matcher at the start of a reply; BadRequest, with the place, if the constraint cannot be enforced.

        `opening`: what the prompt has begun of the reply; `calls`: the reply may be a tool call instead.
        """
        answer = answer_grammar(constraint)
        grammar = self._grammar.around(answer, opening=opening, calls=calls)
        if len(grammar) > MOST_CHARS:
            message = f"{constraint.param} is larger than {MOST_CHARS:,} characters"
            raise BadRequest(message, param=constraint.param)
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.copy()
            made = self._made(grammar)
            if (
                isinstance(made, str) and constraint.kind == "json"
            ):  # schemas that may overlap are taken as alternatives
                coerced = answer_grammar(constraint, coerce_one_of=True)
                other = self._made(self._grammar.around(coerced, opening=opening, calls=calls))
                made = made if isinstance(other, str) else other
            if isinstance(made, str):
                raise self._refusal(constraint, made)
            self._compiled[grammar] = made
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
            return made.copy()

    def _made(self, grammar: str) -> ReplyMatcher | str:
        """Compile a grammar; a text says why that is not possible."""
        from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

        if self._tokenizer is None:
            if not self._ends:
                return "the model has no token that ends a reply"
            words = _Words(self._encoder, self._ends[0])
            size = self._encoder.vocabulary.size
            self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=self._ends)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        return str(matcher.get_error()) if matcher.is_error() else ReplyMatcher(matcher, self._encoder.vocabulary.size)

    def _refusal(self, constraint: Constraint, error: str) -> BadRequest:
        """Return the error of a constraint, for a schema with the path of its part that is wrong."""
        where, param = constraint.param, constraint.param
        if constraint.kind == "json":
            path, error = fault(constraint.value, self._wrong) if self._wrong(constraint.value) else ("", error)
            where, param = (f"{where}: at {path}", f"{param}.{path}") if path else (where, param)
        lines = " ".join(line.strip() for line in error.splitlines())
        return BadRequest(f"{where}: {lines[:300]}", param=param)

    def _wrong(self, schema: Any) -> str:
        made = self._made(json.dumps({"grammars": [answer_grammar(Constraint("json", schema))]}))
        return made if isinstance(made, str) else ""
