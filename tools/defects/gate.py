"""Defects at the server's door: who may come in, as whom, and how much one tenant may hold."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

CALLER, LIMITS, KEYS, TENANTS = (f"server/gate/{name}.py" for name in ("caller", "limits", "keys", "tenants"))
FILE = "config/key_file.py"
OF_GUARD, OF_LIMITS, OF_TENANTS, OF_IDS, OF_FILE = (
    f"tests/server/test_{name}.py" for name in ("guard", "limits", "tenants", "agent_ids", "key_file")
)
OF_COMMANDS = f"{OF_FILE}::test_commands_leave_the_rest_of_the_file_as_it_was"
OF_SERVER = f"{OF_FILE}::test_a_server_follows_the_file"

GATE: tuple[Mutant, ...] = (
    one(
        "a new agent named as a step of a path",
        "agent_ids.py",
        'if valid in (".", ".."):',
        "if False:",
        f"{OF_IDS}::test_a_new_id_is_no_step_of_a_path",
    ),
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
        KEYS,
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
        TENANTS,
        "bucket.tokens + (now - bucket.at) * per_s",
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
        "share = SHARE if settings.has_tenants() else 1.0",
        "share = 1.0",
        f"{OF_LIMITS}::test_one_namespace_does_not_hold_all_the_room_where_there_are_several",
    ),
    one(
        "a tenant's requests that never end",
        TENANTS,
        "            self._under_way[access.namespace] -= 1\n",
        "            pass\n",
        f"{OF_TENANTS}::test_one_tenant_has_half_of_the_connections_under_way",
    ),
    one(
        "a revoked key that opens",
        KEYS,
        " for key in file.keys if key.revoked is None]",
        " for key in file.keys]",
        OF_SERVER,
    ),
    one("a key file that is read once", KEYS, "self._look() != self._seen", "False", OF_SERVER),
    one(
        "a key file that is not readable opens nothing",
        KEYS,
        "            logger.error(",
        "            self._take(KeyFile())\n            logger.error(",
        OF_SERVER,
    ),
    one(
        "the limits of the file are those of nobody",
        KEYS,
        "return own or self._settings.requests_per_minute",
        "return self._settings.requests_per_minute",
        OF_SERVER,
    ),
    one(
        "with a key file every key of the settings an admin's",
        "config/server.py",
        "self.admin_key is not None or bool(self.api_keys) or self.key_file is not None",
        "self.admin_key is not None or bool(self.api_keys)",
        OF_SERVER,
    ),
    one(
        "a key file alone that asks nobody for a key",
        "config/server.py",
        "self.api_key is not None or bool(self.api_keys) or self.key_file is not None",
        "self.api_key is not None or bool(self.api_keys)",
        "tests/server/test_key_file.py::test_a_key_file_alone_asks_everybody_for_a_key",
    ),
    one("a file of keys for all to read", FILE, "os.O_EXCL, 0o600", "os.O_EXCL, 0o644", OF_COMMANDS),
    one("rights of the key file lost", FILE, "os.chmod(aside, before.st_mode & 0o777)", "pass", OF_COMMANDS),
    one(
        "a key in the clear",
        FILE,
        """f'sha256 = "{digest_of(key).hex()}"']""",
        """f'sha256 = "{digest_of(key).hex()}" # {key}']""",
        OF_COMMANDS,
    ),
)
