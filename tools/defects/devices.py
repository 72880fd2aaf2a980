"""Defects in which device computes, what its memory is enough for, and what is measured of it."""

from __future__ import annotations

from tools.defects.mutant import one

CHOICE = "tests/model/test_devices.py"

DEVICES = (
    one(
        "hot KV takes what weights have of a card",
        "model/device.py",
        " - used - step",
        " - step",
        f"{CHOICE}::test_hot_memory_is_what_a_card_has_left_and_a_part_of_a_machine",
    ),
    one(
        "weights of any size go to a card",
        "compute/devices.py",
        "    if needed <= most:\n",
        "    if True:\n",
        f"{CHOICE}::test_weights_that_do_not_fit_on_a_card_go_to_the_processor",
    ),
    one(
        "a card computes what was set for the processor",
        "compute/devices.py",
        '            found = f"{name}={given} is for the processor"\n',
        "            pass\n",
        f"{CHOICE}::test_settings_of_the_processor_leave_the_card_alone",
    ),
    one(
        "rows are steady that nothing else was computed with",
        "model/selftest.py",
        "runner.forward([*company, step])",
        "runner.forward([step])",
        "tests/model/test_selftest.py::test_rows_that_decode_are_steady_if_no_company_changes_them",
    ),
    one(
        "what serves a model is not what was tried",
        "model/trial.py",
        "            loaded.compute.runner(loaded, arena)\n",
        "            ModelRunner(loaded, arena)\n",
        "tests/model/test_trial.py::test_what_serves_a_model_is_what_its_trial_runs",
    ),
    one(
        "what a card computes counts as overhead",
        "model/runner.py",
        "        self._runner.model_s += self._runner.clock() - began\n",
        "",
        "tests/model/test_runner.py::test_seconds_are_those_of_launching_and_of_waiting_once",
    ),
    one(
        "any reply passes where bits are not promised",
        "demo/report.py",
        "            holds = share >= EQUAL_WANTED\n",
        "            holds = True\n",
        "tests/demo/test_demo.py::test_where_bits_are_not_promised_replies_may_part_late_and_not_at_once",
    ),
)
