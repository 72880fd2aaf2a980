"""Defects of running it for others: restarts that hand over, what a tenant may use, what is reported of requests."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

HANDOVER, CONNECTIONS = "server/handover.py", "server/connections.py"
ROLLING = "tests/server/test_handover.py::test_a_rolling_restart_under_load_refuses_breaks_and_changes_nothing"
SOCKETS = "tests/server/test_handover.py::test_sockets_that_others_reach_need_a_key_and_what_does_not_listen_is_refused"

QUOTAS, OF_QUOTAS = "server/gate/quotas.py", "tests/server/test_quotas.py"
OF_DAY = f"{OF_QUOTAS}::test_tokens_of_a_day_run_out_for_their_namespace_alone_and_over_restarts"

TRACES = "server/observers/traces.py"
OF_TRACES = "tests/server/test_traces.py::test_a_collector_gets_each_request_with_its_phases_and_no_text"

OPERATING: tuple[Mutant, ...] = (
    one("a next process that failed ends this one", HANDOVER, "if has_loaded:", "if True:", ROLLING),
    one("the next process opens the store at once", "engine/factory.py", "    before_store()\n", "", ROLLING),
    one(
        "a cancelled request that costs all of its prompt",
        "engine/core/sampling.py",
        "done = sequence.num_prompt if is_computed else min(sequence.num_computed, sequence.num_prompt)",
        "done = sequence.num_prompt",
        "tests/engine/test_spending.py::test_a_cancelled_one_costs_what_was_done_until_then",
    ),
    one(
        "tokens of a day that count nothing",
        "server/app.py",
        "    engine.meter = quotas.spend\n",
        "",
        f"{OF_QUOTAS}::test_listeners_and_turns_that_are_left_count_too",
    ),
    one(
        "the next process in a slot of its own",
        "cli/serving.py",
        "if handover.slot is not None:",
        "if False:",
        ROLLING,
    ),
    one(
        "kept connections cut at a handover",
        "server/running.py",
        "        if self._handover.is_lasting:\n            await self._drain()\n",
        "",
        ROLLING,
    ),
    one(
        "an answer that does not say that its connection closes",
        CONNECTIONS,
        'self.cycle.scope["headers"] = [*headers, CLOSE]',
        "self.cycle.keep_alive = False",
        ROLLING,
    ),
    one("systemd keeps the old process", HANDOVER, '            notify(f"MAINPID={self._next.pid}")\n', "", ROLLING),
    one(
        "a socket of systemd's that anybody reaches without a key",
        "server/listening.py",
        "if not (settings.open or settings.needs_key or is_loopback(host)):",
        "if False:",
        SOCKETS,
    ),
    one(
        "a day that never ends",
        QUOTAS,
        "        if self._counts.day != day:\n",
        "        if False:\n",
        f"{OF_QUOTAS}::test_a_day_ends_at_midnight",
    ),
    one("tokens of today forgotten by a stop", QUOTAS, "counts if counts.day == day else", "", OF_DAY),
    one(
        "tokens of all on one account",
        QUOTAS,
        "self._today().setdefault(namespace,",
        'self._today().setdefault("a",',
        OF_DAY,
    ),
    one(
        "tokens that are counted and not limited",
        "server/gate/tenants.py",
        "if problem is None:\n            await self._app(scope, receive, send_with_rest",
        "if True:\n            await self._app(scope, receive, send_with_rest",
        OF_DAY,
    ),
    one(
        "phases of nobody's request",
        TRACES,
        "within, at = set_span_in_context(self._span)",
        "within, at = Context()",
        OF_TRACES,
    ),
    one(
        "a caller's trace that ends here",
        TRACES,
        "context=None if request is None else request.parent",
        "context=None",
        OF_TRACES,
    ),
    one(
        "problems of the server alone that no figure has",
        "server/observers/gauges.py",
        "len(health.problems) + len(self._problems())",
        "len(health.problems)",
        "tests/server/test_key_file.py::test_a_server_follows_the_file",
    ),
)
