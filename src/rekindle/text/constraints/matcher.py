"""Which tokens may come next in a reply that is constrained.

Owns the library's view of the vocabulary, made at the first constraint, and the grammars that were compiled last.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rekindle.errors import BadRequest
from rekindle.text.constraints.grammar import MOST_CHARS, ReplyGrammar, answer_grammar, arguments_of
from rekindle.text.constraints.schema import fault
from rekindle.text.constraints.types import CalledTool, Calls, Constraint
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_COMPILED = 64  # grammars that stay compiled


class ReplyMatcher:
    """Follows one reply. Not safe on several threads at once.

    What is too complex to be followed is a BadRequest that names `param`, and has nothing of the library's state.
    """

    def __init__(self, matcher: LLMatcher, num_tokens: int, param: str | None = None) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._param = param

    def copy(self, param: str | None = None) -> ReplyMatcher:
        """Return a matcher in the same state, for another `param` if one is given."""
        return ReplyMatcher(self._matcher.deep_copy(), self._num_tokens, param or self._param)

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next, bool [tokens of the vocabulary]; BadRequest if that is too complex."""
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

    def check_first(self) -> None:
        """Raise BadRequest if the first token cannot be chosen, or not be followed; in the end the state is any."""
        allowed = np.flatnonzero(self.allowed())
        if len(allowed):
            self.take(int(allowed[0]))

    def _check(self) -> None:
        """Raise BadRequest if the grammar is too complex to be followed."""
        if self._matcher.is_error():
            where = "" if self._param is None else f"{self._param}: "
            raise BadRequest(f"{where}this is too complex for a reply to follow: simplify it", param=self._param)


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

    def enforces(self, calls: Calls | None) -> bool:
        """Whether anything of these calls can be enforced in this model's format."""
        return self._grammar.can_write(calls)

    def matcher(self, constraint: Constraint | None, *, opening: str, calls: Calls | None = None) -> ReplyMatcher:
        """Return a matcher at the start of a reply; BadRequest, with the place, if the constraint cannot be enforced.

        `constraint` None: its text may be any. `opening`: what the prompt has begun of the reply; `calls`: it may be
        calls instead, free ones without tools.
        """
        for tool in calls.tools if calls is not None else ():
            self._check(tool)
        answer = None if constraint is None else answer_grammar(constraint)
        arguments = [answer_grammar(arguments_of(tool)) for tool in calls.tools] if calls is not None else []
        with self._lock:
            made = self._cached(answer, arguments, opening, calls)
            if isinstance(made, str):
                answer = None if constraint is None else self._possible(constraint)
                arguments = [self._possible_arguments(tool) for tool in calls.tools] if calls is not None else []
                made = self._cached(answer, arguments, opening, calls)
            if isinstance(made, str):
                raise BadRequest(f"the reply cannot be constrained: {made[:300]}", param=self._param(constraint, calls))
            made.copy(self._param(constraint, calls)).check_first()
            return made.copy(self._param(constraint, calls))

    def _check(self, tool: CalledTool) -> None:
        """Raise BadRequest for a strict tool whose schema says more than this format can enforce."""
        found = self._grammar.unenforced(tool) if tool.is_strict else None
        if found is not None:
            path = f"{tool.param}.{found[0]}".removesuffix(".")
            message = f"{path}: {found[1]} cannot be enforced in this model's calls, which are not JSON: leave it out"
            raise BadRequest(message, param=path)

    def _cached(
        self,
        answer: dict[str, object] | None,
        arguments: Sequence[dict[str, object]],
        opening: str,
        calls: Calls | None,
    ) -> ReplyMatcher | str:
        """Return the compiled grammar of a reply; a text says why there is none."""
        grammar = self._grammar.around(answer, opening=opening, calls=calls, arguments=arguments)
        if len(grammar) > MOST_CHARS:
            return f"it is larger than {MOST_CHARS:,} characters"
        known = self._compiled.pop(grammar, None)
        made = known if known is not None else self._made(grammar)
        if isinstance(made, ReplyMatcher):
            self._compiled[grammar] = made
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return made

    def _possible(self, constraint: Constraint) -> dict[str, object]:
        """Return the grammar of a constraint, schemas that may overlap taken as alternatives; BadRequest for what
        cannot be enforced."""
        wrong = ""
        for coerce_one_of in (False, True) if constraint.kind == "json" else (False,):
            grammar = answer_grammar(constraint, coerce_one_of=coerce_one_of)
            text = json.dumps({"grammars": [grammar]})
            made = self._made(text) if len(text) <= MOST_CHARS else f"it is larger than {MOST_CHARS:,} characters"
            if isinstance(made, ReplyMatcher):
                return grammar
            wrong = wrong or made
        raise self._refusal(constraint, wrong)

    def _possible_arguments(self, tool: CalledTool) -> dict[str, object]:
        """Return the grammar of a tool's arguments; any object for what cannot be enforced and need not be."""
        try:
            return self._possible(arguments_of(tool))
        except BadRequest:
            if tool.is_strict:
                raise
            return answer_grammar(arguments_of(replace(tool, schema=None)))

    @staticmethod
    def _param(constraint: Constraint | None, calls: Calls | None) -> str | None:
        if constraint is not None:
            return constraint.param
        return calls.tools[0].param if calls is not None and calls.tools else None

    def _made(self, grammar: str) -> ReplyMatcher | str:
        """Compile a grammar; a text says why that is not possible."""
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

        if self._tokenizer is None:
            if not self._ends:
                return "the model has no token that ends a reply"
            words = _Words(self._encoder, self._ends[0])
            size = self._encoder.vocabulary.size
            self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=size, eos_token=self._ends)
        # Errors without the tokens that a reply has so far.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
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
