"""`rekindle bench server` against a server that is not ours, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.errors import ConfigError, RequestFailed
from rekindle_lab.bench.replay.client import Answer, OpenAIServer, inter_token
from rekindle_lab.bench.replay.run import lines_of
from rekindle_lab.bench.server.bench import ServerBench, run_server_bench
from rekindle_lab.bench.server.streams import rate_of, total_rate
from rekindle_lab.bench.server.texts import ServerTexts
from tests.lab.bench.foreign import foreign_server, text

USAGE = {"prompt_tokens": 500, "prompt_tokens_details": {"cached_tokens": 400}, "completion_tokens": 6}


def fine(_: Any) -> Any:
    return text("one two three", usage=USAGE)


def test_every_measure_is_taken_and_says_what_it_stood_on(tmp_path: Path) -> None:
    out, plot = tmp_path / "out.jsonl", tmp_path / "plot.png"
    store = tmp_path / "store"
    store.mkdir()
    (store / "file").write_text("x")
    restarted = tmp_path / "restarted"
    with foreign_server(fine) as foreign:
        options = ServerBench(
            foreign.url, 300, 20, 2, restart_cmd=f"touch {restarted}", drop_cache=store, end_token=7,
            arm="theirs", out=out, plot=plot,
        )  # fmt: skip
        assert run_server_bench(options, Console(quiet=True)) == 0
        with_bans = [body for body in foreign.bodies if "logit_bias" in body]
        agents = [headers.get("x-agent-id") for headers in foreign.headers]
    lines = {line["measure"]: line for line in lines_of(out)}
    firsts = {"cold", "hot EXACT", "hot EXTEND", "DIVERGE at 25%", "DIVERGE at 50%", "DIVERGE at 75%", "warm EXACT"}
    assert firsts | {"warm EXTEND", "staggered arrivals", "agents, first round", "agents, later rounds"} <= set(lines)
    assert {f"batch of {count}, to its last token" for count in (1, 4, 8)} <= set(lines)
    assert len(lines["cold"]["values"]) == 2
    assert lines["hot EXTEND"]["detail"] == {"prompt_tokens": 500, "cached_tokens": 400}
    assert lines["warm EXACT"]["detail"]["page_cache"] == "forgotten for 1 files"
    assert restarted.exists()
    assert all(body["logit_bias"] == {"7": -100} for body in with_bans) and len(with_bans) == 2 * (1 + 4 + 8 + 4)
    assert agents.count("base-0") == 6
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_exact_extend_and_diverge_are_what_they_say() -> None:
    with foreign_server(fine) as foreign:
        run_server_bench(ServerBench(foreign.url, 300, 20, 1), Console(quiet=True))
        own = [body["messages"] for body, head in zip(foreign.bodies, foreign.headers, strict=True)
               if head.get("x-agent-id") == "base-0"]  # fmt: skip
    cold, exact, extend, *diverged = own
    assert exact == cold
    assert extend[:1] == cold and [message["role"] for message in extend] == ["user", "assistant", "user"]
    assert extend[1]["content"] == "one two three"
    words = cold[0]["content"].split()
    for share, (message,) in zip((0.25, 0.5, 0.75), diverged, strict=True):
        others = message["content"].split()
        same = [a == b for a, b in zip(words, others, strict=True)]
        kept = same.index(False)
        assert int(share * len(words)) <= kept < int(share * len(words)) + 5


def test_the_size_of_texts_is_measured_in_the_servers_tokens() -> None:
    with foreign_server(fine) as foreign:  # counts two tokens a word and four for the template
        texts = ServerTexts(OpenAIServer(foreign.url), seed=1)
        assert texts.tokens_per_word == pytest.approx(2.0)
        assert len(texts.text(300, "a").split()) == 145
        assert texts.text(300, "a") == ServerTexts(OpenAIServer(foreign.url), seed=1).text(300, "a")
        assert texts.text(300, "a") != texts.text(300, "b")


def test_a_failing_server_ends_the_bench() -> None:
    broken = {"status": 500, "error": "broken"}
    with foreign_server(lambda _: broken) as foreign, pytest.raises(RequestFailed, match="500"):
        run_server_bench(ServerBench(foreign.url, 300), Console(quiet=True))


def answer(*at: float, num_tokens: int | None = None) -> Answer:
    usage = None if num_tokens is None else {"completion_tokens": num_tokens}
    return Answer(token_s=at, total_s=at[-1] if at else 1.0, usage=usage)


def test_rates_count_what_was_decoded_side_by_side() -> None:
    # sent at 0 and 1: pieces at 1, 2, 3, 4 and at 2, 3, 4, 5; together from 2 to 4: two pieces each
    streams = [(0.0, answer(1.0, 2.0, 3.0, 4.0)), (1.0, answer(1.0, 2.0, 3.0, 4.0))]
    assert rate_of(streams) == [2.0]
    weighed = [(0.0, answer(1.0, 2.0, 3.0, 4.0, num_tokens=8)), (1.0, answer(1.0, 2.0, 3.0, 4.0))]
    assert rate_of(weighed) == [3.0]
    assert rate_of([(0.0, answer(1.0, 2.0)), (0.0, answer(3.0, 4.0))]) == []
    assert rate_of([(0.0, answer()), (0.0, answer(3.0, 4.0))]) == []
    assert total_rate(weighed) == (8 + 4) / 5.0


def test_gaps_lie_within_a_reply() -> None:
    assert inter_token([answer(1.0, 3.0, 4.0), answer(9.0)]) == [2.0, 1.0]


@pytest.mark.parametrize("given", [{"context": 100}, {"repeats": 0}, {"extension": 1}, {"drop_cache": Path("x")}])
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerBench("http://127.0.0.1:1", **given)
