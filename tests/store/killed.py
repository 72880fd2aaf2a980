"""A process that works on a store until it is killed, and tells about every step through a pipe.

What was told before the kill is the notebook by which the parent judges what is left. The process knows nothing of its
end: SIGKILL comes from outside, at any moment. Holds no model, so a kill costs some tens of milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.store.commands import Delete
from rekindle.store.rows.ledger import Ledger
from tests.forks import forking
from tests.store.campaign import Branch, Campaign, Key, Moment, Workload, drawn_actions

TOLD = ("submit", "told", "lost", "deleting", "deleted", "proven", "pinning", "note_pin", "note_unpin")


class TellingCampaign(Campaign):
    """Sends every entry of the notebook to whoever reads the pipe."""

    def __init__(self, directory: Path, pipe: Connection, disk_blocks: int) -> None:
        super().__init__(directory, disk_blocks=disk_blocks)
        self._sending = threading.Lock()
        self._pipe = pipe
        for name in TOLD:
            setattr(self, name, self._telling(name))

    def _telling(self, name: str) -> Any:
        note = getattr(self, name)

        def tell(*args: Any) -> None:
            with self._sending:
                self._pipe.send((name, args))
                note(*args)

        return tell

    def _turn_page(self, what: str) -> None:
        """Nobody replays these moments."""


def work(directory: Path, disk_blocks: int, seed: int, ids: dict[Key, list[int]], pipe: Connection) -> None:
    """What the process does, for ever."""
    campaign = TellingCampaign(directory, pipe, disk_blocks)
    for key, held in ids.items():
        campaign.versions[key] = [tuple(held)]
        campaign.branches[key] = Branch(0, 1, len(held), len(held))
    campaign.now = time.time()
    evict = Ledger.evict

    def telling_evict(ledger: Ledger, *args: Any) -> Any:
        shortened = evict(ledger, *args)
        for cut in shortened:
            campaign.lost(cut.namespace, cut.agent, cut.branch, cut.num_tokens)
        return shortened

    Ledger.evict = telling_evict  # before its transaction is durable, else a kill right behind it looks like a loss
    random = np.random.default_rng(seed)
    pipe.send(("ready", ()))
    store = campaign.open(on_saved=campaign.told)
    store.start()
    workload = Workload(campaign, store, random)
    workload.ids = dict(ids)
    workload.names = iter(f"agent-{seed}-{number}" for number in range(1_000_000))
    while True:
        workload.run(drawn_actions(random, 30))


class Killer:
    """Kills one process after another on the same store; `campaign` is the parent's notebook."""

    def __init__(self, directory: Path, disk_blocks: int) -> None:
        self.campaign = Campaign(directory, disk_blocks=disk_blocks)
        self.ids: dict[Key, list[int]] = {}
        self.num_kills = 0
        self.num_told = 0
        self._context = forking()

    def kill(self, seed: int, after_s: float) -> None:
        """Let a process work for so long, kill it, note what it told, judge the store and go on from what is there."""
        ours, theirs = self._context.Pipe(duplex=False)
        args = (self.campaign.directory, self.campaign.disk_blocks, seed, self.ids, theirs)
        process = self._context.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        assert ours.recv()[0] == "ready"
        killing = threading.Timer(after_s, process.kill)
        killing.start()
        try:
            for name, told in _until_the_end(ours):
                getattr(self.campaign, name)(*told)
                self.num_told += name == "told"
        finally:
            killing.join()
            process.join()
            ours.close()
        assert process.exitcode == -9, f"the process ended by itself: {process.exitcode}"
        self.num_kills += 1
        self._judge()

    def _judge(self) -> None:
        campaign = self.campaign
        campaign.now = time.time()
        page = (campaign.branches, campaign.pins, campaign.purged)
        campaign.judge(campaign.live, Moment("killed", 0, {}, *page))
        store = campaign.open()
        store.start()
        store.submit(Delete("default", "after")).result(20)
        self.ids = {(r.namespace, r.agent, r.branch): store.sequence_ids(r).tolist() for r in store.sequences()}
        campaign.pins = {agent: {until} for agent, until in store.pins().items()}
        store.close()
        campaign.versions = {key: [tuple(ids)] for key, ids in self.ids.items()}
        campaign.branches = {key: Branch(0, 1, len(ids), len(ids)) for key, ids in self.ids.items()}
        campaign.purged = campaign.purged[-4:]


def _until_the_end(pipe: Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What comes through the pipe; the last message may be cut in two by the kill."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        yield message
