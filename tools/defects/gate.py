"""Defects at the server's door: who may come in, as whom, and how much one tenant may hold."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

CALLER, LIMITS = "server/gate/caller.py", "server/gate/limits.py"
OF_GUARD, OF_LIMITS, OF_TENANTS, OF_IDS = (
    f"tests/server/test_{name}.py" for name in ("guard", "limits", "tenants", "agent_ids")
)

GATE: tuple[Mutant, ...] = (
    one(
        "pages of other sites reach the server",
        CALLER,
        "        if origin is not None and not self._origin_is_ours(origin, host):\n",
        "        if False:\n",
        f"{OF_GUARD}::test_foreign_pages_are_refused",
        f"{OF_GUARD}::test_a_key_does_not_open_foreign_pages",
    ),
    one(
        "a rebound name is answered on loopback",
        CALLER,
        "        if is_loopback(self._settings.host):\n            return False\n",
        "",
        f"{OF_GUARD}::test_rebound_names_are_refused",
    ),
    one(
        "a public name on any port",
        CALLER,
        "(only is None or only in ports)",
        "True",
        f"{OF_GUARD}::test_other_names_are_not",
    ),
    one(
        "every key an admin's",
        CALLER,
        "Access(name, is_admin=all_are_admins)",
        "Access(name, is_admin=True)",
        f"{OF_GUARD}::test_a_key_opens_its_namespace_and_no_other",
    ),
    one(
        "routes that need a key without one",
        CALLER,
        "        if access is None and (path in KEYLESS_PATHS or path.startswith(KEYLESS)):\n",
        "        if access is None:\n",
        f"{OF_GUARD}::test_a_wrong_key_is_401",
    ),
    one(
        "any tenant asks for any namespace",
        CALLER,
        "    if not access.is_admin:\n",
        "    if False:\n",
        "tests/server/test_namespaces.py",
    ),
    one(
        "sub-agents of two sessions under one name",
        CALLER,
        'return part.replace("%", "%25").replace("/", "%2F")',
        "return part",
        f"{OF_IDS}::test_no_two_sub_agents_are_named_alike",
    ),
    one(
        "a bucket of requests that does not fill",
        LIMITS,
        "bucket.tokens + (now - bucket.at) * self._per_s",
        "bucket.tokens",
        f"{OF_LIMITS}::test_a_bucket_fills_evenly",
    ),
    one(
        "bodies that count for ever",
        LIMITS,
        "            self.budget.give(body.namespace, body.num_held)\n            if body.num_held > LARGE:\n",
        "            if body.num_held > LARGE:\n",
        f"{OF_LIMITS}::test_a_body_is_given_back_however_its_request_ends",
    ),
    one(
        "all room for bodies to one tenant",
        LIMITS,
        "share = SHARE if len(settings.namespaces()) > 1 else 1.0",
        "share = 1.0",
        f"{OF_LIMITS}::test_one_namespace_does_not_hold_all_the_room_where_there_are_several",
    ),
    one(
        "a tenant's requests that never end",
        LIMITS,
        "            self._under_way[access.namespace] -= 1\n",
        "            pass\n",
        f"{OF_TENANTS}::test_one_tenant_has_half_of_the_connections_under_way",
    ),
)
