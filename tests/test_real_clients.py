"""The parts of the tool that runs real clients which need no client: script, log, table."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle.model.adjustments import History
from rekindle.model.params import SamplingParams
from rekindle.model.sampler import Draw, SamplerState
from rekindle.text.replies import find_reply_format
from rekindle.text.replies.events import ArgumentsDelta, CallStart
from tests.text.families import encoder_for
from tests.tiny_models import END_ID, tiny_tokenizer
from tools.real_clients.__main__ import CLIENTS
from tools.real_clients.client import Place
from tools.real_clients.comparison import ARMS, Comparison
from tools.real_clients.comparison import table as comparison_table
from tools.real_clients.day import Outcome
from tools.real_clients.llama_model import as_scripted
from tools.real_clients.script import OTHER, PROSE, Call, Reply, Script, answer, structured
from tools.real_clients.scripted_llama import ids_name
from tools.real_clients.scripted_serve import ScriptedSampler
from tools.real_clients.serverlog import Request, Share, missing, noted, read_requests, refused
from tools.real_clients.session import write
from tools.real_clients.table import listing, table
from tools.real_clients.work import PARTS, WORKS

LOOK = Reply("I look.", [Call("look", {"place": 'é "attic"'})], "Hm.")
SCRIPT = json.loads(Script({"day": [LOOK, Reply("Done.")], "who": [structured({"a": 1})]}).dumps())


def turns(*said: tuple[str, str]) -> str:
    """A prompt as the template writes it."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"


SYSTEM = ("system", 'Be kind.\n{"name": "look"}')
DAY, RESULT = ("user", "Look please. step:day"), ("user", "<tool_response>\nDust.\n</tool_response>")


@pytest.mark.parametrize(
    ("said", "step", "place", "num_replies"),
    [
        ([SYSTEM, DAY], "day", 0, 0),
        ([SYSTEM, DAY, ("assistant", "I look."), RESULT], "day", 1, 1),
        ([SYSTEM, DAY, ("assistant", "I look."), RESULT, ("user", "[image: not shown]")], "day", 1, 1),
        ([SYSTEM, DAY, ("assistant", "Done."), ("user", "Who? step:who")], "who", 0, 1),
        ([SYSTEM, DAY, ("assistant", "I look."), RESULT, ("assistant", "Done."), RESULT], "", 0, 2),
        ([SYSTEM, DAY, ("assistant", "I look."), RESULT, ("user", "Summarise all that.")], "", 0, 1),
        ([("system", "Write a title."), DAY], "", 0, 0),
        ([("system", "You write one-line Git commit messages."), ("user", "Who? step:who")], "", 0, 0),
        ([SYSTEM, ("user", "step:nothing")], "", 0, 0),
        ([SYSTEM, ("user", "Hello!")], "", 0, 0),
    ],
)
def test_a_prompt_gets_the_reply_of_its_step(
    said: list[tuple[str, str]], step: str, place: int, num_replies: int
) -> None:
    found = answer(SCRIPT, turns(*said))
    assert (found.step, found.place, found.num_replies) == (step, place, num_replies)
    assert found.texts == (tuple(SCRIPT[step][place]["texts"]) if step else OTHER)


def test_a_call_that_the_prompt_has_begun_is_gone_on_with() -> None:
    text = 'I look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    script = {"look": [{"texts": [text, PROSE], "tools": []}]}
    prompt = turns(SYSTEM, ("user", "Look! step:look"))
    assert answer(script, prompt).texts == (text, PROSE)
    assert answer(script, f'{prompt}<tool_call>\n{{"name": "').texts == (text.partition('"name": "')[2], PROSE)
    assert answer(script, f"{prompt}<think>\n").texts == (text, PROSE)


def test_calls_are_written_in_the_form_of_the_template() -> None:
    reader = find_reply_format(encoder_for("hermes")).reader(True, parallel=True, new_id=lambda: "c1")
    text = LOOK.texts()[0].partition("</think>\n\n")[2]
    events = [*reader.push(text), *reader.finish()]
    assert [each.name for each in events if isinstance(each, CallStart)] == ["look"]
    arguments = "".join(each.text for each in events if isinstance(each, ArgumentsDelta))
    assert json.loads(arguments) == {"place": 'é "attic"'}


def test_what_a_constraint_forbids_is_not_said(tmp_path: Path) -> None:
    tokenizer, prompt = tiny_tokenizer(), turns(SYSTEM, ("user", "Who? step:who"))
    asked = tmp_path / "asked.jsonl"
    sampler = ScriptedSampler(SCRIPT, tokenizer, asked)
    state = SamplerState.create(SamplingParams(temperature=1.0), lambda: 1)

    def said(*, forbidden: str) -> str:
        reply: list[int] = []
        while not reply or reply[-1] != END_ID:
            logits = torch.randn(1, tokenizer.get_vocab_size())
            logits[0, tokenizer.encode(forbidden).ids[0]] = -math.inf
            ids = [np.array(each, dtype=np.uint32) for each in (tokenizer.encode(prompt).ids, reply)]
            (drawn,) = sampler(logits, [Draw(0, state, History(*ids))]).results()
            assert drawn is not None
            reply.append(drawn.token)
        return str(tokenizer.decode(reply[:-1]))

    assert said(forbidden="{") == PROSE
    assert said(forbidden=PROSE) == '{"a": 1}'
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    assert lines == [{"step": "who", "place": 0, "replies": 0, "prompt_tokens": len(tokenizer.encode(prompt).ids)}] * 2


def line(path: str = "/v1/messages", status: int = 200, **fields: object) -> str:
    return json.dumps({"event": "request", "path": path, "status": status, **fields})


def test_the_log_and_the_script_are_joined_by_the_number_of_prompt_tokens() -> None:
    asked = [
        {"step": "day", "place": at, "replies": at, "prompt_tokens": tokens} for at, tokens in ((0, 100), (1, 100))
    ]
    asked.append({"step": "", "place": 0, "replies": 0, "prompt_tokens": 40})
    log = [
        "the banner of the server",
        json.dumps({"event": "message", "message": "hello"}),
        line(prompt_tokens=40, reused_tokens=0, normalised={"tail": 3}),
        line(prompt_tokens=100, reused_tokens=10, left_out={"image": 1}, ignored=["colour"], normalised={"tail": 0}),
        line(prompt_tokens=100, reused_tokens=90),
        line("/v1/models", 404, error="no such model"),
    ]
    other, first, second, failed = read_requests("\n".join(log), "\n".join(map(json.dumps, asked)))
    assert [(each.step, each.place, each.num_replies) for each in (other, first, second)] == [
        ("", 0, 0),
        ("day", 0, 0),
        ("day", 1, 1),
    ]
    assert str(Share.of([first, second, failed])) == "50.0 %" and str(Share.of([failed])) == "–"
    assert noted([other, first]) == ["tail normalised", "image shown as text", "`colour` ignored"]
    assert refused([first, failed, failed]) == ["/v1/models: 404 no such model"]
    assert missing([first, second], {"day": 3}) == ["day/2"] and not failed.is_reply


def test_a_row_says_what_was_reused_and_what_broke() -> None:
    def request(reused: int, step: str = "day", place: int = 0, num_replies: int = 0) -> Request:
        return Request("/v1", 200, 1000, reused, step, place, num_replies, notes=("tail normalised",))

    requests = {
        "day": (
            request(0),
            request(980, place=1, num_replies=1),
            request(300, ""),
            request(1000, place=2, num_replies=2),
        ),
        "resume": (request(900, "more", 0, 3), request(1000, "more", 1, 4)),
        "new": (request(500, ""), request(950, "again")),
        "compaction": (request(910, "", 0, 5), request(800, "later", 0, 0)),
    }
    good, bad = Outcome("Ada", "1.0", (), requests), Outcome("Eve", "2.0", ("day: a | b\n" + "x" * 500,), {})
    rows = table([good, bad, Outcome("Bob", "", untested="no\npackage")]).splitlines()
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows[2:4]]
    assert cells[0] == [
        "| Ada 1.0", "works", "99.0 % (98 100), 20 again", "90.0 % of 1,000", "95.0 % of 1,000", "91.0 % of 1,000",
        "80.0 % of 1,000", "tail normalised |",
    ]  # fmt: skip
    assert cells[1][0] == "| Eve 2.0" and cells[1][1].startswith("day: a \\| b xxx") and len(cells[1][1]) < 350
    assert rows[4:] == ["", "Not tested:", "", "- Bob: no package"]
    assert listing("day", requests["day"]).count("\n") == 3


def test_a_session_is_compared_turn_by_turn(tmp_path: Path) -> None:
    first, second, third = list(range(100)), [*range(100), 7, 8, *range(200, 230)], [*range(90), *range(300, 340)]
    asked = [("alone", first, [7, 8]), ("", [1, 2], [3]), ("alone", second, [9]), ("both-were-killed", third, [9])]
    lines = []
    for number, (step, prompt, reply) in enumerate(asked):
        (tmp_path / ids_name(number)).write_text(json.dumps({"prompt": prompt, "reply": reply}))
        line = {"step": step, "place": number, "replies": 0, "prompt_tokens": len(prompt), "number": number}
        lines.append(json.dumps(line))
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))

    def turns(*computed: int) -> dict[int, dict[str, object]]:
        sizes = [len(prompt) for _, prompt, _ in asked]
        pairs = enumerate(zip(sizes, computed, strict=False))
        return {at: {"prompt": size, "computed": each, "first_token_s": 1.0 + at} for at, (size, each) in pairs}

    write(tmp_path / "rekindle.json", turns(100, 2, 30, 110))
    write(tmp_path / "requests.json", turns(100, 2, 32))
    found = Comparison.read("Ada", tmp_path)
    assert [(each.prompt, each.new, each.said) for each in found.asked] == [(100, 100, 0), (132, 30, 2), (130, 40, 1)]
    assert [found.computed("requests", each) for each in found.asked] == [100, 30, None]
    assert [row[2:6] for row in found.rows()] == [
        ("2", "232", "130", "130, 44.0 %, 2.0 s, at most 3"),
        ("1", "130", "40", "110, 15.4 %, 4.0 s, at most 4"),
        ("3", "362", "170", "240, 33.7 %, 3.0 s, at most 4"),
    ]
    assert [row[-2] for row in found.rows()] == ["–"] * 3 and "in 2 turns" in found.rows()[-1][-1]
    rows = comparison_table([found]).splitlines()
    assert rows[0].count("|") == rows[2].count("|") == 6 + len(ARMS)
    assert rows[-1].startswith("- Ada: both-were-killed/3 computed 110, 40 new")


def test_a_long_conversation_is_scripted_to_its_end() -> None:
    assert sum(part.num_requests for part in PARTS) >= 40
    for work in WORKS.values():
        steps = work.script(Place(Path("/nowhere"), Path("/nowhere"), 1)).steps
        assert {name: len(replies) for name, replies in steps.items()} == {
            each.step: each.num_requests for each in PARTS
        }
        assert all(bool(each.calls) == (each is not replies[-1]) for replies in steps.values() for each in replies)
        assert len({text for replies in steps.values() for each in replies for text in each.texts()}) >= 40
        for part, command in zip(PARTS, work.commands(), strict=True):
            prompt = as_scripted(
                f"<start_of_turn>user\n{command.arguments[-1]}<end_of_turn>\n<start_of_turn>assistant\n"
            )
            assert answer(json.loads(Script({part.step: [Reply("So.")]}).dumps()), prompt).texts == ("So.",)


def test_every_client_has_a_directory_of_its_own() -> None:
    assert len({client.slug for client in CLIENTS.values()}) == len(CLIENTS) >= 17
    assert all(slug.replace("-", "").isalnum() for slug in (client.slug for client in CLIENTS.values()))
