"""Words taken in before they are asked about: hot for whoever asks next, no turn, and no trace on disk until one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.api import Engine
from rekindle.engine.request import State
from rekindle.engine.types import ChatResult, GenerationRequest, Report
from rekindle.errors import BadRequest
from rekindle.model.loaded import LoadedModel
from rekindle.text.messages import Message, normalise_messages
from rekindle.text.places import anticipated
from tests.engine.conftest import Start
from tests.engine.rewriting import REWRITING, with_template
from tests.engine.test_engine import SYSTEM, talk, user
from tests.engine.test_index_trouble import refused
from tests.engine.test_purge import disk_pieces, hot_pieces
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.text.factories import BYTE_LEVEL, REFUSES_TWO_USERS, SNIPPETS, TRIMS, encoder_of
from tests.text.families import FAMILIES, encoder_for
from tests.tiny_models import END_ID, tiny_model_dir

SAID = "Bob: The red box holds 4711 screws, and the blue box holds 12 nuts. What did she say about the weather?"
CUE = "<|im_end|>\n<|im_start|>assistant\n<think>\n"
GREEDY = {"temperature": 0.0, "max_tokens": 7}
Messages = list[dict[str, str]]


def absorb(engine: Engine, agent: str, messages: Messages, **given: Any) -> Report:
    asked = GenerationRequest(
        messages=normalise_messages(messages), agent=agent, task="absorb", **{"open_end": True, **given}
    )
    result = engine.submit(asked).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "stop")
    return result.report


def take_in(engine: Engine, agent: str, history: Messages, words: str, pieces: int = 4) -> list[Report]:
    """Absorb `words` as they are said, in so many pieces that end anywhere."""
    ends = [len(words) * (piece + 1) // pieces for piece in range(pieces)]
    return [absorb(engine, agent, [*history, user(words[:end])]) for end in ends]


def num_tokens(engine: Engine, text: str) -> int:
    return len(engine.encoder.encode(engine.encoder.render_text(text)))


def begin(engine: Engine, agent: str, history: Messages) -> None:
    """A first turn whose reply ends by itself and is encoded as it was generated, so that it is extended."""
    history.append(user("Hello!"))
    letter = next(each for each in ascii_letters if num_tokens(engine, each * 7) == 7)
    token = int(engine.encoder.encode(engine.encoder.render_text(letter))[0])
    reply = engine.chat(
        agent, history, temperature=0.0, min_tokens=7, max_tokens=9, logit_bias=((token, 50.0), (END_ID, 100.0))
    )
    assert (reply.text, reply.finish_reason) == (letter * 7, "stop")
    history.append({"role": "assistant", "content": reply.text})


def cold(engine: Engine, messages: Messages) -> ChatResult:
    return engine.chat(None, messages, reuse="off", **GREEDY)


def test_what_was_absorbed_is_hot_for_the_next_prompt(start: Start) -> None:
    engine, history = start(min_reuse_tokens=1), [SYSTEM]
    begin(engine, "ada", history)
    engine.flush()
    before = engine.agent("ada").info()
    taken = take_in(engine, "ada", history, SAID)
    assert sum(report.computed_tokens for report in taken) <= num_tokens(engine, SAID) + 24, "each piece only once"
    assert engine.agent("ada").info() == before, "no branch was made or used"
    without = cold(engine, [*history, user(SAID)])
    reply = talk(engine, "ada", history, SAID)
    assert reply.report.computed_tokens <= num_tokens(engine, "weather?" + CUE)
    assert (reply.report.outcome, reply.report.source) == ("extend", "own")
    assert (reply.prompt_ids, reply.token_ids) == (without.prompt_ids, without.token_ids)
    assert engine.agent("ada").info().branches == 1 and engine.agent("ada").rewind(1) == before.num_tokens
    engine.check()


def test_of_somebody_without_a_memory_nothing_is_known_but_the_blocks_are_there(start: Start) -> None:
    engine = start(min_reuse_tokens=1)
    take_in(engine, "eve", [SYSTEM], SAID)
    assert engine.agents() == []
    report = engine.chat("eve", [SYSTEM, user(SAID)], **GREEDY).report
    assert report.computed_tokens <= num_tokens(engine, "weather?" + CUE)
    assert (report.outcome, report.source) == ("diverge", "shared")


def test_without_an_open_end_it_is_the_whole_prompt(start: Start) -> None:
    engine = start()
    asked = [SYSTEM, user(SAID)]
    absorb(engine, "ada", asked, open_end=False)
    assert engine.chat("ada", asked, **GREEDY).report.computed_tokens == 1
    assert engine.agent("ada").info().branches == 1


def test_it_is_written_to_disk_when_a_turn_stands_on_it(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    begin(engine, "ada", history)
    engine.flush()
    written = engine.stats().store
    take_in(engine, "ada", history, SAID * 2)
    engine.flush()
    after = engine.stats().store
    assert written is not None and after is not None
    assert (after["blocks_written"], after["turns_saved"]) == (written["blocks_written"], written["turns_saved"])
    report = talk(engine, "ada", history, SAID * 2).report
    engine.flush()
    known = engine.agent("ada").info()
    assert known.branches == 1 and known.saved_tokens == known.num_tokens
    engine.check()
    engine = start()
    assert talk(engine, "ada", history, "And then?").report.warm_tokens >= report.prompt_tokens
    engine.check()


def test_what_nobody_stood_on_is_gone_after_a_restart(start: Start) -> None:
    engine, history = start(), [SYSTEM]
    begin(engine, "ada", history)
    take_in(engine, "ada", history, SAID * 2)
    engine.flush()
    known, new = engine.agent("ada").info().num_tokens, num_tokens(engine, SAID)
    report = talk(start(), "ada", history, SAID * 2).report
    assert report.reused_tokens <= known < report.prompt_tokens - new


@pytest.mark.parametrize("spoken", [False, True])
def test_a_purge_leaves_no_byte_of_it(start: Start, tmp_path: Path, spoken: bool) -> None:
    engine, history = start(), [SYSTEM]
    talk(engine, "bob", [SYSTEM], "Where is the red box?")
    engine.flush()
    before = hot_pieces(engine) | disk_pieces(tmp_path)
    begin(engine, "ada", history)
    take_in(engine, "ada", history, SAID)
    if spoken:
        talk(engine, "ada", history, SAID)
        take_in(engine, "ada", history, SAID)
    assert len(hot_pieces(engine) - before) > 20
    engine.agent("ada").purge()
    assert hot_pieces(engine) <= before and disk_pieces(tmp_path) <= before
    engine.check()


@pytest.mark.parametrize("forget", ["offload", "delete"])
def test_who_is_taken_out_of_memory_leaves_nothing_of_it_there(start: Start, forget: str) -> None:
    engine, history = start(), [SYSTEM]
    begin(engine, "ada", history)
    take_in(engine, "ada", history, SAID)
    engine.agent("ada").offload() if forget == "offload" else engine.agent("ada").delete()
    assert engine.stats().num_cached_blocks == 0
    engine.check()


def test_an_open_end_of_what_is_remembered_is_gone_on_from(start: Start) -> None:
    engine, history = start(min_reuse_tokens=1), [SYSTEM]
    begin(engine, "ada", history)
    engine.prefill("ada", [*history, user(SAID[:60])], open_end=True)
    engine.prefill("ada", [*history, user(SAID)], open_end=True)
    assert engine.agent("ada").info().branches == 1, "the second one goes on from the first"
    engine.flush()
    engine = start(min_reuse_tokens=1)
    without = cold(engine, [*history, user(SAID)])
    reply = talk(engine, "ada", history, SAID)
    assert reply.report.computed_tokens <= num_tokens(engine, "weather?" + CUE)
    assert reply.report.warm_tokens > num_tokens(engine, SAID) and reply.token_ids == without.token_ids
    assert engine.agent("ada").info().branches == 1


ENDS = (
    "The light", "The lighthouse", "The lighthouse ", "It rained.  ", "It rained.\n", "\n\n", "", "数", "数字",
    "emoji 🙂", "👩\u200d👩", "cafe\u0301", "471", "4711 ", "<|im_", "def add(a, b):\n    ",
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "rests"), [("append only", ("", "house keeper.")), ("trimmed and dated", (" 字🙂", "\n"))]
)
def test_it_may_end_anywhere(
    start: Start, tiny_llama: Path, tmp_path: Path, template: str, rests: tuple[str, str]
) -> None:
    """The ids of the next prompt are those that it has without anything absorbed, whatever the words go on with."""
    engine = start(with_template(tiny_llama, REWRITING[template], tmp_path / "model"))
    for number, end in enumerate(ENDS):
        for words, rest in enumerate(rests):
            opening = [SYSTEM, user(f"Case {number}: " + SAID)]
            history: Messages = [*opening, {"role": "assistant", "content": "Hm."}]
            agent = f"agent {number}, {words}"
            engine.chat(agent, opening, **GREEDY)
            absorb(engine, agent, [*history, user(end)])
            asked = [*history, user(end + rest or "?")]
            without, reply = cold(engine, asked), engine.chat(agent, asked, **GREEDY)
            assert reply.prompt_ids == without.prompt_ids, f"{end!r} and {rest!r}"
            assert reply.token_ids == without.token_ids
    engine.check()


@pytest.mark.parametrize("template", REWRITING)
def test_templates_that_rewrite_the_past(start: Start, tiny_llama: Path, tmp_path: Path, template: str) -> None:
    engine = start(with_template(tiny_llama, REWRITING[template], tmp_path / "model"), min_reuse_tokens=1)
    history = [SYSTEM]
    for number in range(4):
        words = f"{number}. {SAID}"
        take_in(engine, "ada", history, words)
        without = cold(engine, [*history, user(words)])
        reply = talk(engine, "ada", history, words)
        assert reply.report.computed_tokens <= num_tokens(engine, f"weather?{CUE}") + 8, reply.report
        assert reply.token_ids == without.token_ids
    engine.check()


@pytest.mark.parametrize("template", [REFUSES_TWO_USERS, TRIMS])
def test_templates_that_refuse_two_in_a_row(start: Start, tiny_llama: Path, tmp_path: Path, template: str) -> None:
    engine = start(with_template(tiny_llama, template, tmp_path / "model"), min_reuse_tokens=1)
    history = [user("Hello!"), {"role": "assistant", "content": "Hm."}, user("Ada: One.")]
    take_in(engine, "ada", history, SAID)
    asked = [*history, user(SAID)]
    without, reply = cold(engine, asked), engine.chat("ada", asked, **GREEDY)
    assert reply.report.computed_tokens <= num_tokens(engine, "weather?<|end|>\n<|start|>assistant\n") + 2
    assert reply.token_ids == without.token_ids
    engine.check()


def test_what_no_template_takes_is_refused(start: Start, tiny_llama: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('never') }}"
    engine = start(with_template(tiny_llama, template, tmp_path / "model"))
    with pytest.raises(BadRequest, match="never"):
        absorb(engine, "ada", [user(SAID)])
    engine.check()


@cache
def family(name: str) -> Any:
    return encoder_for(name)


texts = st.lists(st.sampled_from(SNIPPETS), max_size=8).map("".join)


@given(name=st.sampled_from(sorted(FAMILIES)), words=texts, more=texts)
def test_an_open_end_begins_whatever_is_said_on_it(name: str, words: str, more: str) -> None:
    """In text and in ids, but where the template trims and nothing is said behind blanks."""
    encoder, messages = family(name), [Message("user", "Hi."), Message("assistant", "Hm."), Message("user", words)]
    _begins(encoder, messages, words, more)


@given(kind=st.sampled_from(BYTE_LEVEL), template=st.sampled_from([None, TRIMS]), words=texts, more=texts)
def test_an_open_end_with_other_tokenizers(kind: str, template: str | None, words: str, more: str) -> None:
    encoder = encoder_of(kind) if template is None else encoder_of(kind, template)
    _begins(encoder, [Message("user", words)], words, more)


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *FAMILIES])
def test_an_open_end_behind_blanks(kind: str) -> None:
    """Several may be one token at the end of a text, and are divided before words and figures."""
    encoder = encoder_of(kind) if kind in BYTE_LEVEL else family(kind)
    for blanks, behind in product(
        ("  ", "\t\t", "\n\n", "\n ", " \n ", "\u00a0 ", "\u3000\u3000"), ("1s", "1", "!x", "s")
    ):
        words = f"s{blanks}{behind}"
        _begins(encoder, [Message("user", "Hi."), Message("assistant", "Hm."), Message("user", words)], words, "")


def _begins(encoder: Any, messages: list[Message], words: str, more: str) -> None:
    common = anticipated(encoder, messages, None, template_kwargs={}, probes="more")
    assert common is not None
    whole = encoder.render_chat([*messages[:-1], replace(messages[-1], content=words + more)])
    if not words[-1:].isspace() or more.strip():
        assert whole.key.startswith(common.key)
    if whole.key.startswith(common.key):
        ids = encoder.encode(common)
        assert encoder.encode(whole)[: len(ids)].tolist() == ids.tolist()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("absorb")), "fp32", "q4h")


def test_one_on_top_of_the_other_while_somebody_speaks(loaded: LoadedModel) -> None:
    rig, speech, heard = Rig(loaded), some_ids(50, seed=2), some_ids(300)
    alone = Rig(loaded).generate(speech, 24).token_ids
    speaking = rig.request(speech, 24)
    rig.step()
    ends = [130, 141, 144, 152, 160, 171, 185, 200]
    for before, end in zip([0, *ends], ends, strict=False):
        rows, steps = rig.core.num_rows, rig.core.num_steps
        (result,) = rig.finish(rig.task(heard[:end], "absorb"))
        assert result.report.computed_tokens == end - before
        assert (rig.core.num_rows - rows, rig.core.num_steps - steps) == (end - before + 1, 1), "beside a decode"
    assert speaking.state is not State.FINISHED
    asked = rig.request(heard[:205], 3)
    assert rig.finish(speaking)[0].token_ids == alone
    (result,) = rig.finish(asked)
    assert result.report.computed_tokens == 5
    assert result.token_ids == Rig(loaded).generate(heard[:205], 3).token_ids
    assert len(rig.turns) == 2, "what was absorbed is no turn"


def test_cancelled_half_way_what_is_computed_stays(loaded: LoadedModel) -> None:
    rig, ids = Rig(loaded, max_chunk_tokens=64), some_ids(200)
    request = rig.task(ids, "absorb")
    rig.step()
    request.cancelled.set()
    (result,) = rig.finish(request)
    assert (result.finish_reason, rig.turns) == ("cancelled", [])
    assert rig.num_hot(ids) == 64 and rig.pool.num_held == 0
    assert rig.generate(ids, 1).report.computed_tokens == 200 - 64


def test_in_a_small_memory_it_waits_for_who_speaks_and_is_let_go_first(loaded: LoadedModel) -> None:
    rig, speech = Rig(loaded, num_blocks=12), some_ids(60, seed=2)
    alone = Rig(loaded).generate(speech, 90).token_ids
    speaking = rig.request(speech, 90)
    rig.step()
    task = rig.task(some_ids(100), "absorb")
    for end in (110, 120, 130):
        rig.finish(task)
        task = rig.task(some_ids(end), "absorb")
    assert rig.finish(speaking, task)[0].token_ids == alone
    assert rig.pool.num_held == 0 and len(rig.turns) == 1


@pytest.mark.parametrize("first_save_fails", [False, True])
def test_a_turn_that_ends_inside_absorbed_words_is_saved_with_them(start: Start, first_save_fails: bool) -> None:
    engine = start()
    ids = tuple(range(40, 70))  # of 16 tokens a block, so the second is a tail
    engine.submit(GenerationRequest(token_ids=ids, agent="ada", task="absorb")).result()
    shorter = GenerationRequest(token_ids=ids[:26], agent="ben", task="prefill")
    with refused(engine, "INSERT ON block") if first_save_fails else nullcontext():
        assert engine.submit(shorter).result().report.computed_tokens == 0
        assert engine.flush()
    assert engine.agent("ben").info().saved_tokens == (0 if first_save_fails else 26)
    engine.agent("ben").fork("eve")
    engine.check()
    engine = start()
    assert {info.agent: info.warm_tokens for info in engine.agents()} == {"ben": 26, "eve": 26}
    assert engine.submit(shorter).result().report.computed_tokens == 0
