"""A kept response that a full disk will not forget is said to be there still, and is deleted once there is room."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.server.scripted import serving, write_scripted_model
from tests.store.confined import limit_files, run_apart


def on_a_full_disk(directory: Path) -> None:
    """The files of this process may not grow while a response is to be deleted."""
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        responses = served.client().responses
        name = responses.create(model="default", input="talk please", max_output_tokens=4).id
        assert served.app.kept.flush()
        limit_files(1)
        answer = served.send("DELETE", f"/v1/responses/{name}")
        with pytest.raises(openai.InternalServerError) as caught:
            responses.delete(name)
        assert responses.retrieve(name).id == name
        limit_files(None)
        assert answer.status == caught.value.status_code == 503
        error = answer.error
        assert (error["type"], error["code"]) == ("server_error", "store_unavailable")
        assert name in error["message"] and "make room" in error["message"], error
        responses.delete(name)
        assert served.send("GET", f"/v1/responses/{name}").status == 404


def test_a_response_is_not_deleted_on_a_full_disk_and_that_is_said(tmp_path: Path) -> None:
    run_apart(on_a_full_disk, tmp_path)
