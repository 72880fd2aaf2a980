"""After a purge no file of the store holds anything of the agent, not even in the gaps of the index's pages.

SQLite's `secure_delete` clears the cells that are deleted, but balancing its trees leaves copies of cells that moved in
the free space of pages. About one purge in a hundred met one, in an index in which much came and went.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.store.campaign import Campaign, Workload, drawn_actions, find_nothing
from tests.store.chains import fast_directory

NUM_WORKLOADS = 12 * int(os.environ.get("CRASH_RUNS", "1"))
NUM_PURGES = 25


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    shutil.rmtree(made)


class UnrecordedCampaign(Campaign):
    """Keeps the notebook alone."""

    def _turn_page(self, what: str) -> None:
        """Nothing crashes here."""


def test_a_purged_agent_leaves_no_trace(directory: Path) -> None:
    for seed in range(NUM_WORKLOADS):
        campaign = UnrecordedCampaign(directory / f"{seed}", disk_blocks=60)
        store = campaign.open(on_saved=campaign.told, on_lost=campaign.lost)
        store.start()
        random = np.random.default_rng(seed)
        workload = Workload(campaign, store, random)
        for _ in range(NUM_PURGES):
            workload.run(drawn_actions(random, 10))
            workload.run(["purge"])
            find_nothing(campaign.directory, campaign.purged[-1:])
        store.close()
