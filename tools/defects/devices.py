"""Defects in which device computes, what its memory is enough for, and what is measured of it."""

from __future__ import annotations

from tools.defects.mutant import one

CHOICE = "tests/model/test_devices.py"

DEVICES = (
    one(
        "kernels are launched on the first card, whichever is named",
        "rekindle_cuda/runner.py",
        "        use(self._device)\n",
        "",
        "tests/cuda/test_graphs.py::test_a_thread_that_computes_launches_on_the_card_of_its_model",
    ),
    one(
        "a proof on a card that outlives the code of its kernels",
        "rekindle_cuda/compute.py",
        ", code {code_digest(Path(__file__).parent)}",
        "",
        f"{CHOICE}::test_kernels_for_a_card_come_from_another_package",
    ),
    one(
        "hot KV takes what weights have of a card",
        "model/device.py",
        " - used - step",
        " - step",
        f"{CHOICE}::test_hot_memory_is_what_a_card_has_left_and_a_part_of_a_machine",
    ),
    one(
        "hot KV takes what the group above a container's has used already",
        "compute/cpu/memory.py",
        "min(free, max(0, limit - used))",
        "min(free, limit)",
        f"{CHOICE}::test_control_groups_leave_less_than_the_machine_has",
    ),
    one(
        "only the topmost control group limits memory",
        "compute/cpu/memory.py",
        '        for part in ("", *name.strip("/").split("/")):\n',
        '        for part in ("",):\n',
        f"{CHOICE}::test_control_groups_leave_less_than_the_machine_has",
    ),
    one(
        "weights of any size go to a card",
        "compute/room.py",
        "    if settings.weights not in ROUNDED and own <= most:\n",
        "    if settings.weights not in ROUNDED:\n",
        f"{CHOICE}::test_weights_that_do_not_fit_on_a_card_go_to_the_processor",
    ),
    one(
        "a card computes what was set for the processor",
        "compute/devices.py",
        '    if settings.kernels != "auto":\n',
        "    if False:\n",
        f"{CHOICE}::test_kernels_of_the_processor_leave_the_card_alone",
    ),
    one(
        "8 bits on a card that has room for 4",
        "compute/room.py",
        "if num_bytes <= most), None)",
        "if True), None)",
        f"{CHOICE}::test_weights_take_the_widest_form_that_a_card_has_room_for",
    ),
    one(
        "heads that take no room in 8 bits",
        "compute/room.py",
        "{name: 3 * values + experts",
        "{name: 2 * values + experts",
        f"{CHOICE}::test_bytes_of_rounded_weights_are_estimated_before_they_are_read",
    ),
    one(
        "experts of a card computed as on the processor",
        "model/loader.py",
        '    if computes_on == "cpu":\n',
        '    if settings.device == "cpu":\n',
        "tests/model/test_load.py::test_what_a_card_is_to_compute_can_be_loaded_to_the_processor",
    ),
    one(
        "experts that shrink on a card",
        "compute/room.py",
        "wide - experts - 2 * values",
        "wide - 2 * values",
        f"{CHOICE}::test_experts_are_counted_as_they_are",
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
