"""Events as bytes: whatever a payload says, a reader of lines finds one line with all of it."""

from __future__ import annotations

import json

from rekindle.server.answers.sse import event

TEXT = "a\nb\r\u0085c\u2028d\u2029e\x0b\x0c\x1cf é 🙂"


def test_no_reader_of_lines_splits_an_event() -> None:
    lines = event({"text": TEXT}, "delta").decode().splitlines()
    assert lines[0] == "event: delta"
    assert json.loads(lines[1].removeprefix("data: ")) == {"text": TEXT}
    assert lines[2:] == [""]
