"""Several replicas of one model on one directory: each has a slot in it, a store directory of its own.

    DIR/secret           of all slots, so that equal prompts have equal names in each
    DIR/slot-N/          secret, a copy, so that tools open a slot as any store, and FINGERPRINT/ of each model

Owns which slot a process takes. What keeps two processes apart is the lock of `directory`, one for each slot and model,
which the kernel releases when a process ends: so a replica that replaces a killed one finds its slot free and warm.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rekindle.config import NUM_SLOTS, StoreSettings, slot_directory, slot_numbers
from rekindle.errors import StoreError, StoreLocked, StoreRefused
from rekindle.store.files.keys import SECRET_BYTES, Given, derived_secret, directory_keys, given_keys
from rekindle.store.files.sync import FileSystem, OsFileSystem
from rekindle.store.maintenance.stale import collect_stale, holder
from rekindle.store.warm import WarmStore

logger = logging.getLogger(__name__)
# Processes that list stores, or look for a slot as well, take a lock for a moment.
NUM_LOOKS, LOOK_S = 10, 0.01
Open = Callable[[Path, StoreSettings], WarmStore]


class ReplicaSlots:
    """Opens the store of one process as its `settings` say. `settings` has the slot's number once one was tried."""

    def __init__(
        self,
        settings: StoreSettings,
        fingerprint: bytes,
        *,
        fs: FileSystem | None = None,
        num_slots: int = NUM_SLOTS,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self._directory = settings.directory()
        self._given = Given.of(settings)
        self._fingerprint = fingerprint.hex()
        self._fs = fs or OsFileSystem()
        self._num_slots = num_slots
        self._clock = clock
        self._sleep = sleep

    def open(self, open_in: Open) -> WarmStore:
        """Return `open_in(directory, settings)` for the directory that the settings name, or the slot they find.

        StoreLocked if another process has it, StoreError if it cannot be used or no slot is free; StoreRefused if the
        disk refuses. With `auto`, a slot that cannot be opened is passed over, with a warning.
        """
        slot = self.settings.slot
        if slot == "off":
            if self.settings.secret is not None:
                given_keys(self._directory, self._given, self._fs)
            return open_in(self._directory, self.settings)
        self.settings = replace(self.settings, slot="0" if slot == "auto" else slot)
        secret = given_keys(self._directory, self._given, self._fs).secret
        store = self._first(open_in, secret) if slot == "auto" else self._named(open_in, secret, int(slot))
        ttl = self.settings.stale_ttl_s  # in the slots that no process uses any more, too
        collect_stale(self._directory, self._fingerprint, ttl, clock=self._clock, fs=self._fs)
        return store

    def _named(self, open_in: Open, secret: bytes, number: int) -> WarmStore:
        try:
            return self._opened(open_in, secret, number)
        except StoreLocked as error:
            raise StoreLocked(f"{error}, or slot=auto for the first slot that is free") from error

    def _first(self, open_in: Open, secret: bytes) -> WarmStore:
        """Open the first free slot that has a store of this model, else the first that has none."""
        refusals: dict[int, StoreError] = {}
        for look in range(NUM_LOOKS):
            used = [number for number in self._used() if number not in refusals]
            if look and used:
                self._sleep(LOOK_S)
            for number in filter(self._is_free, used):
                try:
                    return self._opened(open_in, secret, number)
                except StoreLocked:
                    logger.debug("slot %d was taken by another process", number)
                except StoreError as error:
                    refusals[number] = error
                    logger.warning("slot %d is passed over: %s", number, error)
        return self._new(open_in, secret, refusals)

    def _new(self, open_in: Open, secret: bytes, refusals: dict[int, StoreError]) -> WarmStore:
        for number, error in refusals.items():
            if isinstance(error, StoreRefused):  # a disk that refuses one refuses a new one
                self.settings = replace(self.settings, slot=str(number))
                raise error
        used = set(self._used())
        for number in range(self._num_slots):
            if number not in used:
                try:
                    return self._opened(open_in, secret, number)
                except StoreLocked:  # by a process that started at the same time
                    continue
        raise StoreError(
            f"all {self._num_slots:,} slots of {self._directory} are in use or cannot be opened: stop a replica, "
            "remove what is not needed, or choose another directory as store"
        )

    def _used(self) -> list[int]:
        """The slots that have a store of this model."""
        slots = (number for number in slot_numbers(self._directory) if number < self._num_slots)
        return [number for number in slots if self._store(number).is_dir()]

    def _store(self, number: int) -> Path:
        return slot_directory(self._directory, number) / self._fingerprint

    def _is_free(self, number: int) -> bool:
        try:
            return holder(self._store(number), self._fs) is None
        except OSError:
            return True  # opening it says what is wrong

    def _opened(self, open_in: Open, secret: bytes, number: int) -> WarmStore:
        directory = slot_directory(self._directory, number)
        self.settings = replace(self.settings, slot=str(number))
        if not hmac.compare_digest(directory_keys(directory, self._fs, self._given.master).secret, secret):
            raise StoreError(
                f"{directory} has another secret than {self._directory}, from where it was made: what it holds would "
                "not be found; move it away, and open it by itself as store"
            )
        return open_in(directory, self.settings)


def without_blocks(settings: StoreSettings) -> StoreSettings:
    """The settings of a store that holds texts only: without blocks, there is no lock by which to claim a slot."""
    return replace(settings, slot="off") if settings.slot == "auto" else settings


def secret_of(settings: StoreSettings) -> bytes:
    """The secret [32] of an engine without a store: the given one, or a random one."""
    return secrets.token_bytes(SECRET_BYTES) if settings.secret is None else derived_secret(settings.secret)
