"""Defects of what the page shows: figures of the last hour, branches as a tree."""

from __future__ import annotations

from tools.defects.mutant import Mutant, one

TODAY, OF_TODAY = "server/observers/today.py", "tests/server/test_today.py"

PAGE: tuple[Mutant, ...] = (
    one(
        "requests of the page's last hour that are older",
        TODAY,
        "if minute > first else ()",
        "if True else ()",
        f"{OF_TODAY}::test_the_last_hour_by_outcome",
    ),
    one(
        "the page shows the fastest first token as the median",
        TODAY,
        "if before >= half > 0), None)",
        "if before > 0), None)",
        f"{OF_TODAY}::test_the_last_hour_by_outcome",
    ),
    one(
        "seconds that the page shows as saved, by the pace of single steps",
        TODAY,
        "report.computed_tokens >= LEAST_PACED and",
        "report.computed_tokens > 0 and",
        f"{OF_TODAY}::test_saved_is_what_computing_at_todays_pace_would_have_taken",
    ),
    one(
        "time of loading that the page shows as saved",
        TODAY,
        " / known.paced_tokens - known.load_s)",
        " / known.paced_tokens)",
        f"{OF_TODAY}::test_saved_is_what_computing_at_todays_pace_would_have_taken",
    ),
    one(
        "what the page shows as saved today, since the start",
        TODAY,
        "        if known.day != day:\n",
        "        if known.day < 0:\n",
        f"{OF_TODAY}::test_saved_is_what_computing_at_todays_pace_would_have_taken",
    ),
    one(
        "a request of several choices counted by each on the page",
        TODAY,
        "            self._is_counted = True\n",
        "",
        f"{OF_TODAY}::test_a_request_with_several_choices_counts_once",
    ),
    one(
        "minutes of the page's last hour kept for ever",
        TODAY,
        "while len(known.minutes) > HOUR:",
        "while False:",
        f"{OF_TODAY}::test_hours_and_namespaces_are_bounded",
    ),
    one(
        "reuse that was switched off counted on the page",
        TODAY,
        '        if report.reuse == "off":\n            return\n',
        "",
        f"{OF_TODAY}::test_the_last_hour_by_outcome",
    ),
    one(
        "bytes of the tiers on the page for every key",
        "server/page/page.py",
        "_memory_use(engine) if access_of(request).is_admin else None",
        "_memory_use(engine)",
        "tests/page/test_overview.py::test_bytes_of_the_tiers_are_for_admins",
    ),
    one(
        "a branch drawn on the page after a newer one",
        "engine/memory/branches.py",
        "for each in branches if each.number < branch.number]",
        "for each in branches if each.number != branch.number]",
        "tests/engine/test_sharing.py::test_a_branch_began_with_the_older_one_that_has_most_of_it",
    ),
)
