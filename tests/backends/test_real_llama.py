"""With a real llama-server and real weights: ids of streams, turns, cancelling, restarts. `make engines` builds one."""

from __future__ import annotations

import os
import queue
import random
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.harness.own_server import OwnServer
from rekindle.model.checkpoint import Source
from rekindle.model.described import DescribedModel
from rekindle.text.constraints.types import Constraint
from rekindle.text.prompt import PromptEncoder
from rekindle_backends.client import Address, Arrived, Backend
from rekindle_backends.llama.calls import written
from rekindle_backends.llama.command import llama_command
from rekindle_backends.llama.gaps import Gaps
from rekindle_backends.llama.wire import COMPLETION, EventReader, completion_body
from rekindle_backends.wire import Call, Piece
from tests.backends.llama.recording import Recording, forms, is_part, record, write_model
from tests.backends.test_memory import asked, text_of
from tests.backends.test_own_vllm import until
from tests.server.conftest import Served
from tests.server.scripted import serving
from tests.server.test_prompt_progress import LONG, chatted, progress_of
from tests.server.test_receipts import flip, only, verified
from tests.sessions.http.test_coordination_doc import answers_as_the_page_says
from tools.real_models import REAL_MODELS

NUM_REPLIES = int(os.environ.get("REPLIES", "100"))
CHARS = [*"🙂🚀👩🏼❤️‍🔥🇩🇪🦊", *"数字汉语你好世界龍鬱", *"привет мирЖщё", *"ab e", *"ไทยहिन्दी한국어éßø"]
WAIT_S = 120.0


@pytest.fixture(scope="module")
def model() -> Path:
    return REAL_MODELS["smollm2"].path()


@contextmanager
def running(model: Path, *arguments: str) -> Iterator[Backend]:
    """A llama-server of one slot, and a client of it."""
    own = OwnServer(llama_command(model, flags=["-t", "1", "-np", "1"], max_context=512, arguments=arguments))
    own.start()
    backend = Backend(Address(own.command.url, own.command.key, WAIT_S), own=own)
    backend.start()
    try:
        yield backend
    finally:
        backend.stop()


def replied(backend: Backend, gaps: Gaps, prompt: list[int], **options: Any) -> list[Piece]:
    """The pieces of a reply."""
    arrived = queue.SimpleQueue[Arrived]()
    backend.submit(
        Call(COMPLETION, completion_body(prompt, options), {}, EventReader(gaps, len(prompt)).read), arrived.put
    )
    found = list[Piece]()
    while (piece := arrived.get(timeout=WAIT_S)) is not None:
        assert isinstance(piece, Piece), piece
        found.append(piece)
    return found


def saved_ids(backend: Backend, folder: Path) -> list[int]:
    """The ids in the first slot's memory, as its file has them; the token that was drawn last is not there yet."""
    status, answer = backend.ask("POST", "/slots/0?action=save", {"filename": "slot"})
    assert status == 200, answer
    data = (folder / "slot").read_bytes()
    assert struct.unpack_from("<I", data, 4) == (4,)
    kind, _, number = struct.unpack_from("<3i", data, 12)
    assert kind == -1
    found: list[int] = np.frombuffer(data, np.int32, number, 24).tolist()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", ["bundled", "smollm2"])
def test_ids_that_a_stream_leaves_out(model: Path, tmp_path: Path, temperature: float, name: str) -> None:
    model = write_model(tmp_path) if name == "bundled" else model
    directory = Source.find(str(model), None).fetch_description()
    encoder = PromptEncoder.from_dir(directory)
    vocabulary, chosen, num_certain = encoder.vocabulary, random.Random(7), 0
    gaps = Gaps(map(vocabulary.shown, range(vocabulary.size)), DescribedModel.read(directory).eos_ids).in_grammar()
    prompt = encoder.encode(encoder.render_text("Say something:", add_leading=False)).tolist()
    with running(model, "--slot-save-path", f"{tmp_path}/") as backend:
        for seed in range(NUM_REPLIES):
            text = "".join(chosen.choices(CHARS, k=chosen.randint(1, 8)))
            forced = written(Constraint("choice", (text,)))
            pieces = replied(backend, gaps, prompt, temperature=temperature, seed=seed, n_predict=100, **forced)
            ids = [token_id for piece in pieces for token_id in piece.token_ids]
            assert b"".join(map(vocabulary.shown, ids)).decode() == text and pieces[-1].reason == "stop"
            if all(piece.is_certain for piece in pieces):
                assert saved_ids(backend, tmp_path) == prompt + ids, text
                num_certain += 1
    print(f"{name} at temperature {temperature}: all ids known of {num_certain} of {NUM_REPLIES} replies")
    assert num_certain >= 0.5 * NUM_REPLIES  # tokens of a small model that is forced are seldom the tokenizer's


@pytest.fixture(scope="module")
def front(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("texts")
    flags = {"backend": "llama.cpp", "backend_flags": "-t 1 -np 1 -b 64", "max_context": 1024, "store": str(store)}
    with serving(model=str(model), **flags) as running:
        yield running


def test_a_turn_continues_the_last_one(front: Served) -> None:
    assert "its tokenizer is the same" in front.engine.notes[0]
    question = "What is the capital of France?"
    first = asked(front, "ada", question, max_tokens=40)  # on some processors the reply does not end
    said = asked(front, "ada", question, text_of(first), "Again, please.", max_tokens=40)["rekindle"]
    stored = [*first["rekindle"]["prompt_ids"], *first["rekindle"]["completion_ids"]]
    assert said["prompt_ids"][: len(stored)] == stored and said["outcome"] == "extend"
    assert said["reused_tokens"] >= len(stored) - 1


def test_how_far_a_prompt_is_comes_from_the_backend(front: Served) -> None:
    cold = chatted(front, LONG, "far")
    found, report = progress_of(cold), cold[-1].model_extra["rekindle"]
    assert (found[0]["total"], found[0]["cache"]) == (report["prompt_tokens"], report["reused_tokens"])
    assert len(found) > 2, "one for each batch"
    warm = chatted(front, LONG + "What hums?", "far")
    assert progress_of(warm)[0]["cache"] == warm[-1].model_extra["rekindle"]["reused_tokens"] > 100


def test_a_receipt_is_verified_from_the_blocks_that_were_read_of_a_slot(model: Path, tmp_path: Path) -> None:
    flags = {"backend": "llama.cpp", "backend_flags": "-t 1 -np 1", "max_context": 1024}
    with serving(model=str(model), **flags, store=str(tmp_path / "store")) as served:
        said = text_of(asked(served, "ada", LONG, max_tokens=40))
        answer = asked(served, "ada", LONG, said, "Again, please.", max_tokens=40)
        shown = served.send("GET", f"/v1/receipts/{answer['id']}").json
    identity, (choice,) = shown["identity"], shown["choices"]
    assert (identity["backend"], identity["holds"], list(identity["kv"])) == ("llama.cpp", "kv", ["u8/u8"])
    num_tokens = choice["read"]["tokens"]
    assert num_tokens == answer["rekindle"]["reused_tokens"] > 100
    says = f"{shown['id']}: verified, {num_tokens} tokens that were read\n"
    assert verified(tmp_path, shown, "store") == (0, says)
    flip(only(tmp_path, "blocks-0-000.safetensors"), choice["blocks"][0]["hash"])
    code, says = verified(tmp_path, shown, "store")
    assert code == 1 and "the checksum of its KV does not hold" in says, says


def test_agents_of_a_conversation_share_a_slot(front: Served) -> None:
    answers_as_the_page_says(front)


def test_a_client_that_leaves_frees_the_slot(front: Served) -> None:
    messages: Any = [{"role": "user", "content": "Count to a thousand."}]
    more: Any = {"ignore_eos": True}
    stream = front.client().chat.completions.create(
        model="default", messages=messages, max_tokens=900, stream=True, extra_body=more
    )
    next(iter(stream))
    stream.close()
    answer = front.send("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 2


def test_it_is_started_again(front: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2}
    port = front.engine.notes[0].split("127.0.0.1:")[1].split()[0]
    found = subprocess.run(["pgrep", "-f", f"llama-server.*--port {port}"], capture_output=True, text=True, check=True)
    os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)
    assert until(lambda: front.send("GET", "/health/ready").status == 503)
    assert until(lambda: front.send("POST", "/v1/chat/completions", body).status == 200)


def test_it_answers_in_the_form_that_was_recorded(tmp_path: Path) -> None:
    """Every request is sent as it was, and its answer has every field that one had."""
    before, now = Recording.read(), record(tmp_path)
    assert [each.get("status") for each in now.replies.values()] == [
        each.get("status") for each in before.replies.values()
    ]
    for each in before.exchanges:
        answered = now.find(each.path, each.asked)
        assert answered is not None and answered.status == each.status
        assert is_part(forms(each.answer), forms(answered.answer)), each.path
