"""Files that an earlier version wrote open as they are: agents are warm, responses and sessions are there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.config import RESPONSES_FILE, SESSIONS_FILE
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.stored import StoredResponses
from rekindle.store.rows.index import LOG_BYTES
from rekindle_sessions.log.records import SavedSession, SessionRecords
from tests.data.written_by_0_1 import write as written
from tests.store.chains import Chain, open_store, warm_tokens


@pytest.fixture
def directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A copy, in which nothing is found to be damaged."""
    assert written.__file__ is not None
    place = tmp_path / "store"
    shutil.copytree(Path(written.__file__).parent, place, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in place.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    yield place
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert not list(place.rglob("*damaged*"))


def test_agents_of_0_1_are_warm(directory: Path) -> None:
    with closing(open_store(directory)) as store:
        store.start()
        assert {record.agent: record.num_tokens for record in store.sequences()} == {
            agent: len(ids) for agent, ids in written.AGENTS.items()
        }
        for ids in written.AGENTS.values():
            assert warm_tokens(store, Chain.of(store, ids)) == len(ids)
        assert store.pins() == {("default", "bob"): written.PINNED_UNTIL}
        store.check("records")
        writer = store.index.writer
        found = [writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "wal_autocheckpoint")]
        assert found == [4096, LOG_BYTES // 4096], "its pages stay as they are"


def test_responses_of_0_1_are_kept(directory: Path) -> None:
    with closing(StoredResponses(directory / RESPONSES_FILE, clock=lambda: 200.0)) as responses:
        responses.start()
        assert responses.chain("team", "resp_2") == [written.FIRST, written.SECOND]
        assert responses.item("team", "msg_resp_1") == written.FIRST.response["output"][0]
        receipt = Receipt("team", "resp_3", 0, None, {})
        responses.keep_receipt(receipt, responses.ticket())
        assert responses.flush() and responses.receipts("team", "resp_3") == [receipt], "its table was added"
        responses.check()


def test_sessions_of_0_1_are_there(directory: Path) -> None:
    with closing(SessionRecords.open(directory / SESSIONS_FILE)) as sessions:
        (card,) = sessions.cards()
        kept = sessions.session(card.number)
        assert kept == SavedSession(
            card.number, "team", "garden", 4.0, 5.0, written.PLAN, written.PRELUDES, written.EVENTS
        )
        assert sessions.remembered("team", "ada") == written.MEMORY
        sessions.check()
