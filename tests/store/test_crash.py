"""After a crash at any moment the store opens, agrees with itself and still has every turn it called saved.

The crash is put before every operation of the sync module and around every transaction, and inside what SQLite does
with its own files; writes that were not synced are kept, dropped, torn or reordered. `CRASH_RUNS` adds workloads drawn
at random (`make torture`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rekindle.store.warm import WarmStore
from tests.store.campaign import Campaign, Workload, drawn_actions, recorded
from tests.store.careless import CARELESS
from tests.store.chains import Chain, fast_directory, warm_tokens
from tests.store.recording import CRASHES

CRASH_RUNS = int(os.environ.get("CRASH_RUNS", "1"))
NUM_ACTIONS = 12 if CRASH_RUNS == 1 else 25
PLAIN = (
    "turn turn turn extend fork extend rewind turn delete_branch extend delete_agent turn turn extend fork rewind"
    " extend delete_branch turn fork delete_agent extend check"
).split()
FULL = (
    "turn turn extend fork pin fill fill extend touch fill purge turn fill rewind extend fork unpin fill purge turn"
    " extend delete_agent fill check"
).split()
NUM_STATES: dict[str, int] = {}


@pytest.fixture
def directory() -> Iterator[Path]:
    made = fast_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module", autouse=True)
def campaign_size(request: pytest.FixtureRequest) -> Iterator[None]:
    """Say at the end how many states were replayed."""
    yield
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\ncrash campaign: {sum(NUM_STATES.values())} states opened and judged: {NUM_STATES}")


def judge_all(campaign: Campaign, name: str, *, torn: int = 2, kinds: int = len(CRASHES)) -> None:
    """Replay every crash of a recorded run, and count them."""
    try:
        campaign.crash_everywhere(np.random.default_rng(len(name)), torn=torn, kinds=kinds)
    finally:
        NUM_STATES[name] = NUM_STATES.get(name, 0) + campaign.num_states


def test_saved_turns_survive_a_crash_at_any_moment(directory: Path) -> None:
    campaign = recorded(directory, 1, PLAIN)
    whats = {moment.what.split()[0] for moment in campaign.moments}
    assert whats >= {"operation", "BEGIN", "COMMIT", "PRAGMA", "told"}
    assert {operation.kind for operation in campaign.fs.log} == {
        "create",
        "resize",
        "write",
        "sync",
        "punch",
        "rename",
        "names",
    }
    judge_all(campaign, "plain")
    assert campaign.num_states > 500


def test_what_a_full_store_kept_survives(directory: Path) -> None:
    campaign = recorded(directory, 2, FULL, disk_blocks=24)
    assert campaign.num_evicted > 20
    assert any(moment.pins for moment in campaign.moments) and campaign.moments[-1].purged
    judge_all(campaign, "full", torn=1, kinds=1 if CRASH_RUNS == 1 else len(CRASHES))
    assert campaign.num_states > 400


def test_what_is_submitted_during_an_eviction_does_not_hide_its_loss(directory: Path) -> None:
    """The next turn comes between the commit of an eviction and its report, as under load it may."""

    class Overlapped(Campaign):
        def lost(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
            self.submit(("default", "later", 0), range(5))
            super().lost(namespace, agent, branch, num_tokens)

    campaign = Overlapped(directory, disk_blocks=12)
    with campaign.running() as store:
        Workload(campaign, store, np.random.default_rng(0)).run(["fill"] * 4)
    assert campaign.num_evicted > 5
    judge_all(campaign, "overlapped", torn=12, kinds=1)


@pytest.mark.parametrize("seed", range(CRASH_RUNS))
def test_any_workload_survives(directory: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    campaign = recorded(directory, seed, drawn_actions(random, NUM_ACTIONS), disk_blocks=int(random.integers(18, 60)))
    judge_all(campaign, "drawn", torn=1, kinds=2 if CRASH_RUNS == 1 else len(CRASHES))
    assert campaign.num_states > 150


@pytest.mark.parametrize("careless", CARELESS, ids=lambda careless: careless.__name__)
def test_a_careless_store_fails_this_test(directory: Path, careless: Callable[[pytest.MonkeyPatch], None]) -> None:
    actions = ["turn", "turn", "purge", "extend"] if "purge" in careless.__name__ else PLAIN
    campaign = recorded(directory, 1, actions, careless=careless)
    with pytest.raises(AssertionError, match=r"state \d+"):
        campaign.crash_everywhere(np.random.default_rng(1))
    assert campaign.num_states > 10, "it failed at once: the careless copy does not work at all"


def kept_life(directory: Path) -> Campaign:
    """A closed store with a few branches, forked and rewound."""
    return recorded(directory / "first", 3, "turn turn extend fork turn extend rewind fork pin".split(), restart=False)


def test_a_crash_while_opening_costs_nothing(directory: Path) -> None:
    first = recorded(directory / "first", 4, PLAIN[:12], restart=False)
    random = np.random.default_rng(4)
    for number in range(0, len(first.moments), max(1, len(first.moments) // 12)):
        moment = first.moments[number]
        crashed = first.crashed(moment, moment.index, "torn", random)
        if crashed is None:
            continue
        second = first.next_life(directory / f"second-{number}", crashed, moment)
        with second.running():
            pass
        judge_all(second, "opened")
        shutil.rmtree(second.directory)
    assert NUM_STATES["opened"] > 50


def test_a_crash_while_the_index_is_made_anew_loses_no_block(directory: Path) -> None:
    first = kept_life(directory)
    chains = [(key[0], ids) for key, branch in first.branches.items() for ids in first.versions[key][branch.low :][:1]]
    (first.place / "index.db").write_bytes(b"no database" * 999)
    first.branches.clear()
    first.pins.clear()
    second = first.next_life(directory / "second", first.live)

    def blocks_are_warm(store: WarmStore) -> None:
        for namespace, ids in chains:
            assert warm_tokens(store, Chain.of(store, ids, namespace)) == len(ids), "blocks were lost with the index"

    second.also = blocks_are_warm
    with second.running() as store:
        blocks_are_warm(store)
    judge_all(second, "made anew", torn=4)
    assert second.num_states > 10


def test_a_crash_after_the_close_costs_nothing(directory: Path) -> None:
    campaign = recorded(directory, 1, PLAIN)
    last = campaign.moments[-1]
    crashed = campaign.crashed(last, last.index, "dropped", np.random.default_rng(0))
    assert crashed is not None
    assert any(branch.required for branch in last.branches.values())
    store = campaign.open(crashed)
    store.start()
    found = {(record.namespace, record.agent, record.branch): record.num_tokens for record in store.sequences()}
    assert found == {key: branch.required for key, branch in last.branches.items() if branch.required}
    store.close()
