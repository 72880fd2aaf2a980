"""The store while no server runs: its agents, and purging one. Covers all models and slots in the directory."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle.agent_ids import breakpoint_prefix, kind_of
from rekindle.cli.console import show_id
from rekindle.cli.remote import Unreachable
from rekindle.cli.why import near
from rekindle.config import StoreSettings, slot_numbers
from rekindle.errors import NotFound, StoreError, StoreLocked
from rekindle.extensions import extensions, load
from rekindle.store import admin
from rekindle.store.files.directory import remove_set_aside
from rekindle.store.files.keys import Given
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.rows.written import day_of
from rekindle.store.values import SequenceRecord


def agents_in(settings: StoreSettings, unreachable: Unreachable) -> list[dict[str, Any]]:
    """Describe every agent as a server would, most recently used first; StoreLocked if a process uses a store."""
    found, master = [], settings.master_key()
    for store in _unlocked(settings.directory(), unreachable):
        branches = defaultdict(list)
        for record in admin.agents_of(store.parent(settings.directory()), store.fingerprint, master=master):
            if not kind_of(record.agent).is_temporary:
                branches[record.namespace, record.agent].append(record)
        found += [_described(store.model, records) for records in branches.values()]
    return sorted(found, key=lambda info: -float(info["last_use"]))


def written_in(settings: StoreSettings, now: float) -> dict[str, Any]:
    """Describe what was written today, as a server would."""
    stores = admin.list_stores(settings.directory())
    today = sum(store.written.on(day_of(now)) for store in stores)
    return {"today": today, "a_day": settings.disk_writes_a_day, "a_turn": None}


def _described(model: str, records: list[SequenceRecord]) -> dict[str, Any]:
    num_tokens = max(record.num_tokens for record in records)
    return {
        "id": records[0].agent,
        "object": "agent",
        "namespace": records[0].namespace,
        "branches": len(records),
        "num_tokens": num_tokens,
        "saved_tokens": num_tokens,
        "hot_tokens": 0,
        "warm_tokens": num_tokens,
        "last_use": max(record.last_use for record in records),
        "model": model,
    }


def agent_in(settings: StoreSettings, agent: str, unreachable: Unreachable) -> dict[str, Any]:
    """Return the most recently used agent with this id; NotFound suggests similar ids."""
    known = agents_in(settings, unreachable)
    for info in known:
        if info["id"] == agent:
            return info
    raise _unknown(settings, agent, [info["id"] for info in known])


def purge_in(settings: StoreSettings, namespace: str, agent: str, unreachable: Unreachable) -> dict[str, Any]:
    """Purge an agent from every model's store that has it, and its texts; return the sum of the proofs."""
    directory, proofs, known = settings.directory(), list[admin.PurgeProof](), set[tuple[str, str]]()
    master = settings.master_key()
    stores = _unlocked(directory, unreachable)
    num_responses = _forget_texts(settings, namespace, agent)  # first: if a file refuses, all can be purged again
    for store in stores:
        place = store.parent(directory)
        here = {(record.namespace, record.agent) for record in admin.agents_of(place, store.fingerprint, master=master)}
        known |= here
        marked = breakpoint_prefix(agent)  # perhaps only breakpoints of its requests are left
        if any(space == namespace and (name == agent or name.startswith(marked)) for space, name in here):
            proofs.append(admin.purge_agent(place, store.fingerprint, namespace, agent, master=master))
    if not proofs and not num_responses:
        raise _unknown(settings, agent, [name for space, name in known if space == namespace])
    responses, sessions = _text_files(settings)
    for path in (responses, *sessions):
        remove_set_aside(path, OsFileSystem())
    return {
        "id": agent,
        "object": "agent",
        "slots_freed": sum(proof.slots_freed for proof in proofs),
        "bytes_zeroed": sum(proof.bytes_zeroed for proof in proofs),
        "blocks_shared": sum(proof.blocks_shared for proof in proofs),
        "hot_blocks_zeroed": 0,
        "responses_deleted": num_responses,
    }


def _forget_texts(settings: StoreSettings, namespace: str, agent: str) -> int:
    """Delete what an agent remembers of sessions and its stored responses; return how many responses."""
    from rekindle.server.responses.records import open_records
    from rekindle.server.responses.stored import MAX_BYTES, MAX_RESPONSES, RETENTION_S

    responses, sessions = _text_files(settings)
    forgetting = [load(point) for point in extensions("rekindle.forget")]
    for path in filter(Path.exists, sessions):
        if not forgetting:
            raise StoreError(
                f"{path} may hold what {agent!r} said in sessions, which needs the package rekindle-sessions: "
                "pip install 'rekindle[serve]', or remove the file"
            )
        for forget in forgetting:
            forget(path, namespace, agent, Given.of(settings))
    if not responses.exists():
        return 0
    with closing(
        open_records(
            responses,
            max_responses=MAX_RESPONSES,
            max_bytes=MAX_BYTES,
            retention_s=RETENTION_S,
            given=Given.of(settings),
        )
    ) as stored:
        return stored.forget(namespace, agent)


def _text_files(settings: StoreSettings) -> tuple[Path, list[Path]]:
    """The file of stored responses, and those of sessions: without a slot, and of each slot; they may be missing."""
    responses, sessions = replace(settings, slot="off").text_files()
    slots = {*slot_numbers(settings.directory()), *slot_numbers(sessions.parent)}
    return responses, [sessions, *(replace(settings, slot=str(slot)).text_files()[1] for slot in sorted(slots))]


def _unlocked(directory: Path, unreachable: Unreachable) -> list[admin.StoreInfo]:
    stores = admin.list_stores(directory)
    for store in stores:
        if store.in_use_by is not None:
            raise StoreLocked(
                f"{unreachable}; the store of {store.model} in {directory} is in use by {store.in_use_by}: "
                "name its server by --url, or stop it"
            )
    return stores


def _unknown(settings: StoreSettings, agent: str, known: list[str]) -> NotFound:
    return NotFound(f"the store {settings.directory()} knows no agent {show_id(agent)!r}; {near(agent, known)}")
