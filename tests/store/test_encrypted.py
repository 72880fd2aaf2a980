"""An encrypted store: what a reader of its files learns, what is refused, and what a purge leaves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rekindle.config import StoreSettings
from rekindle.errors import StoreError
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.records import Entry, Records, open_records
from rekindle.store import admin
from rekindle.store.commands import Purge
from rekindle.store.files.keys import Given
from rekindle.store.files.records import RecordFormat
from rekindle.store.files.sealed_reader import SealedReader
from rekindle.store.files.sealed_records import bound, opened_record, sealed_record
from rekindle.store.files.shards import Bytes, RecordAt
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.files.veil import Veil
from rekindle.store.replica_slots import ReplicaSlots
from rekindle.store.warm import WarmStore
from rekindle_models.stored import holds
from tests.store.chains import FINGERPRINT, LAYOUT, SIZE, Chain, load, open_store, payload_of, save, warm_tokens

KEY, OTHER = "ab" * 32, "cd" * 32
MASTER = bytes.fromhex(KEY)
IDS = list(range(70_000, 70_000 + 3 * SIZE + 5))
Opened = Callable[..., WarmStore]


@pytest.fixture
def encrypted(opened: Opened) -> Callable[..., WarmStore]:
    return lambda **settings: opened(**{"key": KEY, **settings})


def place(tmp_path: Path) -> Path:
    return tmp_path / "store" / FINGERPRINT.hex()


def records_start(shard: bytes) -> int:
    """Where the first record of a shard begins."""
    return 8 + int.from_bytes(shard[:8], "little")


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_nothing_that_says_something_is_in_any_file(encrypted: Opened, tmp_path: Path) -> None:
    store = encrypted(model="a-model", namespaces=("tenant-of-ours",))
    chain = Chain.of(store, IDS, "tenant-of-ours")
    for block in chain.blocks:
        assert store.stage(block)
    store.save_turn(chain.record("agent-of-theirs", namespace="tenant-of-ours"))
    assert store.flush(10)
    given = Given(master=MASTER)
    responses = open_records(
        tmp_path / "store/responses.db", max_responses=9, max_bytes=1 << 20, retention_s=9, given=given
    )
    output = [{"id": "msg_of_theirs", "content": "what was said"}]
    response = {"id": "resp_of_theirs", "previous_response_id": "resp_before", "output": output}
    with closing(responses):
        entry = Entry.packed("tenant-of-ours", "agent-of-theirs", response, [])
        receipt = Receipt("tenant-of-ours", "msg_of_theirs", 0, "agent-of-theirs", {"model": "a-model-of-theirs"})
        responses.save([entry], [receipt], 5.0)
        assert responses.receipts("tenant-of-ours", "msg_of_theirs") == [receipt]
        assert responses.find("tenant-of-ours", "resp_of_theirs", now=6.0) == ("agent-of-theirs", response, [])
        place_of_texts = StoreSettings(dir=tmp_path / "store", key=KEY)  # as a server of several models looks for it
        assert holds(place_of_texts, "tenant-of-ours", "resp_of_theirs")
        assert holds(place_of_texts, "tenant-of-ours", "msg_of_theirs"), "by its receipt"
        assert not holds(place_of_texts, "another", "resp_of_theirs")
        assert responses.holder("tenant-of-ours", "msg_of_theirs") == "resp_of_theirs"
        known = [b"tenant-of-ours", b"agent-of-theirs", b"of_theirs", b"resp_before", entry.content[-16:]]
        known += [chain.ids[start : start + 2].astype("<u4").tobytes() for start in range(len(IDS) - 1)]
        known += [
            payload_of(block.identity.hash, part).tobytes()[at : at + 8]
            for block in chain.blocks
            for part in chain.parts
            for at in range(0, LAYOUT.parts[part].payload_bytes - 8, 8)
        ]
        known += [store.secret, MASTER]
        for path, content in files(tmp_path / "store").items():
            assert not [piece for piece in known if piece in content], path
    assert b"a-model" in (place(tmp_path) / "layout.json").read_bytes()  # which models there are is not hidden
    assert responses_of(tmp_path, "tenant-of-ours", "agent-of-theirs") == 1
    store.close()
    again = encrypted()
    assert [(r.namespace, r.agent) for r in again.sequences()] == [("tenant-of-ours", "agent-of-theirs")]
    assert again.sequence_ids(again.sequences()[0]).tolist() == IDS
    assert warm_tokens(again, chain) == len(IDS)
    again.check("records")


def responses_in(tmp_path: Path, master: bytes | None) -> Records:
    path, given = tmp_path / "store/responses.db", Given(master=master)
    return open_records(path, max_responses=9, max_bytes=1 << 20, retention_s=9, given=given)


def responses_of(tmp_path: Path, namespace: str, agent: str) -> int:
    """How many stored responses of an agent are deleted from the file, which is looked through for the rest of it."""
    with closing(responses_in(tmp_path, MASTER)) as file:
        count = file.forget(namespace, agent)
        file.check()
    return count


def test_every_flipped_bit_of_a_record_is_refused() -> None:
    record = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    sealed, out, where = np.empty_like(record), np.empty_like(record), bound(bytes(range(32)), 1, 7)
    seal = sealed_record(record, where, sealed)
    assert opened_record(sealed, seal, where, out) and np.array_equal(out, record)
    for at in range(len(sealed)):
        sealed[at] ^= 1 << at % 8
        assert not opened_record(sealed, seal, where, out) and not out.any(), at
        sealed[at] ^= 1 << at % 8
    for changed in (bound(bytes(range(32)), 1, 8), bound(bytes(range(32)), 0, 7), bound(bytes(32), 1, 7)):
        assert not opened_record(sealed, seal, changed, out)
    for at in range(len(seal)):
        assert not opened_record(sealed, seal[:at] + bytes([seal[at] ^ 4]) + seal[at + 1 :], where, out), at
    assert not opened_record(sealed, b"", where, out) and not opened_record(sealed, seal + b"\0", where, out)


@pytest.mark.parametrize("size", [4096, (1 << 18) + 8192])  # read with its neighbours, and piece by piece
def test_the_reader_says_how_many_leading_records_are_whole(tmp_path: Path, size: int) -> None:
    random, header, padding = np.random.default_rng(size), 192, 100
    records = random.integers(0, 256, (4, size), dtype=np.uint8)
    places, content = [bound(bytes(32), 0, number) for number in range(4)], np.empty_like(records)
    seals = [sealed_record(records[n], places[n], content[n]) for n in range(4)]
    path, reads = tmp_path / "records", list[int]()

    def read(file: int, offset: int, out: Bytes) -> int:
        reads.append(out.nbytes)
        return OsFileSystem().read(file, offset, out)

    def num_whole(now: bytes, first: int = 0) -> int:
        path.write_bytes(now)
        outs = np.zeros((4, size - header - padding), dtype=np.uint8)
        with path.open("rb") as file:
            number = file.fileno()
            wanted = [
                RecordAt(number, size * n, bytes(header), 0, outs[n], padding, seals[n], places[n]) for n in range(4)
            ]
            count = SealedReader(read)(wanted[first:])
        whole = outs[first : first + count]
        assert np.array_equal(whole, records[first : first + count, header : size - padding])
        return count

    assert num_whole(content.tobytes()) == 4 and len(reads) == (1 if size == 4096 else 8)
    for number, at in ((0, 0), (1, header), (2, size // 2), (3, size - 1), (2, size - 4096 + 5)):
        now = content.copy()
        now[number, at] ^= 1
        assert num_whole(now.tobytes()) == number
    assert num_whole(content.tobytes()[:-50]) == 3 and num_whole(content.tobytes()[:-50], first=3) == 0


@pytest.mark.parametrize("part", [0, 1])
def test_a_changed_record_shortens_the_prefix_and_is_saved_again(encrypted: Opened, tmp_path: Path, part: int) -> None:
    store = encrypted()
    chain = Chain.of(store, IDS)
    save(store, chain)
    record_bytes = RecordFormat.of(LAYOUT, part).record_bytes
    stored = store.stored(chain.blocks[1].identity.hash)
    assert stored is not None
    slot = next(each.slot for each in stored.places if each.part == part)
    path = place(tmp_path) / f"blocks-{part}-000.safetensors"
    whole = path.read_bytes()
    offset = records_start(whole) + slot * record_bytes
    known = store.locate(chain.full_names, parent=chain.root, ids=chain.ids[: 3 * SIZE])
    for at in range(0, record_bytes, 509):
        content = bytearray(whole)
        content[offset + at] ^= 16
        path.write_bytes(content)
        assert len(load(store, known)) == 1, at
    path.write_bytes(content)
    save(store, chain, "bob")
    assert warm_tokens(store, chain) == len(IDS)
    store.check("records")


def test_no_checksum_says_what_is_encrypted(encrypted: Opened) -> None:
    store = encrypted()
    save(store, Chain.of(store, IDS))
    assert {row.crc for row in store.index.tables.block.rows(store.index.writer)} == {0}


def test_records_that_were_swapped_or_put_back_are_refused(encrypted: Opened, tmp_path: Path) -> None:
    store = encrypted()
    chain = Chain.of(store, [1] * 3 * SIZE)
    save(store, chain)
    (path,) = place(tmp_path).glob("blocks-0-000.safetensors")
    whole, size = path.read_bytes(), RecordFormat.of(LAYOUT, 0).record_bytes
    start = records_start(whole)
    first, second = (whole[start + n * size : start + (n + 1) * size] for n in (0, 1))
    assert first.strip(b"\0") and second.strip(b"\0")
    path.write_bytes(whole[:start] + second + first + whole[start + 2 * size :])
    assert warm_tokens(store, chain) == 0
    path.write_bytes(whole)
    assert store.submit(Purge("default", "ann")).result(10).slots_freed
    save(store, chain)
    store.close()
    newer = path.read_bytes()
    assert newer[start : start + size] != first  # the same block in the same slot, under another key
    path.write_bytes(whole)
    assert warm_tokens(encrypted(), chain) == 0, "a record from before the purge was served"


def test_a_purge_takes_the_keys_of_its_records(encrypted: Opened, tmp_path: Path) -> None:
    store = encrypted()
    mine, shared = Chain.of(store, IDS), Chain.of(store, IDS[: 2 * SIZE])
    save(store, mine)
    save(store, shared, "bob")
    before = files(tmp_path / "store")
    rows = list(store.index.tables.block.rows(store.index.writer))
    proof = store.submit(Purge("default", "ann")).result(10)
    assert proof.blocks_shared == 2 and proof.slots_freed == 2 * len(mine.parts)
    gone = [row.ids[-48:] for row in rows if not store.contains(row.name)]
    kept = [row.ids[-48:] for row in rows if store.contains(row.name)]
    index = b"".join(path.read_bytes() for path in place(tmp_path).glob("index.db*"))
    assert len(gone) == 2 * len(mine.parts) and not any(seal in index for seal in gone)
    assert all(seal in index for seal in kept)
    store.close()
    for path, content in before.items():  # a thief who copied the records, and has the key of the store as well
        if path.name.startswith("blocks-"):
            path.write_bytes(content)
    again = encrypted()
    assert warm_tokens(again, shared) == 2 * SIZE and warm_tokens(again, mine) == 2 * SIZE
    again.close()
    report = admin.rebuild_store(tmp_path / "store", FINGERPRINT.hex(), master=MASTER)
    assert report.num_blocks == 2, "a rebuild opened records of a purged agent"


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [(KEY, None, "no key is given"), (KEY, OTHER, "another key"), (None, KEY, "without encryption")],
)
def test_another_key_or_none_is_refused_and_changes_nothing(
    opened: Opened, tmp_path: Path, made: str | None, given: str | None, words: str
) -> None:
    store = opened(key=made)
    save(store, Chain.of(store, IDS))
    store.close()
    before = files(tmp_path)
    with pytest.raises(StoreError, match=words) as refused:
        open_store(tmp_path / "store", key=given)
    assert "nothing was changed" in str(refused.value)
    master = None if given is None else bytes.fromhex(given)
    with pytest.raises(StoreError, match=words):
        responses_in(tmp_path, master)
    for offline in (admin.check_store, admin.rebuild_store, admin.agents_of):
        with pytest.raises(StoreError, match=words):
            offline(tmp_path / "store", FINGERPRINT.hex(), master=master)
    assert files(tmp_path) == before
    assert admin.list_stores(tmp_path / "store")[0].num_agents == 1  # figures need no key


def test_slots_share_the_keys_of_their_directory(tmp_path: Path) -> None:
    def claimed() -> WarmStore:
        settings = StoreSettings(
            dir=tmp_path / "store", slot="auto", key=KEY, disk_bytes=1 << 24, staging_bytes=1 << 20
        )
        store = ReplicaSlots(settings, FINGERPRINT).open(
            lambda directory, given: WarmStore.open(
                directory, fingerprint=FINGERPRINT, layout=LAYOUT, settings=given, clock=lambda: 100.0
            )
        )
        store.start()
        return store

    with closing(claimed()) as one, closing(claimed()) as two:
        assert one.secret == two.secret
        chain = Chain.of(one, IDS)
        save(one, chain)
    with closing(claimed()) as heir:
        assert warm_tokens(heir, chain) == len(IDS)
    assert (tmp_path / "store/slot-1/secret").read_bytes() == (tmp_path / "store/secret").read_bytes()
    assert admin.check_store(tmp_path / "store/slot-0", FINGERPRINT.hex(), master=MASTER).is_sound


def test_an_index_set_aside_gives_back_its_records(encrypted: Opened, tmp_path: Path) -> None:
    store = encrypted()
    chain = Chain.of(store, IDS)
    save(store, chain)
    store.close()
    report = admin.rebuild_store(tmp_path / "store", FINGERPRINT.hex(), master=MASTER)
    assert (report.num_blocks, report.num_lost, report.num_sequences) == (4, 0, 1)
    again = encrypted()
    assert [record.agent for record in again.sequences()] == ["ann"] and warm_tokens(again, chain) == len(IDS)
    again.close()
    for path in place(tmp_path).glob("index.db*"):
        path.unlink()
    lost = encrypted()
    assert warm_tokens(lost, chain) == 0 and lost.sequences() == []  # their keys were nowhere else
    save(lost, chain)
    assert warm_tokens(lost, chain) == len(IDS)
    lost.check("records")


def test_the_nearest_child_is_found_among_encrypted_ids(encrypted: Opened) -> None:
    store, random = encrypted(), np.random.default_rng(1)
    chains = [Chain.of(store, random.integers(0, 3, SIZE).tolist()) for _ in range(60)]
    for number, chain in enumerate(chains):
        save(store, chain, f"agent {number}", flush=False)
    assert store.flush(30)
    for _ in range(200):
        asked = random.integers(0, 3, SIZE).astype(np.uint32)
        shared = max(int(np.argmin(np.append(chain.ids == asked, False))) for chain in chains)
        found = store.child(chains[0].root, asked)
        assert (found[1] if found else 0) == shared


def test_traces_say_how_much_siblings_share_and_nothing_else() -> None:
    veil = Veil(bytes(32), "index")
    ids = [np.array(run, dtype="<u4").tobytes() for run in ([1, 2, 3], [1, 2, 4], [2, 2, 3], [1, 2])]
    one, two, three, short = (veil.trace(b"parent", each) for each in ids)
    assert one[:8] == two[:8] == short and one[8:] != two[8:] and one[:4] != three[:4] and one[4:8] != three[4:8]
    assert veil.trace(b"another", ids[0])[:4] != one[:4] and Veil(bytes(32), "x").trace(b"parent", ids[0]) != one
    assert veil.seal(b"text", b"a") != veil.seal(b"text", b"a") and veil.match(b"text") == veil.match(b"text")
    assert veil.open_matched(veil.match(b"")) == b""
