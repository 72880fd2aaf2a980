"""Defects in a server of several models: who is let in, what is left, which model and whose a request is."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

PLACES = "rekindle_models/places.py"
NAMED = "rekindle_models/named.py"
WISHES = "rekindle_models/wishes.py"
CHILD = "rekindle_models/child.py"
OF_PLACES, OF_NAMED = (f"tests/host/test_{name}.py" for name in ("places", "named"))
OF_ENGINES, OF_HOST = "tests/host/test_engines.py", "tests/host/test_host.py"

HOSTS: tuple[Mutant, ...] = (
    one(
        "a front whose whole budget of hot memory counts as taken",
        "server/ollama/routes.py",
        "used_bytes if is_front else stats.hot_bytes",
        "stats.hot_bytes",
        f"{OF_ENGINES}::test_what_a_llama_server_keeps_of_a_token_and_what_it_takes_is_said",
    ),
    one(
        "processes of a host that do not know each other's answers",
        CHILD,
        "variables[KEY_VARIABLE] = keys.answers",
        "variables[KEY_VARIABLE] = None",
        f"{OF_HOST}::test_an_answer_of_another_model_is_known_and_says_that_the_model_changed",
    ),
    one(
        "processes of a host that get the secret of a store",
        "rekindle_models/stored.py",
        'derived_key(own or secrets.token_bytes(SECRET_BYTES), b"rekindle.answers").hex()',
        "(own or secrets.token_bytes(SECRET_BYTES)).hex()",
        f"{OF_NAMED}::test_answers_have_one_key_that_lasts_as_long_as_a_store",
    ),
    one(
        "a host that lets requests in past one that waits for a place",
        PLACES,
        'if place.state == "ready" and not needs_room:',
        'if place.state == "ready":',
        f"{OF_PLACES}::test_requests_are_served_in_order_and_those_for_one_model_together",
    ),
    one(
        "a host that swaps at every request",
        PLACES,
        "            self._admit(waiter, place)\n        if not place.num_running:",
        "            pass\n        if not place.num_running:",
        f"{OF_PLACES}::test_requests_are_served_in_order_and_those_for_one_model_together",
    ),
    one(
        "a host that leaves a model with a running request",
        PLACES,
        "idle = [place for place in self.ready() if not place.num_running]",
        "idle = self.ready()",
        f"{OF_PLACES}::test_requests_are_served_in_order_and_those_for_one_model_together",
    ),
    one(
        "a host that leaves the model that was used last",
        PLACES,
        "self._end(min(idle, key=lambda place: place.rested_at))",
        "self._end(max(idle, key=lambda place: place.rested_at))",
        f"{OF_PLACES}::test_the_model_that_was_idle_longest_yields",
    ),
    one(
        "a host that starts again and again what cannot start",
        PLACES,
        "if left_s > 0:",
        "if left_s > AGAIN_S:",
        f"{OF_PLACES}::test_a_start_that_fails_is_the_answer_for_a_while_and_harms_no_other",
    ),
    one(
        "a host that keeps the place of a process that ended by itself",
        PLACES,
        "            self._figures.failures.labels(place.model.name).inc()\n            self._end(place)\n",
        "            self._figures.failures.labels(place.model.name).inc()\n",
        f"{OF_PLACES}::test_one_that_ends_by_itself_is_started_again_when_it_is_asked_for",
    ),
    one(
        "a host whose models share a store",
        NAMED,
        "settings.store.directory() / STORES / name",
        "settings.store.directory() / STORES",
        f"{OF_NAMED}::test_a_table_wins_over_what_all_have_and_flags_over_the_top_of_the_file",
    ),
    one(
        "a host that gives its processes the keys of tenants",
        CHILD,
        "named = {name: secrets.token_urlsafe(32) for name in settings.namespaces()}",
        "named = {name: settings.api_keys.get(name, name) for name in settings.namespaces()}",
        f"{OF_NAMED}::test_processes_have_keys_of_their_own_that_grant_what_a_request_was_granted",
    ),
    one(
        "a host where every tenant is an admin of a model's process",
        CHILD,
        "return self.admin if access.is_admin and self.admin is not None else self.of[access.namespace]",
        "return self.admin if self.admin is not None else self.of[access.namespace]",
        f"{OF_NAMED}::test_processes_have_keys_of_their_own_that_grant_what_a_request_was_granted",
    ),
    one(
        "a host that is deaf to the name in a path",
        WISHES,
        'named = scope.get("state", {}).get(STATE, Headers(scope=scope).get(HEADER))',
        "named = Headers(scope=scope).get(HEADER)",
        f"{OF_NAMED}::test_a_request_names_its_model_in_path_header_or_body",
    ),
    one(
        "a host that starts models for those who watch",
        WISHES,
        'return scope["method"] in ("GET", "HEAD") and WATCHED.fullmatch(scope["path"]) is not None',
        "return False",
        f"{OF_NAMED}::test_what_only_watches_starts_nothing_and_what_no_server_has_is_not_passed_on",
    ),
    one(
        "a host that starts a model for a response that none has",
        "rekindle_models/app.py",
        "if model is None and self.places.state_of(wish.model) is None:",
        "if model is None and False:",
        "tests/host/test_host.py::test_nothing_is_started_for_a_request_without_a_key_or_for_a_name_that_is_not_served",
    ),
)
