"""What a namespace has in the file of sessions is counted as it is written, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import QuotaExceeded
from rekindle_sessions.log.records import Memory, SessionRecords
from rekindle_sessions.log.usage import Quota, Used
from rekindle_sessions.machine.types import Entry, MessagePosted, Participant, Plan, Prelude

PLAN = Plan((Participant("Ada", "Ä" * 100, agent="ada"), Participant("Ben")))
PRELUDE = Prelude("You are Ada.", (Entry("heard", "Hi. " * 50, "Ben"),))


def test_it_is_what_the_file_says_whatever_is_written_and_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    records = SessionRecords.open(path)
    numbers = [records.create("a", f"s{at}", PLAN, {"Ada": PRELUDE} if at else {}, 1.0) for at in range(3)]
    other = records.create("b", "s0", PLAN, {}, 1.0)
    assert records.usage.of("b").num_bytes < records.usage.of("a").num_bytes / 2
    before = records.usage.of("a")
    records.append(numbers[0], 0, [MessagePosted("Host", "ö" * 500, None), MessagePosted("Host", "x", None)], 2.0)
    assert records.usage.of("a").num_bytes >= before.num_bytes + 1001
    records.check()
    records.delete(numbers[1], "a", [Memory("ada", 5.0, PRELUDE), Memory("ben", 5.0, None)])
    records.delete(other, "b", [])
    records.check()
    assert records.usage.of("b") == Used(0, 0) == records.usage.of("nobody")
    used = records.usage.of("a")
    assert used.num_sessions == 2
    records.close()
    records = SessionRecords.open(path)
    assert records.usage.of("a") == used
    assert records.forget("a", "ada")
    assert records.usage.of("a").num_bytes < used.num_bytes - 200
    records.delete(numbers[2], "a", [Memory("ada", 9.0, PRELUDE)])
    records.check()
    records.close()


def test_a_quota_says_what_there_is_and_what_to_delete() -> None:
    quota = Quota(num_sessions=3, num_bytes=1_000)
    quota.check("a", Used(2, 900), sessions=1, num_bytes=100)
    with pytest.raises(QuotaExceeded, match=r"'a' has 3 sessions of 0.9 kB; it may have 3 sessions: delete some"):
        quota.check("a", Used(3, 900), sessions=1)
    with pytest.raises(QuotaExceeded, match=r"'a' has 2 sessions of 2000.0 MB, 0.1 kB more .* it may have 1.0 kB: del"):
        quota.check("a", Used(2, 2_000_000_000), num_bytes=100)
    quota.check("a", Used(3, 900), num_bytes=100)
    Quota().check("a", Used(3, 1 << 60), num_bytes=1 << 60)
