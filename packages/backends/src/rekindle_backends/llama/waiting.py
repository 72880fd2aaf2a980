"""Commands to the store that wait for a turn whose KV only a slot has.

    save ──▶ waits in a slot ──its state is kept──▶ saved again: in another slot, or at the store
                 └──its state is lost──────────────▶ the same: others may have what the command depends on

Owns which slot a command waits in: where an earlier one about its agent does, so that the store gets them in their
order; else that of its own agent before others that share a beginning with it. None is dropped but those of what is
deleted; the store says which it could not carry out. Called on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.save_queue import SaveQueue
from rekindle.store.commands import Delete, Move, Pin, Purge, StoreCommand
from rekindle.store.values import SequenceRecord
from rekindle_backends.llama.slots import Slot, Slots, Unkept


class Waiting:
    """Commands that wait in `slots`; others go to the queue of the store."""

    def __init__(self, slots: Slots, queue: SaveQueue) -> None:
        self._slots = slots
        self._queue = queue

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store; one that depends on a state that is not read waits for that."""
        if isinstance(command, Delete | Purge):
            self._drop(command)
        elif (unkept := self._awaited(command)) is not None:
            unkept.commands.append(command)
            unkept.urgent |= not isinstance(command, SequenceRecord)
            return
        self._queue.add(command)

    def _awaited(self, command: SequenceRecord | Pin | Move) -> Unkept | None:
        """Return the turn that a command waits for; None if it depends on none."""
        owner = (command.namespace, command.agent)
        slots = sorted(self._slots, key=lambda each: each.owner != owner)
        unkept = [slot.unkept for slot in slots if slot.unkept is not None]
        heads = _heads(command)
        after = (each for each in unkept if each.commands_of(*owner))
        return next(after, None) or next((each for each in unkept if not heads.isdisjoint(each.heads)), None)

    def save_all(self, commands: Iterable[StoreCommand]) -> None:
        """Queue commands whose slot has nothing unkept any more."""
        for command in commands:
            self.save(command)

    def give_up(self, slot: Slot) -> None:
        """Forget the turn that only a slot has, if there is one; what waits for it waits for another slot, or goes to
        the store."""
        unkept, slot.unkept = slot.unkept, None
        if unkept is not None:
            self.save_all(unkept.commands)

    def _drop(self, command: Delete | Purge) -> None:
        """Drop the records of what is deleted, and what is not read of a whole agent."""
        branch = command.branch if isinstance(command, Delete) else None
        for slot in self._slots:
            unkept = slot.unkept
            if unkept is None:
                continue
            for each in unkept.commands_of(command.namespace, command.agent):
                if isinstance(each, SequenceRecord) and branch not in (None, each.branch):
                    continue
                unkept.commands.remove(each)
                if not isinstance(each, SequenceRecord):
                    self._queue.add(each)  # which finds its agent gone
            if branch is None and slot.owner == (command.namespace, command.agent):
                self.give_up(slot)


def _heads(command: SequenceRecord | Pin | Move) -> set[BlockHash]:
    """Return the blocks in which what a command moves ends."""
    match command:
        case SequenceRecord():
            return {command.head}
        case Move():
            return {record.head for record in command.records}
        case Pin():
            return set()
