"""Defects in the secret that is made from a setting."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

KEYS = "store/files/keys.py"
SECRETS = "tests/engine/test_secrets.py"

SECRET: tuple[Mutant, ...] = (
    one(
        "another secret taken",
        KEYS,
        "if wanted is not None and not hmac.compare_digest(keys.secret, wanted):",
        "if wanted is not None and not keys.secret:",
        f"{SECRETS}::test_another_secret_is_refused_before_the_weights_are_loaded",
    ),
    one(
        "a secret that is not derived",
        KEYS,
        "secrets.token_bytes(SECRET_BYTES) if secret is None else secret",
        "secrets.token_bytes(SECRET_BYTES)",
        f"{SECRETS}::test_names_are_equal_where_the_secret_is",
    ),
    one(
        "without a store, names by a random secret",
        "store/replica_slots.py",
        "if settings.secret is None else derived_secret(settings.secret)",
        "if settings.secret is None else secrets.token_bytes(SECRET_BYTES)",
        f"{SECRETS}::test_names_are_equal_where_the_secret_is",
    ),
    one(
        "a secret compared after the weights are loaded",
        "engine/builder.py",
        "given_keys(directory, given, fs)",
        "pass",
        f"{SECRETS}::test_another_secret_is_refused_before_the_weights_are_loaded",
    ),
    one(
        "a secret among the settings of a measurement",
        "harness/client.py",
        'left_out = ("store", "secret", ',
        'left_out = ("store", ',
        "tests/test_config.py::test_a_slot_is_a_number_or_a_text_and_a_secret_has_no_flag",
    ),
    one(
        "a secret quoted by an error",
        "config/loading.py",
        "if known.kind is str and is_secret(known.about) and not isinstance(value, str):",
        "if False:",
        "tests/test_config.py::test_what_a_slot_and_a_secret_may_be",
    ),
    one(
        "a random secret once a full disk has room",
        "server/app.py",
        "max_bytes=most, given=Given.of(store))",
        "max_bytes=most)",
        "tests/server/test_starting_degraded.py::test_a_server_starts_on_a_full_disk[slot]",
    ),
)
