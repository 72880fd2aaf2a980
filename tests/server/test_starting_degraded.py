"""A server starts and answers on a disk that is full or may not be written: what it cannot keep it says.

Each case runs in a process of its own: on a small disk that is filled to the last byte where one can be mounted, else
with files that may not grow; as a user to whom the directory does not belong, or who may not write it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import Settings
from rekindle.errors import StoreError, StoreLocked
from tests.server.conftest import Served
from tests.server.scripted import serving, write_scripted_model
from tests.store.chains import fast_directory
from tests.store.confined import NOBODY, limit_files, mount_small, run_apart

DISK_BYTES = 8 << 20
SAID = "talk please"
SESSIONS = "/v1/coordination/sessions"
PLAN = {"agents": [{"name": "Ada"}, {"name": "Ben"}]}
CHANGES = {
    "offload": ("POST", "/v1/agents/ada/offload", None),
    "pin": ("POST", "/v1/agents/ada/pin", None),
    "fork": ("POST", "/v1/agents/ada/fork", {"target": "eve"}),
    "rewind": ("POST", "/v1/agents/ada/rewind", {"turns": 1}),
    "delete": ("DELETE", "/v1/agents/ada", None),
    "purge": ("POST", "/v1/agents/ada/purge", None),
}


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    made.chmod(0o755)
    yield made
    for path in [made, *made.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(made)


def filled(place: Path, *, is_disk: bool) -> Callable[[], None]:
    """Leave no byte free; what makes room again."""
    if not is_disk:
        limit_files(1)
        return lambda: limit_files(None)
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    assert os.statvfs(place).f_bavail == 0
    return ballast.unlink


def spoken(served: Served) -> str:
    """What the agent says to `SAID`."""
    answer = served.chat(SAID, agent="ada", max_tokens=5)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def responded(served: Served, **more: Any) -> dict[str, Any]:
    answer = served.send("POST", "/v1/responses", {"input": SAID, "max_output_tokens": 4, **more}, x_agent_id="ada")
    assert answer.status == 200, answer.body
    return dict(answer.json)


def check_degraded(served: Served) -> None:
    """It answers, says what does not work, and promises nothing that it cannot keep."""
    assert spoken(served) == spoken(served) == "It is in the attic of the house."
    first = responded(served)
    assert first["store"] is False and first["rekindle"]["not_stored"]
    second = responded(served, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    created = served.send("POST", SESSIONS, PLAN)
    assert created.status in (200, 503), created.body
    health = served.send("GET", "/health/ready").json
    assert health["status"] == "degraded"
    assert any("cannot be used" in each or "cannot be opened" in each for each in health["problems"]), health
    assert served.send("GET", "/health/live").status == 200
    listed = served.send("GET", "/v1/agents").json["data"]
    assert [each["id"] for each in listed if "/" not in each["id"]] == ["ada"]
    for name, (method, path, body) in CHANGES.items():
        answer = served.send(method, path, body)
        assert (answer.status, answer.error["code"]) == (503, "store_unavailable"), (name, answer.body)
    (ada,) = (each for each in served.send("GET", "/v1/agents").json["data"] if each["id"] == "ada")
    assert ada["saved_tokens"] == 0 and ada["hot_tokens"] > 0 and not ada["pinned"]


def on_a_full_disk(directory: Path, was_used: bool, more: dict[str, Any]) -> str:
    """Start on it, make room, start again."""
    place = directory / "disk"
    place.mkdir()
    is_disk = mount_small(place, DISK_BYTES)
    flags: dict[str, Any] = {"model": write_scripted_model(directory / "model"), "store": place / "store"}
    flags |= {"threads": 1, "hot_bytes": "64MiB", "disk_bytes": "4MiB", **more}
    (place / "store").mkdir(mode=0o700)
    kept = created = None
    if was_used:
        with serving(**flags) as served:
            spoken(served)
            kept = responded(served)
            assert kept["store"] is True
            created = served.send("POST", SESSIONS, PLAN)
            assert created.status == 200, created.body
    make_room = filled(place, is_disk=is_disk)
    with serving(**flags) as served:
        check_degraded(served)
        make_room()
        last = responded(served)
        assert last["store"] is True, "kept again without a restart"
        if kept is not None:
            assert served.send("GET", f"/v1/responses/{kept['id']}").json == kept
    with serving(**flags) as served:
        ready = served.send("GET", "/health/ready").json
        assert (ready["status"], ready["problems"], ready.get("slot")) == ("ok", [], 0 if more else None)
        assert served.send("GET", f"/v1/responses/{last['id']}").json == last
        assert spoken(served)
        assert served.send("POST", "/v1/agents/ada/pin").json["pinned"] is True
        if kept is not None and created is not None:
            assert served.send("GET", f"/v1/responses/{kept['id']}").json == kept
            assert created.json["id"] in [each["id"] for each in served.send("GET", SESSIONS).json["data"]]
    return "disk" if is_disk else "limit"


def where_nobody_may_write(directory: Path) -> str:
    """Start in a directory of somebody else, or in one that may not be written."""
    (directory / "store").mkdir()
    flags: dict[str, Any] = {"model": write_scripted_model(directory / "model"), "store": directory / "store"}
    flags |= {"threads": 1, "hot_bytes": "64MiB"}
    with serving(**flags) as served:
        spoken(served)
    for path in (directory / "model").rglob("*"):
        path.chmod(0o644)
    (directory / "store").chmod(0o555)
    who = "itself"
    if os.getuid() == 0:
        who = "nobody"
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with serving(**flags) as served:
        check_degraded(served)
    with pytest.raises(StoreError, match="cannot be used"):
        Engine(Settings.load(flags | {"store": directory / "store" / "new"})).start()
    return who


@pytest.mark.parametrize(
    ("was_used", "more"),
    [(True, {}), (False, {}), (False, {"slot": "auto", "secret": "seventeen letters"})],
    ids=["used", "new", "slot"],
)
def test_a_server_starts_on_a_full_disk(directory: Path, was_used: bool, more: dict[str, Any]) -> None:
    print(run_apart(on_a_full_disk, directory, was_used, more))


def test_a_server_starts_where_it_may_not_write(directory: Path) -> None:
    print(run_apart(where_nobody_may_write, directory))


def test_a_store_that_another_process_holds_is_an_error(tmp_path: Path) -> None:
    flags = {"model": write_scripted_model(tmp_path / "model"), "store": tmp_path / "store", "threads": 1}
    with serving(**flags), pytest.raises(StoreLocked, match="is in use by process"):
        Engine(Settings.load(flags)).start()
