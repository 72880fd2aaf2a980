"""What `rekindle analyze` says of logs whose waste is known, and that the server says the same."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.config import EngineSettings, PromptSettings, Settings, StoreSettings
from rekindle.engine.api import Engine
from rekindle.server.dayfile import DayWriter, Header, RecordedRequest
from rekindle.text.messages import Message, normalise_messages
from rekindle_lab.analyze.analysis import Analyser, Analysis, Sums
from rekindle_lab.analyze.conversations import Conversations
from rekindle_lab.analyze.logfile import Example, open_log
from rekindle_pocket import MODEL_DIR

WORDS = "river stone cloud table parse token cache prompt system reader writer branch memory lines house green".split()
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


DEFAULT, ALL = "attribution,tail,compaction", "attribution,dates,tools,tail,compaction"  # of `normalise`
SYSTEM = "\n".join(words(seed, 10) for seed in range(30))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": words(100 + number, 12),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for number in range(4)
]


def talk(turns: int, *, name: str = "", system: Sequence[str] = (SYSTEM,), seed: int = 0) -> list[dict[str, Any]]:
    """Bodies of one conversation, turn by turn; `system` by turn, the last one for the rest."""
    history: list[dict[str, Any]] = []
    bodies = []
    for turn in range(turns):
        history.append({"role": "user", "content": f"{name} asks {seed} {turn}: {words(seed + turn, 12)}"})
        said = system[min(turn, len(system) - 1)]
        bodies.append({"messages": [{"role": "system", "content": said}, *history]})
        history.append({"role": "assistant", "content": f"reply {turn}: {words(500 + seed + turn, 40)}"})
    return bodies


def write(path: Path, bodies: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def analysed(path: Path, bodies: Sequence[Any], *, model: Path = MODEL_DIR, **options: Any) -> Analysis:
    analysis = Analyser(open_log(write(path / "log.jsonl", bodies)), model, **options).run()
    parts = list(analysis.conversations.values())
    for sums in (analysis.total, *parts):
        assert sums.prompt_tokens == sums.reused_tokens + sums.recomputed_tokens + sums.new_tokens
        assert min(sums.own_tokens, sums.other_tokens, sums.new_tokens) >= 0
    assert sum(sums.prompt_tokens for sums in parts) == analysis.total.prompt_tokens
    assert sum(line.num_tokens for line in analysis.lines.values()) == analysis.total.recomputed_tokens
    return analysis


def shares(sums: Sums) -> tuple[float, float]:
    """Reused and recomputed."""
    return sums.reused_tokens / sums.prompt_tokens, sums.recomputed_tokens / sums.prompt_tokens


def arm(analysis: Analysis, normalise: str, anticipate: str) -> int:
    """What is left to compute."""
    found = [each for each in analysis.arms if (each.normalise, each.anticipate) == (normalise, anticipate)]
    return found[0].computed_tokens


def test_a_talk_that_only_grows_burns_nothing(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, talk(8))
    assert analysis.total.recomputed_tokens == 0 and analysis.lines == {}
    assert len(analysis.conversations) == 1
    reused, _ = shares(analysis.total)
    assert reused > 0.8 and analysis.total.other_tokens == 0
    assert len({each.computed_tokens for each in analysis.arms}) == 1


def test_an_attribution_line_burns_all_and_normalising_gives_it_back(tmp_path: Path) -> None:
    signed = [f"x-anthropic-billing-header: cc_version=1; cch={turn * 977:x};\n{SYSTEM}" for turn in range(8)]
    analysis = analysed(tmp_path, talk(8, system=signed))
    assert set(analysis.total.recomputed) == {"attribution_header"}
    assert shares(analysis.total)[1] > 0.75
    (line,) = analysis.worst_lines()
    assert (line.role, line.num_requests, line.place) == ("system", 7, "line 8")
    assert line.explanation.sent is not None and "cch=1ab7" in line.explanation.sent
    plain = analysed(tmp_path, talk(8))
    assert arm(analysis, DEFAULT, "off") == arm(plain, "off", "off")
    assert arm(analysis, "off", "off") > 5 * arm(plain, "off", "off")


def test_the_burned_line_is_told_by_what_stays_of_it(tmp_path: Path) -> None:
    dated = [f"{words(1, 20)}\nToday's date is 2026-11-{20 + turn // 4}.\n{SYSTEM}" for turn in range(12)]
    analysis = analysed(tmp_path, talk(12, system=dated))
    assert set(analysis.total.recomputed) == {"date_line"}
    (line,) = analysis.worst_lines()
    assert line.num_requests == 2 and line.explanation.message_index == 0
    assert line.explanation.sent is not None and "2026-11-22" in line.explanation.sent
    assert arm(analysis, ALL, "off") == arm(
        analysed(
            tmp_path,
            [
                {"messages": [{**body["messages"][0], "content": f"{words(1, 20)}\n{SYSTEM}"}, *body["messages"][1:]]}
                for body in talk(12)
            ],
        ),
        "off",
        "off",
    )
    assert arm(analysis, DEFAULT, "off") == arm(analysis, "off", "off")


def test_tools_in_another_order_are_burned_by_their_order(tmp_path: Path) -> None:
    bodies = [{**body, "tools": TOOLS if turn % 2 else TOOLS[::-1]} for turn, body in enumerate(talk(6))]
    analysis = analysed(tmp_path, bodies)
    assert set(analysis.total.recomputed) == {"tool_order"}
    # Both orders are remembered: the second time each comes, only what was said since is computed again.
    assert analysis.total.recomputed_tokens > 300, "all tools, their lines joined otherwise included"
    assert arm(analysis, ALL, "off") < arm(analysis, "off", "off")
    assert analysed(tmp_path, [{**body, "tools": TOOLS} for body in talk(6)]).total.recomputed_tokens == 0


def rewriting(path: Path) -> Path:
    """The bundled tokenizer with a template that drops thinking from history."""
    model = path / "rewriting"
    shutil.copytree(MODEL_DIR, model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text(DROPS_THINKING)
    return model


def test_what_the_template_rewrites_is_given_back_by_anticipation(tmp_path: Path) -> None:
    entries = []
    for body in talk(6):
        thought = f"<think>\n{words(len(body['messages']), 30)}\n</think>\n\n"
        bodies = [{**m, "content": thought + m["content"]} if m["role"] == "assistant" else m for m in body["messages"]]
        entries.append({"body": {"messages": bodies}})
    analysis = analysed(tmp_path, entries, model=rewriting(tmp_path))
    assert analysis.growth is not None and analysis.growth.thinking != "nothing"
    assert arm(analysis, "off", "on") < arm(analysis, "off", "off")
    assert arm(analysis, DEFAULT, "on") == arm(analysis, "off", "on")


def test_others_earlier_prompts_are_reused_too_and_said_so(tmp_path: Path) -> None:
    bodies = [body for number in range(5) for body in talk(2, seed=100 * number, name=f"agent {number}")]
    analysis = analysed(tmp_path, bodies)
    assert len(analysis.conversations) == 5
    first, *others = analysis.conversations.values()
    assert first.other_tokens == 0
    assert all(sums.other_tokens > 250 for sums in others)
    assert analysis.total.recomputed_tokens == 0


def test_what_others_say_otherwise_is_new_not_burned(tmp_path: Path) -> None:
    """Two agents are different by design, though most lines of their prompts are the same."""
    roles = ("reader", "writer of stories")
    heads = {role: f"{words(900, 20)}\nYou are the {role}.\n{SYSTEM}" for role in roles}
    analysis = analysed(tmp_path, [talk(1, name=role, system=[head])[0] for role, head in heads.items()])
    assert analysis.total.other_tokens > 10
    assert analysis.total.recomputed_tokens == 0


def test_a_date_in_front_burns_what_conversations_share(tmp_path: Path) -> None:
    bodies = [
        {
            "messages": [
                {"role": "system", "content": f"Now: 12:{at:02}:07\n{SYSTEM}"},
                {"role": "user", "content": f"Do {at}."},
            ]
        }
        for at in range(10)
    ]
    analysis = analysed(tmp_path, bodies)
    assert set(analysis.total.recomputed) == {"date_line"} and shares(analysis.total)[1] > 0.8
    assert len(analysis.lines) == 1
    assert arm(analysis, ALL, "off") < arm(analysis, "off", "off") / 4


def test_edited_history_is_burned_behind_the_edit_only(tmp_path: Path) -> None:
    bodies = talk(6)
    edited = json.loads(json.dumps(bodies[-1]))
    edited["messages"][1]["content"] = "Something else was asked here, said the client."
    analysis = analysed(tmp_path, [*bodies, edited])
    assert set(analysis.total.recomputed) == {"text_differs"}
    whole = analysed(tmp_path, [edited]).total.prompt_tokens
    system = analysed(tmp_path, [{"messages": edited["messages"][:2]}]).total.prompt_tokens
    assert whole - system - 80 < analysis.total.recomputed_tokens <= whole - system


def test_a_window_that_drops_the_oldest_messages_burns_the_rest(tmp_path: Path) -> None:
    windows = [{"messages": [body["messages"][0], *body["messages"][1:][-7:]]} for body in talk(10)]
    analysis = analysed(tmp_path, windows)
    assert len(analysis.conversations) == 1
    assert set(analysis.total.recomputed) == {"text_differs"}
    # From the fifth turn on the six messages that stay are computed again.
    assert analysis.total.recomputed_tokens > 5 * 6 * 30


def test_requests_that_cannot_be_rendered_are_counted_by_reason(tmp_path: Path) -> None:
    odd = {"messages": [{"role": "nobody", "content": "?"}]}
    analysis = analysed(tmp_path, [*talk(2), odd, odd])
    ((reason, example),) = analysis.refused.items()
    assert example == Example(2, "line 3") and "nobody" in reason
    assert analysis.total.num_requests == 2


def test_what_the_log_says_was_cached_is_added_up(tmp_path: Path) -> None:
    openai = {"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}}
    claude = {"usage": {"input_tokens": 10, "cache_read_input_tokens": 80, "cache_creation_input_tokens": 10}}
    responses = {"body": {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 5}}}}
    begun = {"type": "message_start", "message": claude}
    stream = (
        f"event: message_start\ndata: {json.dumps(begun)}\n\ndata: "
        '{"usage": {"output_tokens": 3}}\n\ndata: [DONE]\n\n'
    )
    answers = (openai, claude, responses, {"status_code": 200, "body_raw": stream}, {"usage": {}})
    analysis = analysed(
        tmp_path, [{"body": body, "response": said} for body, said in zip(talk(5), answers, strict=True)]
    )
    assert (analysis.total.reported_prompt_tokens, analysis.total.reported_cached_tokens) == (400, 225)


def test_memory_is_bounded_and_what_that_costs_is_said(tmp_path: Path) -> None:
    bodies = [{"messages": [{"role": "user", "content": words(seed, 400)}]} for seed in range(40)]
    roomy = analysed(tmp_path, [*bodies, bodies[0]])
    tight = analysed(tmp_path, [*bodies, bodies[0]], max_bytes=20_000)
    assert roomy.num_forgotten == 0 and tight.num_forgotten > 20
    assert tight.total.reused_tokens < roomy.total.reused_tokens
    assert tight.total.prompt_tokens == roomy.total.prompt_tokens


def said(*texts: str) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return normalise_messages([{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)])


def test_turns_of_one_conversation_are_found_by_what_was_said() -> None:
    known = Conversations()
    first = known.place(0, said("Hello."), None)
    assert first.reply is None
    second = known.place(1, said("Hello.", "Hi.", "And?"), None)
    assert second.conversation == first.conversation
    assert second.reply is not None and (second.reply.serial, second.reply.message.content) == (0, "Hi.")
    edited = known.place(2, said("Hello.", "Hi.", "And now?"), None)
    assert edited.conversation == first.conversation
    other = known.place(3, said("Hello.", "Good day.", "And?"), None)
    assert other.reply is not None and other.reply.message.content == "Good day."
    assert known.place(4, said("What?"), None).conversation != first.conversation
    assert known.place(5, said("Hello.", "Hi.", "And?", "So.", "Yes."), "named").conversation == "named"
    long = "A reply that nobody else was ever given, " * 3
    told = known.place(7, said("Tell.", long), None)
    assert known.place(8, said("Other words.", long, "And?"), None).conversation == told.conversation
    assert known.place(9, said("Others.", long, "And?"), None).earlier == 8
    assert known.place(6, (Message("system", "Only rules."),), None).reply is None
    begun = known.place(10, said("Good morning.", "Good morning to you.", "And?"), None)
    assert known.place(11, said("Good morning."), None).conversation != begun.conversation, "many begin like this"


def test_the_server_says_the_same(tmp_path: Path) -> None:
    """Prompt and reused tokens of a talk on the real engine, and of its log."""
    day, reports = tmp_path / "day.jsonl", []
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    settings = Settings(
        prompt=PromptSettings(normalise="off", anticipate="off"),
        store=StoreSettings(enabled=False),
        engine=EngineSettings(max_context=4096),
    )
    with Engine(settings) as engine, DayWriter(day, Header(0.0)) as writer:
        for turn in range(4):
            history.append({"role": "user", "content": f"Tell me about {words(turn, 5)}."})
            result = engine.chat("me", history, temperature=0.0, max_tokens=12)
            answer = {"role": "assistant", "content": result.text}
            writer.request(RecordedRequest(float(turn), {"messages": list(history)}, answer, agent="me"))
            history.append(answer)
            reports.append(result.report)
    analysis = Analyser(open_log(day), MODEL_DIR).run()
    assert analysis.total.prompt_tokens == sum(report.prompt_tokens for report in reports)
    reused = sum(report.reused_tokens for report in reports)
    assert abs(analysis.total.reused_tokens - reused) <= 2 * len(reports)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["analyze", *arguments])


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    signed = [f"x-anthropic-billing-header: cc_version=1; cch={turn * 977:x};\n{SYSTEM}" for turn in range(4)]
    path = write(tmp_path / "log.jsonl", [*talk(4, system=signed), "no request"])
    result = run(str(path), "--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"), "--rows", "1")
    assert result.exit_code == 0, result.output
    for part in (
        "4 requests in 1 conversations",
        "1 entries passed over",
        "recomputed: attribution line",
        "cch=b73",
        "given back",
    ):
        assert part in result.output
    report = json.loads((tmp_path / "out.json").read_text())
    total = report["total"]
    parts = total["reused_own_tokens"] + total["reused_others_tokens"] + total["new_tokens"]
    assert parts + sum(total["recomputed_tokens"].values()) == total["prompt_tokens"]
    assert report["lines"][0]["cause"] == "attribution_header" and len(report["arms"]) == 6
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_caller_has_to_change_ends_with_2(tmp_path: Path) -> None:
    nothing = run(str(write(tmp_path / "log.jsonl", [{"level": "info"}])))
    assert nothing.exit_code == 2 and "holds no request" in nothing.output
    model = run(str(write(tmp_path / "log.jsonl", talk(1))), "--model", str(tmp_path / "none"))
    assert model.exit_code == 2 and "no such directory" in model.output
    refused = run(str(write(tmp_path / "log.jsonl", [{"messages": [{"role": "nobody", "content": "?"}]}])))
    assert refused.exit_code == 1 and "1 requests not counted" in refused.output


def test_neither_weights_nor_torch_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", talk(2))
    code = (
        "import sys\nfrom pathlib import Path\nfrom rich.console import Console\n"
        "from rekindle_lab.analyze.run import AnalyzeOptions, run_analyze\n"
        "assert run_analyze(Path(sys.argv[1]), AnalyzeOptions(), Console()) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
