"""Defects in the slots of replicas."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

SLOTS = "store/replica_slots.py"
TESTS = "tests/store/test_replica_slots.py"
ENGINE = "tests/engine/test_replicas.py"

REPLICAS: tuple[Mutant, ...] = (
    one(
        "a start that gives up as another took its slot",
        SLOTS,
        "except StoreLocked:  # by a process that started at the same time",
        "except StoreRefused:",
        f"{TESTS}::test_threads_that_start_together_have_different_ones",
    ),
    one(
        "a slot that remembers left for a new one",
        SLOTS,
        "for look in range(NUM_LOOKS):",
        "for look in range(0):",
        f"{TESTS}::test_a_free_one_that_remembers_goes_before_a_new_one",
    ),
    one(
        "a slot looked at once",
        SLOTS,
        "NUM_LOOKS, LOOK_S = 10, 0.01",
        "NUM_LOOKS, LOOK_S = 1, 0.01",
        f"{TESTS}::test_a_glance_of_another_process_does_not_cost_the_memory",
    ),
    one(
        "a slot of another secret opened",
        SLOTS,
        "if not hmac.compare_digest(directory_keys(directory, self._fs, self._given.master).secret, secret):",
        "if not directory_keys(directory, self._fs, self._given.master):",
        f"{TESTS}::test_one_that_cannot_be_used_is_passed_over[secret]",
    ),
    one(
        "a new slot on a disk that refuses",
        SLOTS,
        "if isinstance(error, StoreRefused):  #",
        "if isinstance(error, StoreLocked):  #",
        f"{TESTS}::test_a_disk_that_refuses_makes_no_new_one",
    ),
    one(
        "a secret for each slot",
        "store/files/keys.py",
        "content = _content(directory.parent / SECRET_FILE, fs)",
        "content = secrets.token_bytes(SECRET_BYTES)",
        f"{TESTS}::test_each_has_its_own_and_a_free_one_is_warm",
    ),
    one(
        "a slot that is held from one start to the next",
        "engine/api.py",
        "assemble(self._given,",
        "assemble(self.settings,",
        f"{ENGINE}::test_an_engine_that_starts_again_looks_for_a_slot_again",
    ),
    one(
        "sessions of all slots in one file",
        "config/parts.py",
        "self._own(data_directory(self.dir)) / SESSIONS_FILE",
        "data_directory(self.dir) / SESSIONS_FILE",
        "tests/test_config.py::test_a_slot_has_sessions_of_its_own_and_shares_responses",
    ),
    one(
        "slots that are not listed with their directory",
        "store/maintenance/stale.py",
        "for place, slot in places for path in stores_in(place)]",
        "for place, slot in places[:1] for path in stores_in(place)]",
        f"{TESTS}::test_slots_are_listed_checked_and_collected_with_their_directory",
    ),
    one(
        "a disk budget for each model of a directory",
        "store/maintenance/room.py",
        "self._most = ours - self._others.num_bytes()\n",
        "self._most = ours\n",
        "tests/store/test_other_stores.py::test_two_models_stay_within_one_budget",
    ),
    one(
        "a slot shown to callers without a key",
        "server/info.py",
        'return JSONResponse({"status": status, "problems": []}, code)',
        'return JSONResponse({"status": status, "problems": []} | _slot(engine.settings.store), code)',
        "tests/server/test_replicas.py::test_a_slot_is_for_those_with_a_key",
    ),
)
