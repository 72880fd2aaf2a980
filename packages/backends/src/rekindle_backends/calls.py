"""A request as a backend is sent it: token ids, sampling parameters, and whose it is. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.agent_ids import AgentKind, kind_of
from rekindle.config import BackendKind
from rekindle.engine.request import Reply, Request
from rekindle.errors import BadRequest
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.params import PARAMETERS, SamplingParams
from rekindle.text.constraints.grammar import arguments_of
from rekindle.text.constraints.types import Constraint
from rekindle_backends.wire import COMPLETIONS, Call, ScoredToken, completion_body, read_piece

NEUTRAL = SamplingParams()
TRANSLATED = frozenset({"max_tokens", "seed", "stop", "logit_bias", "logprobs", "prompt_logprobs"})


@dataclass(frozen=True, slots=True)
class BackendCalls:
    """Writes requests for the model `model` of a backend of one kind.

    `secret` names namespaces and agents where a server only has to distinguish them.
    """

    kind: BackendKind
    model: str
    secret: bytes

    def call(self, request: Request) -> Call:
        """Return the call of a request; BadRequest for what another server cannot be asked."""
        check_task(request)
        options = (
            self._sampling(request) if request.sequence.task == "generate" else {"max_tokens": 1, "temperature": 0}
        )
        body = completion_body(self.model, request.sequence.prompt_ids.tolist(), options | self._owner(request))
        # Routers keep an agent's requests on one replica by it.
        session = self._named("session", request.namespace, request.agent)
        return Call(COMPLETIONS, body, {"X-Session-ID": session}, read_piece)

    def _sampling(self, request: Request) -> dict[str, Any]:
        params = request.reply.sampler.params
        options: dict[str, Any] = {"max_tokens": request.sequence.max_new_tokens}
        for name, known in PARAMETERS.items():
            if name in TRANSLATED:
                continue
            # vLLM takes the model's own where they are not sent.
            is_needed = known.openai or (known.makers and self.kind == "vllm")
            if is_needed or getattr(params, name) != getattr(NEUTRAL, name):
                options[name] = getattr(params, name)
        if request.reply.stream.ends_anywhere:  # the backend reads no answer in a reply: others are searched here
            options["stop"] = request.reply.stream.ends_anywhere
        if params.seed is not None:
            options["seed"] = request.reply.sampler.seed
        if params.logit_bias:
            options["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if params.logprobs is not None:
            options |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        if (constraint := enforced(request.reply)) is not None:
            options |= self._constraint(constraint)
        return options

    def _constraint(self, constraint: Constraint) -> dict[str, Any]:
        if self.kind == "vllm":
            value = list(constraint.value) if constraint.kind == "choice" else constraint.value
            return {"structured_outputs": {constraint.kind: value}}
        return {
            "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": constraint.value}}
        }

    def _owner(self, request: Request) -> dict[str, Any]:
        """Return whose KV it is: for vLLM a salt of the namespace, and names for our connector."""
        if self.kind != "vllm":
            return {}
        named = {"agent": request.agent} if kind_of(request.agent) is AgentKind.NAMED else {}
        return {
            "cache_salt": self._named("namespace", request.namespace),
            "kv_transfer_params": {"namespace": request.namespace, **named},
        }

    def _named(self, kind: str, *names: str) -> str:
        text = "\0".join((kind, *names)).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=32, key=self.secret, person=b"rekindle-front").hexdigest()


def check_task(request: Request) -> None:
    """Raise BadRequest for what no other server can be asked."""
    if request.sequence.task == "load":
        raise BadRequest("load: the memory is that of the server that computes, which loads it when it is asked")
    if request.sequence.scores is not None:
        raise BadRequest("prompt_logprobs: not where another server computes", param="prompt_logprobs")


def enforced(reply: Reply) -> Constraint | None:
    """Return what the backend is to enforce: a constraint, or the arguments of a forced call."""
    calls = reply.calls
    if calls is None or not calls.is_forced:
        return reply.constraint
    return arguments_of(next(tool for tool in calls.tools if tool.name == calls.name))


def logprob_of(token: int, score: ScoredToken, num_top: int, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """Return the log probability of a token and of the `num_top` likeliest at its position, most likely first."""
    likeliest = sorted(score.top.items(), key=lambda pair: (-pair[1], pair[0]))[:num_top]
    top = tuple(TokenLogprob(token_id, logprob, bytes_of(token_id)) for token_id, logprob in likeliest)
    return TokenLogprob(token, score.logprob, bytes_of(token), top)


def scored(
    tokens: Sequence[int], scores: Sequence[ScoredToken | None], num_top: int | None, bytes_of: Callable[[int], bytes]
) -> list[tuple[TokenLogprob, ...]]:
    """Return what is reported of each token: its log probability if that was requested and came, else nothing."""
    if num_top is None:
        return [() for _ in tokens]
    return [
        () if score is None else (logprob_of(token, score, num_top, bytes_of),)
        for token, score in zip(tokens, scores, strict=True)
    ]
