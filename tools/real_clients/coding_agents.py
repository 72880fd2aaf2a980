"""Coding agents of npm: how each is installed and called, and the calls of its tools that the model makes.

Their day: one prompt that reads, changes and looks at files, two at once at the end. Then a file appears in `git
status` and the conversation is resumed; a new one is begun in the same project; a history is compacted where the
client can be made to.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from tools.real_clients.client import NEW, NOTES, OLD, PARTS, PICTURE, Client, Command, Place, write
from tools.real_clients.install import Packages
from tools.real_clients.script import Call, Reply, Script

DAY = f"Read {NOTES}, move the copper key to the cellar, look at {PICTURE}, and read both parts. step:day"
LATER = "And what do they say after that? step:later"
MORE = "What do the notes say now? step:more"
AGAIN = "Read the notes. step:again"
LONG = "long.txt"
NODE = "node@24"
DONE, STILL, ONCE = "The notes are changed.", "They name the cellar.", "Two keys are noted."
THOUGHT = "The user wants something about files, so I use a tool and look at what it says before I answer."


def day_of(read: Sequence[Call], edit: Call, picture: Call | None, both: Sequence[Call], more: Call) -> Script:
    """Return the script of a day from a client's calls."""
    day = [Reply("Let me read the notes first.", read, THOUGHT), Reply("Now I change them.", [edit], THOUGHT)]
    if picture is not None:
        day.append(Reply("Next the picture.", [picture], THOUGHT))
    day += [Reply("Both parts at once.", both, THOUGHT), Reply(DONE, reasoning=THOUGHT)]
    again = [Reply("I look again.", [more], THOUGHT), Reply(STILL, reasoning=THOUGHT)]
    other = [Reply("I read them.", read, THOUGHT), Reply(ONCE, reasoning=THOUGHT)]
    return Script({"day": day, "more": again, "later": again, "again": other})


def shell_edit(tool: str, argument: str) -> Call:
    """Return a call that changes the notes by a shell command."""
    return Call(tool, {argument: f"sed -i 's/.*copper.*/{NEW}/' {NOTES}"})


def commands(first: Sequence[str], resumed: Sequence[str], *compaction: Command) -> Sequence[Command]:
    """Return the day of a client that takes its prompt as the last argument."""
    return [
        Command("day", [*first, DAY], ["day"], output=DONE),
        Command("resume", [*resumed, MORE], ["more"], output=STILL),
        *compaction,
        Command("new", [*first, AGAIN], ["again"], output=ONCE),
    ]


def compacted(resumed: Sequence[str], order: str) -> Sequence[Command]:
    """Return the calls of a client that compacts on an order, and of the prompt after it."""
    return [
        Command("compaction", [*resumed, order]),
        Command("compaction", [*resumed, LATER], ["later"], output=STILL),
    ]


def _claude_script(place: Place) -> Script:
    notes, both = place.file(NOTES), [Call("Read", {"file_path": place.file(part)}) for part in PARTS]
    edit = Call("Edit", {"file_path": notes, "old_string": OLD, "new_string": NEW})
    picture = Call("Read", {"file_path": place.file(PICTURE)})
    more = Call("Bash", {"command": f"cat {NOTES}", "description": "Show the notes"})
    return day_of([Call("Read", {"file_path": notes})], edit, picture, both, more)


def _claude_commands(place: Place) -> Sequence[Command]:
    claude = ["claude", "--allowedTools", "Read,Edit,Bash", "-p"]
    resumed = [*claude, "--continue"]
    return commands(claude, resumed, *compacted(resumed, "/compact"))


def _claude_variables(place: Place) -> Mapping[str, str]:
    return {"ANTHROPIC_BASE_URL": place.url, "ANTHROPIC_AUTH_TOKEN": "none"}


def _codex_script(place: Place) -> Script:
    def run(command: str) -> Call:
        return Call("exec_command", {"cmd": command})

    picture = Call("view_image", {"path": place.file(PICTURE)})
    both = [run(f"cat {part}") for part in PARTS]
    return day_of([run(f"cat {NOTES}")], shell_edit("exec_command", "cmd"), picture, both, run(f"cat {NOTES}"))


def _codex_commands(place: Place) -> Sequence[Command]:
    codex = ["codex", "exec", "--dangerously-bypass-approvals-and-sandbox"]
    full = ["-c", "model_auto_compact_token_limit=11000"]
    compacting = Command("compaction", [*codex, *full, "resume", "--last", LATER], ["later"], output=STILL)
    return commands(codex, [*codex, "resume", "--last"], compacting)


def _codex_configure(place: Place) -> None:
    provider = f'{{ name = "Rekindle", base_url = "{place.url}/v1", wire_api = "responses" }}'
    lines = ['model = "default"', 'model_provider = "rekindle"', f"model_providers.rekindle = {provider}"]
    write(place.home / ".codex" / "config.toml", "\n".join([*lines, "model_context_window = 65536", ""]))


def _opencode_script(place: Place) -> Script:
    notes, both = place.file(NOTES), [Call("read", {"filePath": place.file(part)}) for part in PARTS]
    edit = Call("edit", {"filePath": notes, "oldString": OLD, "newString": NEW})
    picture = Call("read", {"filePath": place.file(PICTURE)})
    more = Call("bash", {"command": f"cat {NOTES}", "description": "Show the notes"})
    return day_of([Call("read", {"filePath": notes})], edit, picture, both, more)


def _opencode_commands(place: Place) -> Sequence[Command]:
    opencode = ["opencode", "run"]
    full = {"OPENCODE_CONFIG_CONTENT": _opencode_config(place, context=13000)}
    compacting = Command("compaction", [*opencode, "--continue", LATER], variables=full)
    return commands(opencode, [*opencode, "--continue"], compacting)


def _opencode_config(place: Place, *, context: int) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1"},
        "models": {"default": {"limit": {"context": context, "output": 4096}}},
    }
    return json.dumps({"model": "rekindle/default", "provider": {"rekindle": provider}})


def _opencode_configure(place: Place) -> None:
    write(place.home / ".config" / "opencode" / "opencode.json", _opencode_config(place, context=65536))


def _qwen_script(place: Place) -> Script:
    notes, both = place.file(NOTES), [Call("read_file", {"file_path": place.file(part)}) for part in PARTS]
    edit = Call("edit", {"file_path": notes, "old_string": OLD, "new_string": NEW})
    picture = Call("read_file", {"file_path": place.file(PICTURE)})
    more = Call("run_shell_command", {"command": f"cat {NOTES}", "is_background": False})
    return day_of([Call("read_file", {"file_path": notes})], edit, picture, both, more)


def _qwen_commands(place: Place) -> Sequence[Command]:
    qwen = ["qwen", "--auth-type", "openai", "--model", "default", "--yolo"]
    resumed = [*qwen, "--continue"]
    return commands(qwen, resumed, *compacted(resumed, "/compress"))


def _openai_variables(place: Place) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "none"}


def _cline_script(place: Place) -> Script:
    def read(name: str) -> Call:
        return Call("read_files", {"files": [{"path": place.file(name)}]})

    edit = Call("editor", {"path": place.file(NOTES), "old_text": OLD, "new_text": NEW})
    more = Call("run_commands", {"commands": [f"cat {NOTES}"]})
    day = day_of([read(NOTES)], edit, read(PICTURE), [read(part) for part in PARTS], more)
    long = [Reply("I read the long one.", [read(str(place.home / LONG))], THOUGHT)] * 4
    return Script({**day.steps, "long": long})


def _cline_commands(place: Place) -> Sequence[Command]:
    # It resumes a conversation in a terminal only, so one is compacted that grows in a single prompt.
    compacting = Command("compaction", ["cline", f"Read {LONG}, again and again. step:long"])
    return [each for each in commands(["cline"], (), compacting) if each.phase != "resume"]


def _cline_configure(place: Place) -> None:
    write(place.home / LONG, "".join(f"Line {at} of the long file.\n" for at in range(250)))
    call = [str(place.bin / "cline"), "auth", "-p", "openai", "-k", "none", "-m", "default", "-b", f"{place.url}/v1"]
    subprocess.run(call, env={**os.environ, "HOME": str(place.home)}, check=True, capture_output=True)
    settings = place.home / ".cline" / "data" / "settings" / "providers.json"
    described = json.loads(settings.read_text("utf-8"))
    for provider in described["providers"].values():
        provider["settings"]["contextWindow"] = 14000
    write(settings, json.dumps(described))


def _continue_script(place: Place) -> Script:
    notes, both = place.file(NOTES), [Call("Read", {"filepath": place.file(part)}) for part in PARTS]
    edit = Call("Edit", {"file_path": notes, "old_string": OLD, "new_string": NEW})
    more = Call("Bash", {"command": f"cat {NOTES}"})
    return day_of([Call("Read", {"filepath": notes})], edit, None, both, more)


def _continue_commands(place: Place) -> Sequence[Command]:
    return commands(["cn", "--auto", "-p"], ["cn", "--auto", "--resume", "-p"])


def _continue_configure(place: Place) -> None:
    model = f"name: default, provider: openai, model: default, apiBase: {place.url}/v1, apiKey: none, roles: [chat]"
    lines = ["name: local", "version: 1.0.0", "schema: v1", "models:", f"  - {{{model}}}", ""]
    write(place.home / ".continue" / "config.yaml", "\n".join(lines))


def _aider_script(place: Place) -> Script:
    edited = f"{DONE}\n\n{NOTES}\n```\n{NEW}\nThe silver one is lost.\n```"
    return Script({"day": [Reply(edited)], "more": [Reply(STILL)], "again": [Reply(ONCE)]})


def _aider_commands(place: Place) -> Sequence[Command]:
    aider = ["aider", "--model", "openai/default", "--yes-always", "--file", NOTES]
    return commands([*aider, "--message"], [*aider, "--restore-chat-history", "--message"])


def _aider_variables(place: Place) -> Mapping[str, str]:
    return {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": "none"}


def _npm(name: str) -> Packages:
    """Return the newest of a client, with a Node that it runs on: for an older one npm would choose an older client."""
    return Packages("npm", (f"{name}@latest", NODE))


CODING_AGENTS = (
    Client("Claude Code", _npm("@anthropic-ai/claude-code"), _claude_script, _claude_commands, _claude_variables),
    Client("Codex CLI", _npm("@openai/codex"), _codex_script, _codex_commands, configure=_codex_configure),
    Client("opencode", _npm("opencode-ai"), _opencode_script, _opencode_commands, configure=_opencode_configure),
    Client("Qwen Code", _npm("@qwen-code/qwen-code"), _qwen_script, _qwen_commands, _openai_variables),
    Client("Cline CLI", _npm("cline"), _cline_script, _cline_commands, configure=_cline_configure),
    Client(
        "Continue CLI", _npm("@continuedev/cli"), _continue_script, _continue_commands, configure=_continue_configure
    ),
    Client("aider", Packages("pypi", ("aider-chat",)), _aider_script, _aider_commands, _aider_variables),
)
