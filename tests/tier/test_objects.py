"""Objects in a directory: written, read, swapped by many at once, listed; a store that is silent is given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rekindle_tier.location import open_location
from rekindle_tier.objects import AHEAD, MOST_BYTES, Objects, TierUnavailable
from rekindle_tier.sealing import OVERHEAD, BadObject, Sealer, Version


def open_objects(directory: Path, *, prefix: str = "model") -> Objects:
    return Objects(open_location(str(directory)), Sealer(b"s" * 32), prefix, directory=directory)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Objects]:
    opened = open_objects(tmp_path / "tier")
    yield opened
    opened.close()


def test_an_object_is_read_as_it_was_written(objects: Objects, tmp_path: Path) -> None:
    assert objects.get("heads/one") is None and objects.modified("heads/one") is None
    objects.put("heads/one", b"data")
    got = objects.get("heads/one")
    assert got is not None and got[0] == b"data"
    on_disk = (tmp_path / "tier" / "model" / "heads" / "one").read_bytes()
    assert b"data" not in on_disk, "it is encrypted"
    modified = objects.modified("heads/one")
    assert modified is not None and modified == pytest.approx((tmp_path / "tier/model/heads/one").stat().st_mtime)


def test_a_swap_needs_the_version_that_was_read(objects: Objects) -> None:
    first = objects.swap("head", b"1", None)
    assert first is not None and objects.swap("head", b"2", None) is None, "it is there by now"
    second = objects.swap("head", b"2", first)
    assert second is not None and objects.swap("head", b"3", first) is None, "another has written since"
    got = objects.get("head")
    assert got is not None and got == (b"2", second)
    objects.delete(["head", "never there"])
    assert objects.get("head") is None and objects.swap("head", b"3", second) is None


def test_of_many_that_swap_at_once_none_is_lost(tmp_path: Path) -> None:
    def add(name: str) -> None:
        own = open_objects(tmp_path / "tier")  # as another process would
        try:
            for number in range(10):
                while True:
                    got = own.get("list")
                    data, version = got if got is not None else (b"", None)
                    if own.swap("list", data + f"{name}{number} ".encode(), version) is not None:
                        break
        finally:
            own.close()

    threads = [threading.Thread(target=add, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    objects = open_objects(tmp_path / "tier")
    got = objects.get("list")
    objects.close()
    assert got is not None and sorted(got[0].split()) == sorted(f"{n}{i}".encode() for n in "abcd" for i in range(10))


def test_many_come_in_order_until_one_is_missing(objects: Objects) -> None:
    names = [f"blocks/{number}" for number in range(3 * AHEAD)]
    objects.put_many([(name, name.encode()) for name in names])
    for num_certain in (0, 5, len(names)):
        got = list(objects.get_many(names, seconds_left=lambda: 30.0, most_bytes=100, num_certain=num_certain))
        assert got == [name.encode() for name in names]
    objects.delete([names[7]])
    got = list(objects.get_many(names[:9], seconds_left=lambda: 30.0, most_bytes=100))
    assert got[7] is None and got[6] == names[6].encode() and got[8] == names[8].encode()


def test_a_listing_is_of_one_folder_and_prefix(objects: Objects, tmp_path: Path) -> None:
    other = open_objects(tmp_path / "tier", prefix="other-model")
    other.put("heads/x", b"")
    other.close()
    objects.put_many([("heads/a", b"1"), ("heads/b", b"22"), ("blocks/c", b"333")])
    listed = {each.name: each.num_bytes for each in objects.list("heads")}
    assert listed.keys() == {"heads/a", "heads/b"} and listed["heads/b"] - listed["heads/a"] == 1
    assert objects.list("nothing") == []


def test_damage_is_reported_with_the_version_to_replace(objects: Objects, tmp_path: Path) -> None:
    objects.put("head", b"data")
    path = tmp_path / "tier" / "model" / "head"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadObject) as caught:
        objects.get("head")
    assert objects.swap("head", b"new", caught.value.version) is not None
    got = objects.get("head")
    assert got is not None and got[0] == b"new"


def test_an_object_that_is_too_large_is_not_read(objects: Objects, tmp_path: Path) -> None:
    objects.put_many([("heads/one", b"data"), ("blocks/one", b"12345")])
    path = tmp_path / "tier" / "model" / "heads" / "one"
    os.truncate(path, MOST_BYTES + OVERHEAD + 1)  # without writing it: as long as somebody likes
    with pytest.raises(BadObject, match="more than it may have") as caught:
        objects.get("heads/one")
    assert objects.swap("heads/one", b"new", caught.value.version) is not None, "and it is replaced"
    assert list(objects.get_many(["blocks/one"], seconds_left=lambda: 30.0, most_bytes=5)) == [b"12345"]
    with pytest.raises(BadObject, match="more than it may have"):
        list(objects.get_many(["blocks/one"], seconds_left=lambda: 30.0, most_bytes=4))


def test_objects_that_are_read_together(objects: Objects, tmp_path: Path) -> None:
    objects.put_many([("one", b"1"), ("other", b"2")])
    got = objects.get_together("one", "nothing", "other")
    assert [each and each[0] for each in got] == [b"1", None, b"2"]
    (tmp_path / "tier" / "model" / "other").write_bytes(b"")
    with pytest.raises(BadObject) as caught:
        objects.get_together("one", "other")
    assert got[0] is not None and caught.value.version == got[0][1], "the first is what would be replaced"


def test_a_silent_store_is_given_up(objects: Objects, tmp_path: Path) -> None:
    objects.put("head", b"data")
    path = tmp_path / "tier" / "model" / "head"
    path.unlink()
    os.mkfifo(path)  # who opens it for reading waits until somebody writes
    with pytest.raises(TierUnavailable, match=r"no answer within 0\.05 s"):
        objects.get("head", timeout_s=0.05)
    with pytest.raises(TierUnavailable, match=r"no answer within 0\.05 s"):
        list(objects.get_many(["head"], seconds_left=lambda: 0.05, most_bytes=100))
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # lets the readers go


def test_closing_ends_what_is_awaited(tmp_path: Path) -> None:
    objects = open_objects(tmp_path / "tier")
    objects.put("head", b"data")
    path = tmp_path / "tier" / "model" / "head"
    path.unlink()
    os.mkfifo(path)
    waiting = threading.Thread(target=lambda: objects.get("head", timeout_s=600.0), daemon=True)
    errors: list[BaseException | None] = []
    threading.excepthook, hook = (lambda args: errors.append(args.exc_value)), threading.excepthook
    try:
        waiting.start()
        objects.close()
        waiting.join()
    finally:
        threading.excepthook = hook
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
    assert [type(error) for error in errors] == [TierUnavailable]
    with pytest.raises(TierUnavailable, match="closed"):
        objects.get("head")


def test_a_store_that_fails_says_what_it_said(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "tier" / "model").mkdir()
    (tmp_path / "tier" / "model" / "heads").write_text("a file where a folder should be")
    with pytest.raises(TierUnavailable, match=r"(?i)heads"):
        objects.put("heads/one", b"data")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A bucket at an endpoint of the environment, whose server knows of none."""
    server = HTTPServer(("127.0.0.1", 0), NothingThere)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    variables = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "REGION": "r"}
    for name, value in (variables | {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    opened = Objects(open_location("s3://bucket/prefix"), Sealer(b"s" * 32), "model", directory=None)
    yield opened
    opened.close()
    server.shutdown()
    serving.join()
    server.server_close()


class NothingThere(BaseHTTPRequestHandler):
    def nothing(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(404, "NoSuchBucket")

    do_GET = do_PUT = nothing

    def log_message(self, *_: object) -> None:
        pass


def test_a_bucket_that_is_not_there_is_not_written_to(bucket: Objects) -> None:
    assert bucket.get("head") is None
    for write in (lambda: bucket.put("block", b"data"), lambda: bucket.swap("head", b"data", None)):
        with pytest.raises(TierUnavailable, match=r"its bucket is not there: .*prefix/model"):
            write()
    assert bucket.swap("head", b"data", Version('"1"', None)) is None, "what was read is gone"


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_lock_that_is_no_file_is_refused_at_once(objects: Objects, tmp_path: Path, kind: str) -> None:
    """A link's target was emptied, and a pipe waited for a reader for good."""
    lock, other = tmp_path / "tier" / ".lock", tmp_path / "other"
    other.write_text("precious", "utf-8")
    version = objects.swap("heads/a", b"1", None)
    {"link": lambda: lock.symlink_to(other), "pipe": lambda: os.mkfifo(lock), "directory": lock.mkdir}[kind]()
    with pytest.raises(TierUnavailable, match=r"its lock .* (cannot be opened|is no file)"):
        objects.swap("heads/a", b"2", version)
    assert other.read_text("utf-8") == "precious"
