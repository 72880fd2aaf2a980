"""The staging buffer: every part has rows of its own, so that large snapshots leave room for blocks."""

from __future__ import annotations

from rekindle.spec import KVLayout, LayerSpec, StateSpec, StateTensor
from rekindle.store.files.records import RecordFormat
from rekindle.store.threads.staging import StagingBuffer

LAYER = LayerSpec(1, 1, 16, 16, None, "q4h", "q4h")
LARGE = StateSpec(0, (StateTensor("recurrent", 0, (1 << 18,), "fp32"),))
FORMATS = [RecordFormat.of(KVLayout(16, (LAYER,), (LARGE,)), part) for part in (0, 1)]


def test_blocks_have_room_while_snapshots_wait() -> None:
    staging = StagingBuffer(FORMATS, 1 << 17)
    snapshots = [staging.take([1]) for _ in range(2)]
    assert staging.take([1]) is None and staging.take([0, 1]) is None, "two, however large"
    blocks = [staging.take([0]) for _ in range((1 << 16) // FORMATS[0].record_bytes)]
    assert None not in snapshots and None not in blocks and len(blocks) > 10
    assert staging.take([0]) is None, "half of the memory is for blocks"
    assert staging.num_waiting == len(snapshots) + len(blocks)
    taken = [(part, row) for rows in (*snapshots, *blocks) for part, row in (rows or {}).items()]
    for number, (part, row) in enumerate(taken):
        staging.payload(part, row)[:] = number
    for number, (part, row) in enumerate(taken):
        assert (FORMATS[part].payload(staging.record(part, row)) == number).all(), "no row has another's bytes"
        staging.give_back({part: row})
        staging.check()
    assert staging.num_waiting == 0 and staging.take([0, 1]) is not None
