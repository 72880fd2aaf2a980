"""Which tokens may come next in a reply that is constrained.

Owns the grammars that were compiled last, up to `MOST_BYTES` of memory, and how much processor time one request's
grammars may take. What is new is tried in the `sandbox` first, so `matcher` may take a second: a thread that others
wait for asks `is_ready` before.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rekindle.errors import BadRequest, Cancelled
from rekindle.text.constraints.compiling import MOST_STEP_S, TOO_COMPLEX, Compiler, Words
from rekindle.text.constraints.grammar import MOST_CHARS, ReplyGrammar, answer_grammar, arguments_of, is_gbnf
from rekindle.text.constraints.sandbox import Sandbox
from rekindle.text.constraints.types import CalledTool, Calls, Constraint
from rekindle.text.length import exceeds
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ReplyFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BYTES = 128 << 20  # of grammars that stay compiled
LEAST_BYTES = 64 << 10  # of one of them
MOST_LARK_CHARS = 1 << 20  # of grammars that were written in another notation
MOST_READY = 8 << 10  # characters and values of a constraint that may be looked up while others wait
MOST_S = 1.0  # of processor time for the grammars of one request
PART_S = 0.25  # for one of its parts, once it is known that they do not compile together


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
        began = time.thread_time()
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check(began)
        return np.unpackbits(words, bitorder="little")[: self._num_tokens].view(np.bool_)

    def take(self, token_id: int) -> None:
        """Follow a token that is allowed."""
        began = time.thread_time()
        self._matcher.consume_token(token_id)
        self._check(began)

    @property
    def is_over(self) -> bool:
        """Whether nothing but the end of the reply may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self, began: float) -> None:
        """Raise BadRequest if the grammar is too complex to be followed, or takes longer than a step may."""
        if self._matcher.is_error() or time.thread_time() - began > MOST_STEP_S:
            raise _refusal(TOO_COMPLEX, self._param)


def _refusal(error: str, param: str | None, path: str = "") -> BadRequest:
    """Return the error of a constraint, for a schema with the path of its part that is wrong."""
    where = "" if param is None else f"{param}: at {path}: " if path else f"{param}: "
    lines = " ".join(line.strip() for line in error.splitlines())
    return BadRequest(f"{where}{lines[:300]}", param=f"{param}.{path}" if param and path else param)


@dataclass(slots=True)
class _Budget:
    """What one request may still take: processor time in the sandbox, and only while somebody waits for it."""

    is_wanted: Callable[[], bool]
    seconds: float = field(default=MOST_S)

    def take(self, most: float) -> float:
        """Return the seconds for the next trial, at most `most`; Cancelled if nobody waits, BadRequest if none is
        left."""
        if not self.is_wanted():
            raise Cancelled("cancelled before it began")
        return max(0.01, min(most, self.seconds))


class Constraints(Protocol):
    """What constrains the replies of one model: masks of `ReplyConstraints`, or another server that computes."""

    def enforces(self, calls: Calls) -> bool:
        """Whether anything of these calls is to be enforced."""

    def is_ready(self, constraint: Constraint | None, *, opening: str, calls: Calls | None = None) -> bool:
        """Whether `matcher` takes no time."""

    def matcher(
        self,
        constraint: Constraint | None,
        *,
        opening: str,
        calls: Calls | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> ReplyMatcher | None:
        """Return what masks a reply, None if nothing does; BadRequest for what cannot be enforced."""

    def close(self) -> None:
        """End the processes that try grammars; calling twice is safe."""


class ReplyConstraints:
    """Makes matchers for one model. `ends`: ids that end its replies. Any thread may ask.

    Up to `most_bytes` of grammars stay compiled, those that were asked for last.
    """

    def __init__(
        self, encoder: PromptEncoder, form: ReplyFormat, *, ends: Collection[int], most_bytes: int = MOST_BYTES
    ) -> None:
        self._most_bytes = most_bytes
        self._encoder = encoder
        self._grammar = ReplyGrammar(form, encoder.reply_pieces, ends)
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._library: tuple[Compiler, Sandbox] | None = None
        self._compiled: OrderedDict[str, tuple[ReplyMatcher, int]] = OrderedDict()  # by `_key`, with bytes
        self._num_bytes = 0
        self._lark: OrderedDict[str, str] = OrderedDict()  # by the same grammar in GBNF
        self._lark_chars = 0

    def enforces(self, calls: Calls | None) -> bool:
        """Whether anything of these calls can be enforced in this model's format."""
        return self._grammar.can_write(calls)

    def is_ready(self, constraint: Constraint | None, *, opening: str, calls: Calls | None = None) -> bool:
        """Whether `matcher` takes no time: its grammar is small, and compiled."""
        tools = calls.tools if calls is not None else ()
        if exceeds([constraint and constraint.value, *(tool.schema for tool in tools)], MOST_READY):
            return False
        if constraint is not None and is_gbnf(constraint):
            with self._lock:
                lark = self._lark.get(constraint.value)
            if lark is None:
                return False
            constraint = replace(constraint, value=lark)
        try:
            grammar = self._whole(*_asked(constraint, calls), opening, calls)
        except BadRequest:
            return True
        with self._lock:
            return _key(grammar, calls) in self._compiled

    def matcher(
        self,
        constraint: Constraint | None,
        *,
        opening: str,
        calls: Calls | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> ReplyMatcher:
        """Return a matcher at the start of a reply; BadRequest, with the place, if the constraint cannot be enforced.

        `constraint` None: its text may be any. `opening`: what the prompt has begun of the reply; `calls`: it may be
        calls instead, free ones without tools. Cancelled once it is not wanted any more.
        """
        for tool in calls.tools if calls is not None else ():
            self._check(tool)
        param = _param(constraint, calls)
        for each in (constraint, *map(arguments_of, calls.tools if calls is not None else ())):
            if each is not None and exceeds([each.value], MOST_CHARS):
                raise _refusal(f"it is larger than {MOST_CHARS:,} characters", each.param)
        budget = _Budget(is_wanted)
        if constraint is not None and is_gbnf(constraint):
            constraint = self._in_lark(constraint, budget)
        grammar = self._whole(*_asked(constraint, calls), opening, calls)
        with self._lock:
            known = self._compiled.get(_key(grammar, calls))
            if known is not None:
                self._compiled.move_to_end(_key(grammar, calls))
        made = known[0] if known is not None else self._made(grammar, constraint, opening, calls, budget)
        return made.copy(param)

    def _made(
        self,
        grammar: str,
        constraint: Constraint | None,
        opening: str,
        calls: Calls | None,
        budget: _Budget,
    ) -> ReplyMatcher:
        """Compile the grammar of a reply, or one with what of it can be enforced, and keep it."""
        possible = grammar
        error, num_bytes = self._tried(grammar, budget, MOST_S / 2)
        if error:
            answer = None if constraint is None else self._possible(constraint, budget)
            arguments = [self._possible_arguments(tool, budget) for tool in calls.tools] if calls is not None else []
            possible = self._whole(answer, arguments, opening, calls)
            error, num_bytes = self._tried(possible, budget, MOST_S)
        if error:
            raise _refusal(error, _param(constraint, calls))
        compiler, _ = self._opened()
        made = ReplyMatcher(compiler.compiled(possible), self._encoder.vocabulary.size)
        self._keep(_key(grammar, calls), made, max(LEAST_BYTES, num_bytes) + len(grammar))
        return made

    def _in_lark(self, constraint: Constraint, budget: _Budget) -> Constraint:
        """Return a grammar in GBNF in Lark's notation: the library's translator takes time for the square of its rules,
        and fails on some texts in ways of its own, so the sandbox runs it."""
        with self._lock:
            known = self._lark.get(constraint.value)
        if known is None:
            _, sandbox = self._opened()
            tried = sandbox.tried({"gbnf": constraint.value}, seconds=budget.take(MOST_S / 2))
            budget.seconds -= tried.seconds
            if tried.error:
                raise _refusal(tried.error, constraint.param)
            known = tried.lark
            with self._lock:
                self._lark_chars += len(known) + len(constraint.value) if constraint.value not in self._lark else 0
                self._lark[constraint.value] = known
                while self._lark_chars > MOST_LARK_CHARS:
                    self._lark_chars -= sum(map(len, self._lark.popitem(last=False)))
        return replace(constraint, value=known)

    def _keep(self, key: str, made: ReplyMatcher, num_bytes: int) -> None:
        with self._lock:
            _, replaced = self._compiled.pop(key, (None, 0))
            self._compiled[key] = made, num_bytes
            self._num_bytes += num_bytes - replaced
            while self._num_bytes > self._most_bytes:
                _, (_, dropped) = self._compiled.popitem(last=False)
                self._num_bytes -= dropped

    def close(self) -> None:
        """End the processes that try grammars; calling twice is safe."""
        if self._library is not None:
            self._library[1].close()

    def check(self) -> None:
        """Assert that the bytes of what is kept add up, and are within their bound."""
        with self._lock:
            assert self._num_bytes == sum(num for _, num in self._compiled.values()), f"{self._num_bytes} bytes"
            assert self._num_bytes <= self._most_bytes, f"{self._num_bytes} bytes are kept"
            assert self._lark_chars == sum(map(len, (*self._lark, *self._lark.values()))) <= MOST_LARK_CHARS

    def _check(self, tool: CalledTool) -> None:
        """Raise BadRequest for a strict tool whose schema says more than this format can enforce."""
        found = self._grammar.unenforced(tool) if tool.is_strict else None
        if found is not None:
            path = f"{tool.param}.{found[0]}".removesuffix(".")
            message = f"{path}: {found[1]} cannot be enforced in this model's calls, which are not JSON: leave it out"
            raise BadRequest(message, param=path)

    def _whole(
        self,
        answer: dict[str, object] | None,
        arguments: Sequence[dict[str, object]],
        opening: str,
        calls: Calls | None,
    ) -> str:
        """Return the serialized grammar of a reply."""
        return self._grammar.around(answer, opening=opening, calls=calls, arguments=arguments)

    def _tried(self, grammar: str, budget: _Budget, most: float) -> tuple[str, int]:
        """Return what is wrong with a grammar, empty for nothing, and the bytes that it takes compiled."""
        if len(grammar) > MOST_CHARS:
            return f"it is larger than {MOST_CHARS:,} characters", 0
        if not self._ends:
            return "the model has no token that ends a reply", 0
        _, sandbox = self._opened()
        tried = sandbox.tried({"grammar": grammar}, seconds=budget.take(most))
        budget.seconds -= tried.seconds
        return tried.error, tried.num_bytes

    def _possible(self, constraint: Constraint, budget: _Budget) -> dict[str, object]:
        """Return the grammar of a constraint; BadRequest for what cannot be enforced."""
        grammar = answer_grammar(constraint)
        error, _ = self._tried(json.dumps({"grammars": [grammar]}), budget, PART_S)
        if error:
            raise self._placed(constraint, error, budget)
        return grammar

    def _possible_arguments(self, tool: CalledTool, budget: _Budget) -> dict[str, object]:
        """Return the grammar of a tool's arguments. If it is not strict, schemas that may overlap are taken as
        alternatives, and what cannot be enforced as any object."""
        asked = arguments_of(tool)
        if tool.is_strict:
            return self._possible(asked, budget)
        for coerce_one_of in (False, True):
            grammar = answer_grammar(asked, coerce_one_of=coerce_one_of)
            if not self._tried(json.dumps({"grammars": [grammar]}), budget, PART_S)[0]:
                return grammar
        return answer_grammar(arguments_of(replace(tool, schema=None)))

    def _placed(self, constraint: Constraint, error: str, budget: _Budget) -> BadRequest:
        """Return the error of a constraint, with the place in its schema where that is found in time."""
        if constraint.kind != "json" or not self._ends or len(json.dumps(constraint.value)) > MOST_CHARS:
            return _refusal(error, constraint.param)
        _, sandbox = self._opened()
        tried = sandbox.tried({"schema": constraint.value}, seconds=budget.take(PART_S))
        return _refusal(tried.error if tried.path else error, constraint.param, tried.path)

    def _opened(self) -> tuple[Compiler, Sandbox]:
        with self._lock:
            if self._library is None:
                vocabulary = self._encoder.vocabulary
                words = Words(
                    [vocabulary.token_bytes(token_id) for token_id in range(vocabulary.size)],
                    [at for at in range(vocabulary.size) if vocabulary.is_control_token(at)],
                    self._ends,
                    self._encoded,
                )
                self._library = Compiler(words), Sandbox(words)
            return self._library

    def _encoded(self, text: bytes) -> list[int]:
        (ids,) = self._encoder.tokenizer.encode([text.decode("utf-8", "replace")])
        return [int(token_id) for token_id in ids]


def _asked(
    constraint: Constraint | None, calls: Calls | None
) -> tuple[dict[str, object] | None, list[dict[str, object]]]:
    """Return the grammars of a reply's text and of the arguments of its calls, as they were asked for."""
    answer = None if constraint is None else answer_grammar(constraint)
    return answer, [answer_grammar(arguments_of(tool)) for tool in calls.tools] if calls is not None else []


def _key(grammar: str, calls: Calls | None) -> str:
    """Return what a compiled grammar is kept under: the one that was asked for, as loose tools may get another."""
    strict = "".join(str(int(tool.is_strict)) for tool in calls.tools) if calls is not None else ""
    return f"{strict} {grammar}"


def _param(constraint: Constraint | None, calls: Calls | None) -> str | None:
    if constraint is not None:
        return constraint.param
    return calls.tools[0].param if calls is not None and calls.tools else None
