"""What a text model cannot see becomes one line that says what is known of it, the same in every turn."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import pytest

from rekindle.errors import BadRequest
from rekindle.text.messages import Message, check_text, normalise_messages
from rekindle.text.omissions import MOST_NAMED, Omissions, kind_of, line_for, text_in


def png(width: int, height: int) -> str:
    """A picture of one grey, in base64."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"\0" * (width + 1) * height))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + rows + chunk(b"IEND", b"")).decode()


PNG = png(64, 48)
GIF = base64.b64encode(b"GIF89a" + struct.pack("<HH", 7, 9) + b"\0" * 20).decode()
NOT_SHOWN = ": not shown, this model reads text]"


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, "image, 64 x 48 png"),
        ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, "image, 64 x 48 png"),
        ({"type": "input_image", "image_url": f"data:image/gif;base64,{GIF}"}, "image, 7 x 9 gif"),
        (
            {"type": "image_url", "image_url": {"url": "https://a.example/b.png?c=1"}},
            "image, https://a.example/b.png?c=1",
        ),
        ({"type": "image", "source": {"type": "url", "url": "https://a.example/b"}}, "image, https://a.example/b"),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "image, file-1"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}, "image, png"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG[:20]}}, "image, png"),
        ({"type": "image"}, "image"),
        ({"type": "image_url"}, "image"),
        (
            {
                "type": "document",
                "title": "Q3",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
            },
            "document, Q3, pdf",
        ),
        (
            {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
            "document, a.pdf, pdf",
        ),
        ({"type": "input_file", "file_id": "file-7"}, "document, file-7"),
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "audio, wav"),
        ({"type": "tool_reference", "tool_name": "Grep"}, "tool_reference, Grep"),
        ({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}, "server_tool_use, web_search"),
        ({"type": "thing"}, "thing"),
        ({"no": "type"}, "part"),
        ({"type": ["odd"]}, "part"),
        ({"type": "a]\nb\ufdd0<|im_end|>", "name": "x\ud800]"}, "a__b___im_end__, x__"),
    ],
)
def test_lines_say_what_is_known(part: Mapping[str, Any], line: str) -> None:
    shown = line_for(part, kind_of(part))
    assert shown == f"[{line}{NOT_SHOWN}"
    assert check_text(shown, "here") == shown


def test_texts_of_documents_are_shown() -> None:
    text = {"type": "document", "title": "Plan", "source": {"type": "text", "media_type": "text/plain", "data": "One."}}
    blocks = [{"type": "text", "text": "Two."}, {"type": "text", "text": "Three."}]
    nested = {"type": "document", "source": {"type": "content", "content": blocks}}
    found = {"type": "search_result", "title": "T", "source": "https://a.example", "content": blocks}
    assert text_in(text) == "Plan\nOne."
    assert text_in(nested) == "Two.\nThree."
    assert text_in(found) == "T\nhttps://a.example\nTwo.\nThree."
    pictures = {"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}
    for part in (pictures, {"type": "document"}, {"type": "document", "source": {"type": "text"}}, {"type": "image"}):
        assert text_in(part) is None


def test_what_was_left_out_is_counted_by_kind() -> None:
    omissions = Omissions()
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "https://a.example"}}]
    messages = normalise_messages(
        [{"role": "user", "content": parts, "timestamp": 3}, {"role": "user", "content": parts[1:], "timestamp": 4}],
        omissions,
    )
    line = f"[image, https://a.example{NOT_SHOWN}"
    assert messages == (Message("user", f"Look:\n{line}"), Message("user", line))
    (image,) = omissions.all().left_out
    assert (image.kind, image.count, image.param, image.text) == ("image", 2, "messages[0].content[1]", line)
    assert omissions.all().ignored == ("messages[].timestamp",)


def test_a_caller_cannot_make_the_record_long() -> None:
    omissions = Omissions()
    for number in range(1000):
        omissions.part({"type": f"kind{number}"}, "there")
        omissions.parameter(f"{number}" * 1000)
    found = omissions.all()
    assert len(found.left_out) == len(found.ignored) == MOST_NAMED
    assert all(len(each.text) < 300 for each in found.left_out) and all(len(name) <= 100 for name in found.ignored)


def test_a_strict_reader_refuses_each() -> None:
    strict = Omissions(strict=True)
    with pytest.raises(BadRequest, match="of type 'image': this model reads text"):
        strict.part({"type": "image"}, "messages[0].content[0]")
    with pytest.raises(BadRequest, match="cannot be served here"):
        strict.whole({"type": "web_search"}, "tools[0]")
    with pytest.raises(BadRequest, match="unknown parameter 'best'"):
        strict.parameter("best")
    with pytest.raises(BadRequest, match=r"messages\[0\].weight is not supported") as caught:
        strict.key("weight", "messages[0]")
    assert caught.value.param == "messages[0].weight"
    assert strict.all().left_out == () and strict.all().ignored == ()


def test_older_forms_of_calls_are_read() -> None:
    call = {"name": "f", "arguments": "{}"}
    asked, answered = normalise_messages(
        [
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "f", "content": "42"},
        ]
    )
    assert [(each.name, each.arguments) for each in asked.tool_calls] == [("f", "{}")]
    assert answered == Message("tool", "42", name="f")
