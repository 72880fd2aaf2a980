"""Work that fails, in whatever way, ends one request, never a thread."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.errors import RequestFailed
from tests.engine.conftest import Start
from tests.engine.dying import TOO_HARD, WAIT_S, Panic, answers, hello, panicking_model, raising

KINDS = [Panic, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_on_the_intake_fails_for_its_caller_only(start: Start, kind: type[BaseException]) -> None:
    engine = start()
    engine.components.intake.run(raising(kind))
    with pytest.raises(RequestFailed, match=f"{kind.__name__}: out of the depths"):
        engine.components.intake.call(raising(kind)).result(WAIT_S)
    assert answers(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_fails_on_the_engine_fails_for_its_caller_only(start: Start, kind: type[BaseException]) -> None:
    engine = start()
    with pytest.raises(RequestFailed, match=f"{kind.__name__}: out of the depths"):
        engine.components.loop.call(raising(kind)).result(WAIT_S)
    assert answers(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_panic_of_the_model_ends_one_request(start: Start, kind: type[BaseException]) -> None:
    engine = start()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(raising(kind))
    failed = engine.submit(hello())
    with pytest.raises(RequestFailed, match=r"^the forward pass failed; the server's log has the reason$") as caught:
        failed.result()
    assert isinstance(caught.value.__cause__, kind), "who uses the library sees the reason"
    hook.remove()
    assert answers(engine)


@pytest.mark.parametrize("thread", ["intake", "engine"])
def test_a_question_that_is_taken_back_is_not_asked(start: Start, thread: str) -> None:
    engine = start()
    parts, asked, go_on = engine.components, [], Future[None]()
    ask: Any = parts.intake.call if thread == "intake" else lambda run: parts.loop.call(lambda core: run())
    ask(lambda: go_on.result(WAIT_S))
    taken_back = ask(lambda: asked.append("it"))
    assert taken_back.cancel()
    go_on.set_result(None)
    assert answers(engine) and asked == []


def test_a_panic_of_the_tokenizer_ends_one_request(tmp_path: Path, start: Start) -> None:
    """The library gives up on a pattern that goes back too often: a panic, which derives from BaseException."""
    engine = start(panicking_model(tmp_path))
    for _ in range(2):
        generation = engine.stream("ada", [{"role": "user", "content": TOO_HARD}])
        with pytest.raises(RequestFailed, match=r"^the prompt could not be prepared; the server's log") as caught:
            generation.result()
        assert "retry-limit-in-match" in str(caught.value.__cause__)
    assert answers(engine)
