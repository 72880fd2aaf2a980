"""Real SIGKILLs at random moments of random work: every turn a process told saved is there after it.

`KILLS=1000` makes it a thousand (`make torture`); tests/server/test_kills.py does the same to a whole server.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.chains import fast_directory
from tests.store.killed import Killer

NUM_KILLS = int(os.environ.get("KILLS", "12"))
LONGEST_S = 0.3


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    shutil.rmtree(made)


@pytest.mark.timeout(60 + 10 * NUM_KILLS)
def test_what_was_told_saved_survives_a_kill(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moments = random.Random(7)
    killer = Killer(directory, disk_blocks=60)
    while min(killer.num_kills, killer.num_told) < NUM_KILLS:  # a slow machine tells less before each
        killer.kill(killer.num_kills, moments.uniform(0, LONGEST_S))
    with capsys.disabled():
        print(f"\n{killer.num_kills} processes killed; {killer.num_told} turns they told saved were there")
