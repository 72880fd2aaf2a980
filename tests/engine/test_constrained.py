"""Constrained replies of an engine: valid whatever the model would say, alone, beside others and after a preemption."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from rekindle import BadRequest, Constraint
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Cancelled
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["lamp", "stone", "feather"]},
        "weights": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "weights"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "Describe it."}]


def check(text: str) -> dict[str, Any]:
    value = json.loads(text)
    assert set(value) == {"name", "kind", "weights"} and value["kind"] in ("lamp", "stone", "feather")
    assert len(value["name"]) <= 12 and len(value["weights"]) <= 3
    assert all(isinstance(each, int) and 0 <= each <= 99 for each in value["weights"])
    return dict(value)


@pytest.fixture
def engine(start: Start) -> Engine:
    return start()


def test_replies_are_valid_with_every_way_to_draw(engine: Engine) -> None:
    for seed in range(8):
        result = engine.chat(
            None, HELLO, temperature=seed % 3, seed=seed, max_tokens=800, constraint=Constraint("json", ITEM)
        )
        check(result.text)
        assert result.finish_reason == "stop"
    biased = engine.chat(
        None, HELLO, temperature=1, seed=1, max_tokens=800, repetition_penalty=1.3, top_p=0.9, top_k=20, min_p=0.01,
        logit_bias=[(50, 5.0)], constraint=Constraint("json", ITEM),
    )  # fmt: skip
    check(biased.text)


def test_several_replies_and_others_at_once(engine: Engine) -> None:
    free = engine.chat(None, HELLO, temperature=0, max_tokens=20)
    request = GenerationRequest(
        text="Describe it.", constraint=Constraint("json", ITEM), params=engine_params(temperature=1.0, seed=5)
    )
    generations = engine.submit_many(request, 4)
    beside = engine.chat(None, HELLO, temperature=0, max_tokens=20, reuse="off")
    texts = [generation.result().text for generation in generations]
    assert beside.token_ids == free.token_ids, "others are as they were"
    assert len({json.dumps(check(text)) for text in texts}) > 1, "each is drawn for itself"


def engine_params(**given: Any) -> Any:
    from rekindle import SamplingParams

    return SamplingParams(**{"max_tokens": 800, **given})


def test_constrained_replies_are_the_same_alone_and_with_drafts(start: Start) -> None:
    """What is said once is drafted the next time; masks come in the same order then."""
    texts = set()
    for speculate in ("auto", "off"):
        engine = start(speculate=speculate, kv="fp32")
        for _ in range(3):
            texts.add(engine.chat(None, HELLO, temperature=0, max_tokens=800, constraint=Constraint("json", ITEM)).text)
    assert len(texts) == 1


def test_a_small_memory_preempts_and_the_replies_stay(start: Start) -> None:
    request = GenerationRequest(
        text="x " * 40, constraint=Constraint("json", ITEM), params=engine_params(temperature=1.0, seed=3)
    )
    wide = [generation.result().text for generation in start(store="off").submit_many(request, 8)]
    narrow = start(hot_bytes=100 << 10, store="off")
    texts = [generation.result().text for generation in narrow.submit_many(request, 8)]
    assert narrow.stats().num_preemptions and list(map(check, texts)) == list(map(check, wide))


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    result = engine.chat(
        None, HELLO, temperature=0, max_tokens=800, logprobs=2, constraint=Constraint("choice", ("yes", "no"))
    )
    assert result.text in ("yes", "no") and len(result.logprobs) == len(result.token_ids)


def test_a_reply_that_is_cut_off_says_so(engine: Engine) -> None:
    result = engine.chat(None, HELLO, temperature=0, max_tokens=3, constraint=Constraint("json", ITEM))
    assert result.finish_reason == "length" and len(result.token_ids) == 3


def test_a_finished_form_ends_the_reply(engine: Engine) -> None:
    """No token is needed to say that nothing may follow, so a bound of its own length does not cut it off."""
    asked = Constraint("choice", ("yes",))
    free = engine.chat(None, HELLO, temperature=0, max_tokens=50, constraint=asked)
    bound = engine.chat(None, HELLO, temperature=0, max_tokens=len(free.token_ids), constraint=asked)
    assert (free.finish_reason, bound.finish_reason, bound.text) == ("stop", "stop", "yes")


def test_what_does_not_go_together_is_refused(engine: Engine) -> None:
    given = Constraint("choice", ("yes",), "guided_choice")
    with pytest.raises(BadRequest, match="min_tokens"):
        engine.chat(None, HELLO, min_tokens=2, constraint=given)
    with pytest.raises(BadRequest, match="given beginning"):
        engine.submit(
            GenerationRequest(text="Is it?", reply_prefix="y", constraint=given, params=engine_params())
        ).result()
    with pytest.raises(BadRequest, match="unclosed"):
        engine.chat(None, HELLO, constraint=Constraint("regex", "(a", "guided_regex"))
    assert engine.chat(None, HELLO, max_tokens=5, constraint=given).text == "yes", "the engine goes on"


DOUBLES = "\n".join([*(f"a{at}: a{at + 1} a{at + 1}" for at in range(40)), 'a40: "x"'])
MANY = "\n".join(["many: " + " | ".join(f'"c{at}x"' for at in range(3000))])
# Each takes some tokens, and only then is more than a reply can follow.
TOO_MUCH = [
    Constraint("grammar", f"start: /[b-w]{{12}}/ a0\n{DOUBLES}", "guided_grammar"),
    Constraint("grammar", f"start: /[d-w]{{12}}/ many\n{MANY}", "guided_grammar"),
    Constraint("regex", "[b-w]{12}((a{1000}){1000}){100}", "guided_regex"),
]


@pytest.mark.parametrize("given", TOO_MUCH)
def test_a_reply_that_cannot_be_followed_ends_alone(engine: Engine, given: Constraint) -> None:
    endless = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    others = [engine.submit(GenerationRequest(text=f"{at}", namespace=f"n{at}", params=endless)) for at in range(4)]
    for other in others:
        next(iter(other))
    with pytest.raises(BadRequest) as caught:
        engine.chat(None, HELLO, max_tokens=400, seed=1, temperature=1, constraint=given)
    assert str(caught.value) == f"{given.param}: this is too complex, in time or in memory: simplify it"
    assert caught.value.param == given.param
    for other in others:
        assert len(other.result().token_ids) == 200


def patterns(num: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^a{at}[a-z]+$": {"type": "string"} for at in range(num)}}


def test_nobody_waits_while_a_constraint_is_compiled(engine: Engine) -> None:
    """This one takes a minute where nothing bounds it; the others are answered before it is refused."""
    given = Constraint("json", patterns(500), "response_format")
    hard = engine.submit(GenerationRequest(text="Hi.", namespace="noisy", constraint=given, params=engine_params()))
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(BadRequest, match="too complex"):
            hard.result()
        ended.append("hard")

    waiting = threading.Thread(target=wait)
    waiting.start()
    for at in range(5):
        engine.chat(None, [{"role": "user", "content": f"{at}"}], max_tokens=1)
        ended.append("easy")
    waiting.join()
    assert ended == ["easy"] * 5 + ["hard"]


def test_a_cancelled_request_is_not_compiled_any_further(engine: Engine) -> None:
    given = Constraint("json", patterns(500), "response_format")
    hard = engine.submit(GenerationRequest(text="Hi.", constraint=given, params=engine_params()))
    hard.cancel()
    with pytest.raises(Cancelled):
        hard.result()
