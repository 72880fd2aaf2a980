"""Defects in a front: what a backend is sent and sends, whether it can be used, a vLLM that is started here."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

CALLS = "rekindle_backends/calls.py"
CORE = "rekindle_backends/core.py"
FRONT = "rekindle_backends/assembly.py"
CLIENT = "rekindle_backends/client.py"
KEEPER = "harness/keeper.py"
PROCESS = "harness/own_server.py"
SERVED = "rekindle_backends/served.py"
WIRE = "rekindle_backends/wire.py"
SETTINGS = "config/services.py"
DIALECTS, FAILURES, MEMORY = (f"tests/backends/test_{name}.py" for name in ("dialects", "failures", "memory"))
OF_OWN, OF_SERVED, OF_WIRE = (f"tests/backends/test_{name}.py" for name in ("own_vllm", "served", "wire"))
NOT_VLLM = f"{FAILURES}::test_what_a_server_is_sent_that_is_not_vllm"
REFUSAL = f"{FAILURES}::test_a_refusal"

FRONTS: tuple[Mutant, ...] = (
    one(
        "a front with one salt for all namespaces",
        CALLS,
        '"cache_salt": self._named("namespace", request.namespace)',
        '"cache_salt": self._named("namespace")',
        f"{FAILURES}::test_namespaces_have_salts_of_their_own",
    ),
    one(
        "a front that names conversations without a name",
        CALLS,
        "if kind_of(request.agent) is AgentKind.NAMED else {}",
        "if request.agent else {}",
        f"{FAILURES}::test_counts_of_reuse_are_those_of_the_last_chunk_and_of_the_prompt",
    ),
    one(
        "a front that sends neutral parameters to servers that may not know them",
        CALLS,
        "if is_needed or getattr(params, name) != getattr(NEUTRAL, name):",
        "if name:",
        NOT_VLLM,
    ),
    one(
        "a front that leaves vLLM to the model's own parameters",
        CALLS,
        'known.openai or (known.makers and self.kind == "vllm")',
        "known.openai",
        f"{FAILURES}::test_a_foreign_server_is_enough",
    ),
    one(
        "a front that draws all choices with one seed",
        CALLS,
        'options["seed"] = request.reply.sampler.seed',
        'options["seed"] = params.seed',
        NOT_VLLM,
    ),
    one(
        "a front with the likeliest tokens last",
        CALLS,
        "key=lambda pair: (-pair[1], pair[0])",
        "key=lambda pair: (pair[1], pair[0])",
        f"{DIALECTS}::test_log_probabilities",
    ),
    one(
        "a front that ends a reply before it knows what was reused",
        CORE,
        "            if answer.reason is None:\n                self._release(answer)",
        "            self._release(answer)",
        f"{FAILURES}::test_counts_of_reuse_are_those_of_the_last_chunk_and_of_the_prompt",
    ),
    one(
        "a front that leaves requests open that have ended here",
        CORE,
        "            answer.call.cancel()\n",
        "            pass\n",
        f"{FAILURES}::test_a_timeout_of_ours_ends_the_request_there",
    ),
    one(
        "a front that delivers tokens which the model does not have",
        CORE,
        "if not 0 <= token < self._vocab_size]",
        "if token < 0]",
        REFUSAL,
    ),
    one(
        "a front that counts reuse of a prompt twice",
        CORE,
        "        self._reused_tokens += reused - answer.num_reused\n",
        "",
        f"{FAILURES}::test_counts_of_reuse_are_those_of_the_last_chunk_and_of_the_prompt",
    ),
    one(
        "a front that takes an aborted reply for a finished one",
        CORE,
        "        elif reason in ENDS:\n            self._replies.finish(request, ENDS[reason])",
        '        elif reason:\n            self._replies.finish(request, ENDS.get(reason, "stop"))',
        REFUSAL,
    ),
    one(
        "a front that loses events which two pieces of bytes share",
        WIRE,
        "[bytes(self._rest), *others]",
        "[first, *others]",
        f"{OF_WIRE}::test_events_do_not_depend_on_where_the_bytes_are_cut",
    ),
    one(
        "a front that takes a stream without an end for a whole one",
        CLIENT,
        "has_ended |= piece.reason is not None",
        "has_ended = True",
        REFUSAL,
    ),
    one(
        "a front that fails where its backend is busy",
        CLIENT,
        "if status in (429, 503):",
        "if status == 503:",
        REFUSAL,
    ),
    Mutant(
        "a front that waits without end for a silent backend",
        (
            Edit(CLIENT, "httpx.Timeout(self._address.silence_s, connect=CONNECT_S)", "httpx.Timeout(None)"),
            Edit(CLIENT, "asyncio.timeout(silence_s) as patience", "asyncio.timeout(None) as patience"),
            Edit(CLIENT, "patience.reschedule(self._loop.time() + silence_s)", "None"),
        ),
        (f"{FAILURES}::test_a_silent_backend_is_given_up",),
    ),
    one(
        "a front whose health does not know that the backend is back",
        CLIENT,
        "                self._problem = None\n                await _read",
        "                await _read",
        f"{FAILURES}::test_a_backend_that_goes_away_and_comes_back",
    ),
    one(
        "a front that asks a vLLM which is being started",
        CLIENT,
        "        if refusal is not None:\n            emit(refusal)",
        "        if refusal is not None and not self._ready.is_set():\n            emit(refusal)",
        f"{OF_OWN}::test_one_that_ends_is_started_again",
    ),
    one(
        "a front that does not notice another model at its backend",
        SERVED,
        "        if entry is None:\n            return",
        "        if entry is None and listed is None:\n            return",
        f"{OF_SERVED}::test_what_changes_later_is_noticed",
    ),
    one(
        "a front that takes an adapter for a model",
        SERVED,
        'if not entry.get("parent")]',
        'if entry["id"]]',
        f"{OF_SERVED}::test_the_model_that_is_meant",
    ),
    one(
        "a front over another tokenizer",
        SERVED,
        "if tokens != list(ids):",
        "if len(tokens) > len(ids):",
        f"{FAILURES}::test_an_unfit_backend_at_the_start",
    ),
    one(
        "a front that leaves processes of a vLLM which has ended",
        KEEPER,
        "    _end_rest(process.pid, stop_s)\n",
        "",
        f"{OF_OWN}::test_one_that_ends_is_started_again",
    ),
    one(
        "a front that starts vLLM again without end",
        PROCESS,
        "if has_answered and self._clock() - began >= STEADY_S:",
        "if has_answered:",
        f"{OF_OWN}::test_one_that_ends_too_often_is_given_up",
    ),
    one(
        "a front that counts attempts of a vLLM which had served for long",
        PROCESS,
        "self._clock() - began >= STEADY_S",
        "self._clock() - began < 0",
        f"{OF_OWN}::test_one_that_ends_too_often_is_given_up",
    ),
    one(
        "a front that lets clients wait for a vLLM which is given up",
        PROCESS,
        "return Unavailable(problem) if self._is_given_up else Overloaded(",
        "return Overloaded(",
        f"{OF_OWN}::test_one_that_cannot_start_again_is_given_up",
    ),
    one(
        "a front whose prompts may be longer than its backend takes",
        FRONT,
        "max_context=min(limits)",
        "max_context=max(limits)",
        f"{FAILURES}::test_a_context_that_nobody_names",
    ),
    Mutant(
        "a front that finds texts of another tokenizer",
        (Edit(FRONT, ', "tokenizer": tokenizer}', "}"),),
        (f"{MEMORY}::test_another_tokenizer_finds_nothing",),
    ),
    one(
        "a front that ignores settings of what computes",
        FRONT,
        "known.field) != known.default:",
        "known.field) is NotImplemented:",
        f"{MEMORY}::test_settings_of_what_computes_are_refused",
    ),
    one(
        "a front that asks for /v1/v1",
        SETTINGS,
        '.rstrip("/").removesuffix("/v1")',
        '.rstrip("/")',
        f"{OF_SERVED}::test_where_a_backend_is",
    ),
    one(
        "a front that takes keys in URLs, which logs show",
        SETTINGS,
        "need(parts.username is None,",
        "need(parts.port != 0,",
        f"{OF_SERVED}::test_an_address_may_hold_no_key",
    ),
)
