"""Conversations with pictures: every reply is that of transformers alone; what is stored is never computed again."""

from __future__ import annotations

import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from rekindle import BadRequest, Engine, ModelRefused
from rekindle.engine.types import ChatResult
from rekindle.model.batch import ForwardBatch, SequenceStep
from rekindle.model.vision import Vision
from rekindle.text.pictures import Picture, PictureSpan
from rekindle.text.prompt import PromptEncoder
from tests.drawn_pictures import Part, Reference, counted_looks, drawn, file_of, part_of, text
from tests.engine.conftest import Start
from tests.kernels.native import needs_kernels
from tests.tiny_models import tiny_model_dir

COUNT = 8
WIDE, TALL, SMALL = drawn(1, 60, 40), drawn(2, 30, 50), drawn(3, 12, 12)
OTHER = drawn(4, 60, 40)  # as large as the first one, so that it has as many tokens


# How often a vision part is called for a picture that is no small one, and what stands for its rows.
LOOKS = {"smolvlm": 13, "idefics3": 13, "mistral3": 1, "gemma3": 1}  # 13: a grid of 4 x 3 tiles, and the whole of it
ROWS = {"smolvlm": "<image>", "idefics3": "<image>", "mistral3": "[IMG]", "gemma3": "<image_soft_token>"}
KINDS = ("smolvlm", "idefics3", "mistral3", "gemma3-vl")


@pytest.fixture(scope="session", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(request.param, "fp32", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(seeing: Path) -> Reference:
    return Reference(seeing)


@pytest.fixture
def looks(reference: Reference) -> int:
    return LOOKS[reference.model.config.model_type]


def user(*parts: Part) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def shown(picture: Image.Image) -> Part:
    return part_of(file_of(picture))


def asked(engine: Engine, agent: str, messages: list[dict[str, Any]]) -> ChatResult:
    return engine.chat(agent, messages, temperature=0, max_tokens=COUNT, logprobs=0)


def same(result: ChatResult, expected: tuple[list[int], list[int], list[float]]) -> bool:
    """Whether prompt, reply and its log probabilities are transformers' own, the last but for roundings."""
    ids, reply, scores = expected
    assert result.logprobs is not None
    own = [each.logprob for each in result.logprobs]
    assert (list(result.prompt_ids), list(result.token_ids)) == (ids, reply)
    assert own == pytest.approx(scores, abs=2e-3)
    return True


def test_replies_are_those_of_transformers(start: Start, seeing: Path, reference: Reference, looks: int) -> None:
    """Cold, extended by a second picture, parting at a picture, shared, after a restart; steps end inside pictures."""
    settings: dict[str, Any] = {"model": seeing, "kv": "fp32", "max_chunk_tokens": 7}
    engine = start(**settings)
    first = [user(shown(WIDE), text("What is it?"))]
    with counted_looks() as seen:
        cold = asked(engine, "ada", first)
    assert len(seen) == looks and cold.report.reused_tokens == 0
    assert same(cold, reference.reply(first, [WIDE], COUNT))

    second = [*first, {"role": "assistant", "content": cold.text}, user(text("And "), shown(TALL), text("this?"))]
    with counted_looks() as seen:
        extended = asked(engine, "ada", second)
    assert extended.report.reused_tokens > len(cold.prompt_ids) - 2 and len(seen) == looks  # at the second
    assert same(extended, reference.reply(second, [WIDE, TALL], COUNT))

    parted = [user(shown(OTHER), text("What is it?"))]
    with counted_looks() as seen:
        replaced = asked(engine, "ada", parted)
    assert replaced.report.reused_tokens < 16 and len(seen) == looks  # at most the text before the picture
    assert same(replaced, reference.reply(parted, [OTHER], COUNT))
    assert replaced.prompt_ids == cold.prompt_ids and replaced.logprobs != cold.logprobs

    with counted_looks() as seen:
        other = [*first, {"role": "assistant", "content": "No."}, user(text("Look again."))]
        shared = asked(engine, "bob", other)
    assert shared.report.reused_tokens >= len(cold.prompt_ids) - 16 and seen == []
    assert same(shared, reference.reply(other, [WIDE], COUNT))

    engine = start(**settings)  # which closes the first one
    again = [*second, {"role": "assistant", "content": extended.text}, user(text("Which was first?"))]
    with counted_looks() as seen:
        resumed = asked(engine, "ada", again)
    assert seen == [] and resumed.report.warm_tokens > len(extended.prompt_ids) - 2
    assert same(resumed, reference.reply(again, [WIDE, TALL], COUNT))
    assert engine.agent("ada").load().computed_tokens == 0  # of ids that no caller may send
    engine.check()


def scored(engine: Engine, messages: list[dict[str, Any]]) -> list[float]:
    """The log probability of each token of a prompt but the first, all computed."""
    given = engine.chat(None, messages, temperature=0, max_tokens=1, prompt_logprobs=0, reuse="off").prompt_logprobs
    assert given is not None and given[0] is None
    return [each.logprob for each in given[1:] if each is not None]


def test_every_token_has_the_score_that_transformers_gives_it(start: Start, seeing: Path, reference: Reference) -> None:
    """Those of pictures and between them too."""
    talk = [user(text("Look:"), shown(WIDE), text("and"), shown(TALL), text("What is it?"))]
    own = scored(start(model=seeing, kv="fp32", max_chunk_tokens=7), talk)
    assert own == pytest.approx(reference.scores(talk, [WIDE, TALL]), abs=2e-3)


@needs_kernels
@pytest.mark.parametrize("kv", ["bf16", "q4h"])
def test_kernels_see_what_torch_sees_in_chunks_of_any_size(start: Start, tmp_path: Path, kv: str) -> None:
    """A picture whose rows see each other, in layers that are fused: without that scores are 0.09 away."""
    model = tiny_model_dir("gemma3-vl", "bf16", tmp_path)
    talk = [user(text("Look:"), shown(WIDE), text("What is it?"))]
    whole, cut = (scored(start(model=model, kv=kv, max_chunk_tokens=most), talk) for most in (512, 7))
    assert whole == cut
    by_torch = scored(start(model=model, kv=kv, kernels="torch", max_chunk_tokens=40), talk)
    assert whole == pytest.approx(by_torch, abs=0.03)


def test_pictures_side_by_side_twice_and_as_one_tile(start: Start, seeing: Path, reference: Reference) -> None:
    """Also of two agents in one step, which wait for each other's pictures no longer than for their own."""
    engine = start(model=seeing, kv="fp32")
    several = [user(shown(SMALL), shown(WIDE), shown(SMALL), text("Which differ?"))]
    other = [user(text("One."), shown(TALL))]
    streams = [
        engine.stream(agent, each, temperature=0, max_tokens=COUNT, logprobs=0)
        for agent, each in (("ada", several), ("bob", other))
    ]
    one, two = (stream.result() for stream in streams)
    assert same(one, reference.reply(several, [SMALL, WIDE, SMALL], COUNT))
    assert same(two, reference.reply(other, [TALL], COUNT))
    row = ROWS[reference.model.config.model_type]
    words = [{"role": "user", "content": f"No picture, {row} is a word."}]
    assert same(asked(engine, "eve", words), reference_of_words(reference, engine, words))


def reference_of_words(
    reference: Reference, engine: Engine, words: list[dict[str, Any]]
) -> tuple[list[int], list[int], list[float]]:
    """As transformers continues the prompt's ids: its tokenizer would take the word for a picture."""
    cold = asked(engine, "cold", words)
    assert reference.model.config.image_token_id not in cold.prompt_ids
    assert cold.logprobs is not None
    return list(cold.prompt_ids), list(cold.token_ids), [each.logprob for each in cold.logprobs]


def test_four_bits_as_for_text(start: Start, seeing: Path) -> None:
    """The same conversation gives the same tokens hot, and computed without reuse."""
    engine = start(model=seeing, kv="q4h")
    first = [user(text("Look:"), shown(WIDE), text("What is it?"))]
    cold = asked(engine, "ada", first)
    talk = [*first, {"role": "assistant", "content": cold.text}, user(text("And now?"))]
    hot = asked(engine, "ada", talk)
    alone = engine.chat(None, talk, temperature=0, max_tokens=COUNT, reuse="off")
    assert hot.report.reused_tokens > len(cold.prompt_ids) - 2 and alone.report.reused_tokens == 0
    assert hot.token_ids == alone.token_ids
    penalised = engine.chat("ada", talk, temperature=0, max_tokens=COUNT, repetition_penalty=1.5, prompt_logprobs=0)
    assert penalised.prompt_logprobs is not None and len(penalised.prompt_logprobs) == len(hot.prompt_ids)


def test_rows_are_those_of_transformers_and_bounded(reference: Reference, looks: int) -> None:
    """Tile by tile, where transformers' own code takes all of a picture at once."""
    vision = Vision(reference.model, reference.images, most_bytes=1)
    one, other = (Picture.read(base64.b64encode(file_of(each)).decode(), "") for each in (WIDE, TALL))
    given = reference.given([user(shown(WIDE))], [WIDE])
    with torch.inference_mode():
        pixels = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
        (expected,) = reference.model.model.get_image_features(**pixels, return_dict=True).pooler_output
    with counted_looks() as seen:
        assert torch.allclose(vision.see(one), expected, atol=1e-5)
        assert torch.equal(vision.see(one), vision.rows(PictureSpan(one, 9, 0, len(expected)))) and len(seen) == looks
        assert torch.equal(vision.rows(PictureSpan(one, 9, 5, 3)), vision.see(one)[5:8])
        vision.see(other)
        assert len(seen) == 2 * looks
        vision.see(one)  # for which there was no room next to the other
        assert len(seen) == 3 * looks


def test_the_tokens_of_every_size_are_known_before(seeing: Path, reference: Reference) -> None:
    """From the size alone, as the processor then gives them."""
    form = Vision(reference.model, reference.images).form(PromptEncoder.from_dir(seeing))
    row = reference.model.config.image_token_id
    for seed in range(60):
        width, height = (int(each) for each in np.random.default_rng(seed).integers(3, 150, 2))
        ids = reference.given([user(shown(SMALL), text("?"))], [drawn(seed, width, height)])["input_ids"][0].numpy()
        own = form.layout(width, height)
        at = int(np.flatnonzero(ids == own[0])[0])
        assert ids[at : at + len(own)].tolist() == own.tolist(), (width, height)
        assert np.count_nonzero(ids == row) == np.count_nonzero(own == row)


@pytest.mark.parametrize("seeing", ["mistral3"], indirect=True)
def test_a_picture_of_one_patch_is_seen_as_next_to_another(reference: Reference) -> None:
    """By itself transformers fails at it."""
    dot = drawn(5, 3, 5)
    given = reference.given([user(shown(dot), shown(WIDE))], [dot, WIDE])
    with torch.inference_mode():
        pixels = {name: given[name] for name in ("pixel_values", "image_sizes")}
        expected, _ = reference.model.model.get_image_features(**pixels, return_dict=True).pooler_output
    vision = Vision(reference.model, reference.images)
    own = vision.see(Picture.read(base64.b64encode(file_of(dot)).decode(), ""))
    assert own.shape == (1, 64) and torch.allclose(own, expected, atol=1e-5)


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_a_tokenizer_of_another_model_is_refused(reference: Reference, tiny_llama: Path) -> None:
    vision = Vision(reference.model, reference.images)
    with pytest.raises(ModelRefused, match="image_token_id 384"):
        vision.form(PromptEncoder.from_dir(tiny_llama))


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_a_picture_that_is_kept_is_not_waited_for(reference: Reference) -> None:
    """The engine's thread needs rows while another picture is computed: it would stand still for seconds."""
    vision = Vision(reference.model, reference.images)
    one, other = (Picture.read(base64.b64encode(file_of(each)).decode(), "") for each in (SMALL, WIDE))
    kept = vision.see(one)
    begun, go_on = threading.Event(), threading.Event()

    def wait(module: torch.nn.Module, args: object) -> None:
        begun.set()
        assert go_on.wait(60)

    handle = reference.model.model.connector.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(3) as threads:
        try:
            computed = threads.submit(vision.see, other)
            assert begun.wait(60)
            assert threads.submit(vision.see, one).result(60) is kept and not computed.done()
            twice = threads.submit(vision.see, other)
        finally:
            go_on.set()
            handle.remove()
        assert twice.result(60) is computed.result(60)


def test_rows_of_several_sequences_lie_one_after_another() -> None:
    picture = Picture.read(base64.b64encode(file_of(SMALL)).decode(), "")
    steps = [
        SequenceStep(np.arange(count, dtype=np.uint32), 0, [0], 0, "none", (PictureSpan(picture, at, 1, 2),))
        for count, at in ((5, 3), (4, 0))
    ]
    batch = ForwardBatch.build(steps)
    assert batch.pictures == (PictureSpan(picture, 3, 1, 2), PictureSpan(picture, 5, 1, 2))
    assert [span.mutual for span in batch.spans] == [(), ()]
    seen_at_once = replace(steps[0], start=7, blocks=[0], pictures=(PictureSpan(picture, 3, 1, 2, True),))
    assert seen_at_once.span.mutual == ((10, 12),)


@pytest.mark.parametrize("seeing", ["idefics3"], indirect=True)
def test_an_agent_with_pictures_is_a_file(start: Start, seeing: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": seeing, "kv": "fp32"}
    talk = [user(shown(WIDE), text("What is it?"))]
    engine = start(**settings)
    told = asked(engine, "ada", talk)
    engine.flush()
    file = tmp_path / "ada"
    file.write_bytes(b"".join(engine.agent("ada").export()))
    other = start(**settings, store=str(tmp_path / "other"))
    other.agent("eve").import_file(lambda: file.open("rb"))
    with counted_looks() as seen:
        again = asked(other, "eve", talk)
    assert again.token_ids == told.token_ids and again.report.warm_tokens >= 96 and seen == []


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_an_explanation_names_the_picture_that_differs(start: Start, seeing: Path) -> None:
    engine = start(model=seeing, kv="fp32")
    talk = [user(text("The lighthouse keeper wrote the number down.")), {"role": "assistant", "content": "And slept."}]
    asked(engine, "ada", [*talk, user(shown(WIDE), text("Is it here?"))])
    why = asked(engine, "ada", [*talk, user(shown(OTHER), text("Is it here?"))]).report.explanation
    assert why is not None and why.stored is not None and why.sent is not None
    assert why.message_index == 2 and "[image " in why.stored and "[image " in why.sent and why.stored != why.sent


def damaged(file: bytes) -> bytes:
    """The head of a file, which is all that is read before it is looked at."""
    return file[: len(file) // 2]


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_what_cannot_be_seen_is_refused_with_the_reason(start: Start, seeing: Path) -> None:
    """Nothing else is touched: a request right after it is answered."""
    engine = start(model=seeing, kv="fp32")
    refused: list[tuple[Part, str]] = [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "not fetched"),
        (part_of(b"no picture"), "cannot be read"),
        (part_of(file_of(WIDE, "BMP"), "bmp"), "cannot be read"),
        (part_of(damaged(file_of(WIDE))), "decoded"),
        (part_of(file_of(drawn(0, 130, 2))), "64 times"),
        (part_of(file_of(Image.new("1", (8_000, 8_000)))), "40,000,000"),
    ]
    for part, reason in refused:
        with pytest.raises(BadRequest, match=reason):
            asked(engine, "ada", [user(part, text("What is it?"))])
    assert asked(engine, "ada", [user(shown(SMALL))]).token_ids
    engine.check()


@pytest.mark.parametrize("seeing", ["smolvlm"], indirect=True)
def test_a_turned_picture_is_seen_upright(start: Start, seeing: Path, reference: Reference) -> None:
    """As transformers' own reader turns it, by its head; so its tiles are those of the upright one."""
    turned = Image.Exif()
    turned[0x0112] = 6
    file = file_of(WIDE, "JPEG", exif=turned, quality=95)
    talk = [user(part_of(file, "jpeg"), text("What is it?"))]
    upright = load_image(Image.open(io.BytesIO(file)))
    assert upright.size == (40, 60)
    engine = start(model=seeing, kv="fp32")
    assert same(asked(engine, "ada", talk), reference.reply(talk, [upright], COUNT))
