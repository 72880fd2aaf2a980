"""A ctrl-C counts, whatever the interrupted code makes of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from rekindle.cli.border import INTERRUPTED, code_of, interrupts
from rekindle.errors import ModelRefused


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def into_errors() -> int:
    """As Python, transformers and our own refusal do, one after another."""
    try:
        try:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt as interrupt:
                raise RuntimeError("Error calling __set_name__") from interrupt
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module") from error
    except ImportError as error:
        raise ModelRefused("transformers cannot read its config") from error
    return 0


def test_a_command_whose_library_makes_an_error_of_ctrl_c_was_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(into_errors) == INTERRUPTED
    assert capsys.readouterr().err == "rekindle: interrupted; what was saved or written until now stays\n"


def test_an_error_while_an_interrupt_is_handled_is_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise OSError("cannot be closed")


def test_a_command_that_answers_ctrl_c_itself_ends_as_it_says() -> None:
    def run() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return 7

    assert code_of(run) == 7


def test_an_error_without_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(ValueError), interrupts():
        raise ValueError


def test_the_handler_stays_pythons_own() -> None:
    """asyncio ends a running task in order only where it finds that one."""
    assert code_of(lambda: int(signal.getsignal(signal.SIGINT) is signal.default_int_handler)) == 1
