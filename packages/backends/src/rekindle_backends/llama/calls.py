"""A request as llama-server is sent it. Pure functions of a request and of what is known of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rekindle.engine.request import Request
from rekindle.errors import BadRequest
from rekindle.model.params import SamplingParams
from rekindle.text.constraints.types import Constraint
from rekindle_backends.calls import check_task, enforced
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.wire import COMPLETION, EventReader, completion_body
from rekindle_backends.wire import Call

SEEDS = (1 << 32) - 1  # of 32 bits; the last one asks for any
PENALISED = 64  # last tokens that presence and frequency penalties count: llama-server's own number
SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """Writes requests for a llama-server with so many tokens of context in each slot, which `may_draft`."""

    max_context: int
    gaps: Gaps
    may_draft: bool

    def call(self, request: Request) -> Call:
        """Return the call of a request, for any slot; BadRequest for what llama-server cannot be asked."""
        check_task(request)
        is_reply = request.sequence.task == "generate"
        options = self._options(request) if is_reply else {"n_predict": 1, "temperature": 0}
        body = completion_body(request.sequence.prompt_ids.tolist(), options)
        is_free = not {"json_schema", "grammar"} & options.keys()
        gaps = self.gaps if is_free else self.gaps.in_grammar()
        reader = EventReader(gaps, request.sequence.num_prompt, may_draft=self.may_draft)
        return Call(COMPLETION, body, {}, reader.read)

    def _options(self, request: Request) -> dict[str, Any]:
        """Return the fields for sampling and its limits. Stop strings and stop tokens are found here, in what comes."""
        params, constraint = request.reply.sampler.params, enforced(request.reply)
        options: dict[str, Any] = {name: getattr(params, name) for name in SAME}
        options |= {"n_predict": request.sequence.max_new_tokens, "seed": request.reply.sampler.seed % SEEDS}
        options |= self._penalties(params)
        if params.min_tokens:
            raise BadRequest("min_tokens: llama-server cannot be asked for it: leave it out", param="min_tokens")
        if params.logit_bias:
            options["logit_bias"] = [[token_id, bias] for token_id, bias in params.logit_bias]
        if params.logprobs is not None:
            options["n_probs"] = max(1, params.logprobs)
        return options if constraint is None else options | written(constraint)

    def _penalties(self, params: SamplingParams) -> dict[str, Any]:
        """Return which tokens penalties count: those of the prompt too, and the same for all three."""
        counts_last = bool(params.presence_penalty or params.frequency_penalty)
        if params.repetition_penalty == 1:
            return {"repeat_last_n": PENALISED if counts_last else 0}
        if counts_last:
            raise BadRequest(
                "repetition_penalty: not together with presence_penalty or frequency_penalty, as llama-server counts "
                "the same tokens for all of them: leave one out",
                param="repetition_penalty",
            )
        return {"repeat_penalty": params.repetition_penalty, "repeat_last_n": self.max_context}


def written(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as fields of a body; BadRequest if llama-server has no such thing."""
    kind, value, param = constraint.kind, constraint.value, constraint.param
    if kind == "json":
        return {"json_schema": {} if value is True else value}
    if kind == "choice":
        return {"grammar": f"root ::= {' | '.join(map(_literal, value))}"}
    if "::=" in value:
        return {"grammar": value}
    raise BadRequest(f"{param}: llama-server takes grammars in its own notation (GBNF), not in Lark's", param=param)


def _literal(text: str) -> str:
    """Return a text in GBNF's quotes."""
    return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda found: f"\\x{ord(found[0]):02x}", text) + '"'
