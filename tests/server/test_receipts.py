"""Receipts: what each answer read and what was computed, under its id in every dialect, in one namespace, kept."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from pytest import LogCaptureFixture, MonkeyPatch
from typer.testing import CliRunner

from rekindle import Engine
from rekindle.cache.blocks.hashing import chain_hashes, tail_hash
from rekindle.cli import app
from rekindle.config import ServerSettings
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.receipt_rows import NUM_BYTES
from rekindle.server.responses.stored import StoredResponses
from tests.given import settings_of
from tests.server import conftest
from tests.server.conftest import Served
from tests.server.scripted import write_scripted_model

KEYS = {"left": "key-l", "right": "key-r"}
SCRIPT = Path(__file__).parents[2] / "examples" / "verify_receipt.py"
FILLER = "There is a long letter on the table. "
SAID: list[Any] = [{"role": "user", "content": f"talk please. {FILLER * 24}"}]


@contextmanager
def served_from(directory: Path, store: str = "store", model: str = "model", **more: Any) -> Iterator[Served]:
    flags = {"model": directory / model, "store": directory / store, "threads": 1, "hot_bytes": "64MiB"}
    flags["check_restored"] = 1
    keys = ServerSettings(api_keys=KEYS, admin_key="key-a")
    with Engine(settings_of(**flags, block_tokens=16, **more)) as engine, conftest.serving(engine, keys) as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("receipts")
    write_scripted_model(made / "model")
    return made


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    with served_from(directory, "one") as running:
        yield running


def chat(served: Served, said: list[Any], **more: Any) -> dict[str, Any]:
    body = {"messages": said, "max_tokens": 8, "temperature": 0, **more}
    answer = served.send("POST", "/v1/chat/completions", body, key="key-l", x_agent_id="ada")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def receipt(served: Served, id: str, key: str = "key-l") -> dict[str, Any]:
    answer = served.send("GET", f"/v1/receipts/{id}", key=key)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


def printed(served: Served, *arguments: str) -> Result:
    """What `rekindle receipt` prints of a receipt of this server."""
    runner = CliRunner(env={"COLUMNS": "200", "REKINDLE_API_KEY": "key-l"})
    return runner.invoke(app, ["receipt", *arguments, "--url", served.url])


def later(first: dict[str, Any]) -> list[Any]:
    return [*SAID, first["choices"][0]["message"], {"role": "user", "content": "talk again."}]


def test_a_receipt_names_what_was_read_and_outlives_a_restart(directory: Path) -> None:
    with served_from(directory) as served:
        first = chat(served, SAID)
        cold = receipt(served, first["id"])
        (choice,) = cold["choices"]
        reply = first["usage"]["completion_tokens"]
        prompt = first["usage"]["prompt_tokens"]
        assert choice["read"] == {"tokens": 0, "hot_tokens": 0, "warm_tokens": 0, "hash": None, "parent": None}
        assert choice["computed"] == {"first": 0, "prompt": prompt, "reply": reply}
        assert cold["agent"] == "ada" and cold["changed"] == []
        template = (directory / "model" / "chat_template.jinja").read_bytes()
        assert cold["identity"]["templates"] == {"default": hashlib.sha256(template).hexdigest()}
        assert cold["identity"]["fingerprint"] == served.engine.spec.fingerprint.hex()
        branch = served.engine.components.memory.book.of("left", "ada")[0]
        ids = np.asarray(branch.ids)
        assert choice["head"]["tokens"] == len(ids) and choice["head"]["hash"] == branch.head.hex()

    with served_from(directory) as served:
        assert receipt(served, first["id"])["choices"] == [choice]
        answer = chat(served, later(first))["id"]
        served.until_idle()
        second = receipt(served, answer)["choices"][0]
        num_read = second["read"]["tokens"]
        assert num_read == second["read"]["warm_tokens"] > 16 and second["computed"]["first"] == num_read
        root = served.engine.components.core.cache.root("left")
        hashes = chain_hashes(root, ids, 16)
        if len(ids) % 16:
            hashes.append(tail_hash(hashes[-1], ids[len(ids) // 16 * 16 :]))
        count = -(-num_read // 16)
        assert [block["hash"] for block in second["blocks"]] == [each.hex() for each in hashes[:count]]
        assert second["read"]["hash"] == hashes[count - 1].hex() and second["root"] == root.hex()
        assert sum(block["tokens"] for block in second["blocks"]) == num_read and second["is_whole"]
        said = printed(served, answer).stdout
        assert f"{answer} of agent ada" in said and "template default, SHA-256" in said
        assert f"read tokens 0 to {num_read:,} of" in said and second["read"]["hash"] in said
        assert f"... {count - 6} more" in said and f"computed from token {num_read:,} on" in said
        assert json.loads(printed(served, answer, "--json").stdout)["choices"] == [second]
        missing = printed(served, "chatcmpl-none")
        assert missing.exit_code == 2 and "no receipt of 'chatcmpl-none'" in missing.output
        assert second["checked"] == {"equal": num_read // 16, "differed": 0}, "each full block that was restored"
        assert f"{num_read // 16} of these blocks were computed again since the server started" in said
        why = served.send("GET", "/v1/agents/ada/why", key="key-l").json["data"]
        assert [(each["receipt"], each["choice"]) for each in why] == [(answer, 0)]
        figures = served.send("GET", "/metrics", key="key-a").body.decode()
        assert f"\nrekindle_restored_checked_total {num_read // 16}.0\n" in figures, "each full block that was restored"
        assert "\nrekindle_restored_differed_total 0.0\n" in figures


def test_every_dialect_has_receipts_by_its_ids(served: Served) -> None:
    said = [{"role": "user", "content": "talk."}]
    short = {"messages": said, "max_tokens": 4}
    many = chat(served, said, n=2)
    assert [each["index"] for each in receipt(served, many["id"])["choices"]] == [0, 1]
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": ["talk", "walk"]}),
        ("/v1/messages", {**short, "model": "claude-opus-5-5"}),
        ("/v1/responses", {"input": "talk."}),
        ("/v1/responses", {"input": "talk.", "store": False}),
    )
    for path, body in asked:
        sent = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4, **body}
        answer = served.send("POST", path, sent, key="key-l").json
        found = receipt(served, answer["id"])
        assert found["endpoint"] == path
        assert [each["index"] for each in found["choices"]] == list(range(len(body.get("prompt", ["talk"]))))
    answer = served.send("POST", "/api/chat", {**short, "stream": False}, key="key-l")
    found = receipt(served, answer.headers["x-request-id"])
    assert found["endpoint"] == "/api/chat" and found["agent"] is None
    stream = served.send("POST", "/v1/chat/completions", {**short, "stream": True}, key="key-l").body
    streamed = stream.split(b'"id":')[1].split(b'"')[1].decode()
    reason = receipt(served, streamed)["choices"][0]["finish_reason"]
    assert re.search(rf'"finish_reason": ?"{reason}"', stream.decode()), "as it was said, whatever was drawn"
    off = chat(served, SAID, rekindle={"reuse": "off"})
    kept = receipt(served, off["id"])["choices"][0]
    assert kept["read"]["tokens"] == 0 and kept["head"] == {
        "tokens": 0,
        "hash": kept["root"],
        "parent": kept["root"],
    }


def test_receipts_are_in_one_namespace_and_go_with_their_agent(served: Served, directory: Path) -> None:
    first = chat(served, SAID)["id"]
    other = served.send("GET", f"/v1/receipts/{first}", key="key-r")
    assert other.status == 404 and "no receipt" in other.error["message"]
    assert served.app.responses.flush() and receipt(served, first)["agent"] == "ada"
    late = chat(served, SAID)["id"]
    assert served.send("DELETE", "/v1/agents/ada", key="key-l").status == 200
    for gone in (first, late):
        assert served.send("GET", f"/v1/receipts/{gone}", key="key-l").status == 404
    assert not any(each.encode() in (directory / "one" / "responses.db").read_bytes() for each in (first, late))


def verified(directory: Path, shown: dict[str, Any], store: str, *more: str | Path) -> tuple[int, str]:
    """Exit code and output of the script that verifies a receipt, without anything of ours."""
    (directory / "receipt.json").write_text(json.dumps(shown))
    command = [sys.executable, "-I", SCRIPT, directory / "receipt.json", directory / store, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def only(directory: Path, pattern: str) -> Path:
    (found,) = directory.rglob(pattern)
    return found


def flip(file: Path, block: str) -> None:
    """Flip a bit of the KV of a block in a file of records."""
    content = bytearray(file.read_bytes())
    content[content.index(bytes.fromhex(block)) + 1024] ^= 4
    file.write_bytes(content)


def forgeries(shown: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Receipts whose numbers do not add up, each otherwise than the others."""
    (choice,) = shown["choices"]
    read, head, computed = choice["read"], choice["head"], choice["computed"]
    none = {"tokens": 0, "hash": None, "parent": None}
    all_computed = {**computed, "first": 0, "prompt": choice["prompt_tokens"]}
    yield {**shown, "choices": []}
    for change in (
        {"read": {**read, "tokens": read["tokens"] + 16}},
        {"read": {**read, "hot_tokens": 0, "warm_tokens": 9999}},
        {"read": {**read, **none, "hot_tokens": 0, "warm_tokens": 0}, "computed": all_computed},
        {"computed": {**computed, "reply": computed["reply"] * 100}},
        {"computed": {**computed, "prompt": computed["prompt"] + 100}, "prompt_tokens": choice["prompt_tokens"] + 100},
        {"head": none},
        {"head": {**head, **{name: read[name] for name in none}}},
        {"blocks": choice["blocks"][:-1]},
    ):
        yield {**shown, "choices": [{**choice, **change}]}


def test_nothing_is_wrong_with_receipts_of_any_ending(directory: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with served_from(directory, "endings") as served:
        ids = [
            chat(served, SAID, **more)["id"]
            for more in (
                *({"max_tokens": count} for count in (1, 2, 15, 16, 17, 64)),
                {"stop": [" the"], "max_tokens": 64},
                {"n": 3, "temperature": 1, "seed": 1},
                {"tools": [tool], "tool_choice": "required", "max_tokens": 32},
                {"rekindle": {"reuse": "off"}},
            )
        ]
        shown = [receipt(served, each) for each in ids]
    assert {each["choices"][0]["finish_reason"] for each in shown} == {"stop", "length"}
    for each in shown:
        code, said = verified(directory, each, "endings")
        assert code != 1, (said, each)  # 2: the tail of a turn that was said anew has left


def test_a_flipped_bit_a_swapped_file_and_an_edited_template_are_named_and_prevented(
    directory: Path, caplog: LogCaptureFixture
) -> None:
    with served_from(directory, "whole") as served:
        first = chat(served, SAID)
        second = chat(served, later(first))
        shown = receipt(served, second["id"])
        alone = chat(served, later(first), rekindle={"reuse": "off"})["choices"][0]["message"]
        with served_from(directory, "foreign") as other:
            chat(other, SAID)
    code, said = verified(directory, shown, "whole", "--template", directory / "model" / "chat_template.jinja")
    num_read = shown["choices"][0]["read"]["tokens"]
    assert (code, said) == (0, f"{second['id']}: verified, {num_read} tokens that were read\n") and num_read > 64
    for forged in forgeries(shown):
        code, said = verified(directory, forged, "whole")
        assert code == 1 and "NOT verified" in said, forged
    nameless = json.loads(json.dumps(shown))
    for link in (nameless["choices"][0]["read"], nameless["choices"][0]["head"]):
        link["hash"] = link["parent"] = None
    code, said = verified(directory, nameless, "whole")
    assert code == 2 and f"ends at token {num_read}, which the receipt does not name" in said and "NOT verified" in said
    shutil.copytree(directory / "whole", directory / "circular")
    with closing(sqlite3.connect(only(directory / "circular", "index.db"))) as index, index:
        name = bytes.fromhex(shown["choices"][0]["blocks"][1]["hash"])
        index.execute("UPDATE block SET parent = name WHERE name = ?", (name,))
    code, said = verified(directory, shown, "circular")
    assert code == 1 and f"{num_read} tokens, and {num_read // 16 + 1} blocks before the last one" in said

    block = shown["choices"][0]["blocks"][1]["hash"]
    for store in ("flipped", "swapped"):
        shutil.copytree(directory / "whole", directory / store)
        records = only(directory / store, "blocks-0-000.safetensors")
        if store == "flipped":
            flip(records, block)
        else:
            shutil.copy(only(directory / "foreign", "blocks-0-000.safetensors"), records)
        code, said = verified(directory, shown, store)
        assert code == 1 and f"block {block}: {records.name} slot 1" in said, said
        assert ("the checksum of its KV does not hold" in said) == (store == "flipped")
        assert ("holds another block" in said) == (store == "swapped")
        caplog.clear()
        with served_from(directory, store) as served:
            again = chat(served, later(first))
            assert again["choices"][0]["message"] == alone
            assert receipt(served, again["id"])["choices"][0]["read"]["tokens"] < 32
        assert "is damaged on disk and will be recomputed" in caplog.text

    shutil.copytree(directory / "model", directory / "edited" / "model")
    template = directory / "edited" / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("+ message.role +", "+ 'a ' + message.role +"))
    code, said = verified(directory, shown, "whole", "--template", template)
    assert code == 1 and f"{template} is not the template that made the prompt" in said
    with served_from(directory, "whole", "edited/model") as served:
        assert receipt(served, second["id"])["changed"] == ["templates"]
        warm, cold = chat(served, later(first)), chat(served, later(first), rekindle={"reuse": "off"})
        assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
        assert receipt(served, warm["id"])["choices"][0]["read"]["tokens"] < 16


def test_an_encrypted_store_is_verified_with_its_key(directory: Path, monkeypatch: MonkeyPatch) -> None:
    store, key_file = directory / "sealed", directory / "store.key"
    key_file.write_text(f"{'ab' * 32}\n")
    with served_from(directory, "sealed", store_key_file=key_file) as served:
        first = chat(served, SAID)
        shown = receipt(served, chat(served, later(first))["id"])
    num_read = shown["choices"][0]["read"]["tokens"]
    whole = 0, f"{shown['id']}: verified, {num_read} tokens that were read\n"
    assert verified(directory, shown, "sealed", "--key-file", key_file) == whole and num_read > 64
    for key, (code, said) in {"ab" * 32: whole, "cd" * 32: (1, "encrypted with another key")}.items():
        monkeypatch.setenv("REKINDLE_STORE_KEY", key)
        found = verified(directory, shown, "sealed")
        assert found[0] == code and said in found[1]
    monkeypatch.delenv("REKINDLE_STORE_KEY")
    code, said = verified(directory, shown, "sealed")
    assert code == 1 and "is encrypted: give its key" in said
    first_two = [block["hash"] for block in shown["choices"][0]["blocks"][:2]]
    records = only(store, "blocks-0-000.safetensors")
    before = bytearray(records.read_bytes())
    length = int.from_bytes(before[:8], "little")
    size = json.loads(before[8 : 8 + length])["blocks"]["shape"][1]
    start = 8 + length
    damage = {"flipped": bytearray(before), "swapped": bytearray(before)}
    damage["flipped"][start + size + 2048] ^= 4
    damage["swapped"][start + size : start + 2 * size] = before[start : start + size]
    for changed in damage.values():
        records.write_bytes(changed)
        code, said = verified(directory, shown, "sealed", "--key-file", key_file)
        assert code == 1 and f"block {first_two[1]}: {records.name} slot 1 does not open" in said, said
    records.write_bytes(before)
    with closing(sqlite3.connect(only(store, "index.db"))) as index, index:
        first_ids = index.execute("SELECT ids FROM block WHERE name = ?", (bytes.fromhex(first_two[0]),)).fetchone()
        index.execute("UPDATE block SET ids = ? WHERE name = ?", (*first_ids, bytes.fromhex(first_two[1])))
    code, said = verified(directory, shown, "sealed", "--key-file", key_file)
    assert code == 1 and f"block {first_two[1]}: its hash is not that of its parent and token ids" in said


def made(id: str, *, namespace: str = "left", agent: str | None = "ada") -> Receipt:
    return Receipt(namespace, id, 0, agent, {"choice": {"index": 0}})


def test_the_oldest_receipts_of_a_namespace_make_room_and_a_changed_one_is_missing(tmp_path: Path) -> None:
    path, most = tmp_path / "responses.db", 10
    with closing(StoredResponses(path, max_bytes=most * 32 * NUM_BYTES)) as kept:
        kept.start()
        kept.keep_receipt(made("first", namespace="right"), 0)
        for number in range(2 * most):
            kept.keep_receipt(made(f"r{number}"), 0)
        ticket = kept.ticket()
        kept.forget("left", "eve")
        kept.keep_receipt(made("late", agent="eve"), ticket)
        assert kept.flush()
        kept.check()
        left = [number for number in range(2 * most) if kept.receipts("left", f"r{number}")]
        assert left == list(range(most + 1, 2 * most)), "as many as are allowed, and a tenth less"
        assert kept.receipts("right", "first") and not kept.receipts("left", "late")
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE receipt SET content = replace(content, '0', '1') WHERE id = 'r19'")
    with closing(StoredResponses(path)) as kept:
        kept.start()
        assert kept.receipts("left", "r18") == [made("r18")] and not kept.receipts("left", "r19")
