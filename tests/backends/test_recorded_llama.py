"""A front and a llama-server's slot files, by what a real one (b11434) answered: see `llama/recording.py`.

What the imitation of this folder answers has the same form.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rekindle.harness.own_server import free_url
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.transfer import put, resumable, take
from tests.backends.llama import imitation
from tests.backends.llama.recording import (
    ASKED,
    CONTEXT,
    FOLDER,
    SLOT_IDS,
    SLOT_REQUESTS,
    SLOTS,
    Recording,
    forms,
    fronted,
    is_part,
    replaying,
    reply,
    write_model,
)
from tests.backends.llama.test_transfer import arena_of
from tests.server.conftest import Served

ANSWERS_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.read()


@pytest.fixture(scope="module")
def front(recording: Recording) -> Iterator[Served]:
    with replaying(recording) as url, fronted(url) as front:
        assert "its tokenizer is the same" in front.engine.notes[0] and front.engine.max_context == CONTEXT
        yield front


@pytest.mark.parametrize("name", ASKED)
def test_a_request_is_sent_as_it_was_and_its_answer_read_as_it_was(
    front: Served, recording: Recording, name: str
) -> None:
    said = reply(front, name)
    assert not recording.strangers, "what is sent has changed: record anew, and read how the replies differ"
    assert said | {"usage": None} == recording.replies[name] | {"usage": None}
    assert said.get("status") == (400 if name == "grammar that is none" else None)


def test_ids_that_the_stream_left_out_were_found(front: Served, recording: Recording) -> None:
    said = recording.replies["characters in several tokens"]
    encoder = front.engine.encoder
    ids = encoder.encode(encoder.render_text(said["choices"][0]["message"]["content"], add_leading=False)).tolist()
    (streamed,) = [each.answer for each in recording.exchanges if each.asked and "🙂" in each.asked.get("grammar", "")]
    sent = [token for each in forms(streamed) if "prompt_progress" not in each for token in each["tokens"]]
    assert not set(ids) <= set(sent) and said["ids"][0][: len(ids)] == ids


@pytest.mark.parametrize("name", SLOTS)
def test_a_state_that_was_saved_comes_back_from_blocks(tmp_path: Path, name: str) -> None:
    """Its bytes for the same slot; nothing is left out of it and nothing of another place is read."""
    saved = FOLDER / f"{name}.bin"
    file = SlotFile.open(saved)
    total, blocks = len(file.tokens), [1, 0]
    assert file.tokens[: len(SLOT_IDS)].tolist() == SLOT_IDS and total == len(SLOT_IDS) + 1
    arena, _ = arena_of(file.shape, 0, 2)
    take(file, arena, blocks, 0, total)
    assert resumable(arena, blocks, total) == total
    put(arena, blocks, total, file.tokens, file.shape, tmp_path / "same", 1)
    assert (tmp_path / "same").read_bytes() == saved.read_bytes()
    put(arena, blocks, total, file.tokens, file.shape, tmp_path / "other", 0)
    assert SlotFile.open(tmp_path / "other", shape=file.shape).tokens.tolist() == file.tokens.tolist()
    assert (tmp_path / "other").read_bytes() != saved.read_bytes()


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the imitation, with three slots."""
    folder, url = tmp_path_factory.mktemp("imitation"), free_url()
    flags = ["-m", str(write_model(folder)), "--port", url.rpartition(":")[2], "-np", "3", "-c", str(3 * CONTEXT)]
    command = [sys.executable, "-m", imitation.__name__, *flags, "--slot-save-path", str(folder)]
    with subprocess.Popen(command) as process:
        end = time.monotonic() + ANSWERS_WITHIN_S
        while time.monotonic() < end:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
        process.terminate()


def test_the_imitation_answers_in_the_form_of_the_original(imitated: str, recording: Recording) -> None:
    """Every field that it has, and the status, of the model's list, of prompts and of slots."""
    asked = {each.path: each.asked for each in recording.exchanges if not each.path.startswith("/slots/")}
    assert {"/v1/models", "/props", "/slots", "/tokenize", "/completion"} == asked.keys()
    streamed = next(each.asked for each in recording.exchanges if each.path == "/completion" and "stream" in each.asked)
    refused = ("missing", "../outside")  # the imitation has no use for what a front never sends
    slots = [each for each in SLOT_REQUESTS if each[1].get("filename") not in refused]
    for path, body in [*asked.items(), ("/completion", streamed), *slots]:
        recorded = recording.find(path, body)
        assert recorded is not None, f"{path} was not recorded"
        answer = httpx.request("GET" if body is None else "POST", imitated + path, json=body, timeout=60)
        assert answer.status_code == recorded.status == 200
        for made in forms(answer.text):
            assert any(is_part(made, other) for other in forms(recorded.answer)), f"{path}: {made}"
