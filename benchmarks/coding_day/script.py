"""What the scripted model of a coding-agent session may generate, in the format of each behaviour.

A reply reasons (if the model does), then writes a sentence and calls a tool, or answers. The end of a tool result
decides which of these comes next, as in a recording; the words and arguments, and after other messages the tool,
follow from the output of attention, so they depend on every token of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.coding_day.model_script import Script, State
from benchmarks.coding_day.templates import Behaviour

WAYS = 4  # alternative words at each place
REASONING_WORDS, SENTENCE_WORDS, ANSWER_WORDS = 21, 4, 8
CALLING = 14.0  # how much likelier a call is than an answer, before attention is added
_VERBS = """checks loads writes merges splits counts sorts trims drops keeps reads skips maps wraps sends parses guards
 hashes links moves opens closes builds joins marks yields chains probes scans seals tests locks frees pads rounds
 shifts copies folds lifts ranks swaps tags walks binds casts draws emits fills grows holds""".split()
_NOUNS = """parser buffer cursor ledger window header record bucket branch commit filter packet router socket worker
 tracer broker client column device driver engine fabric garden handle indexer journal kernel lattice matrix needle
 octet pivot queue ribbon signal ticket update vector widget yard zone anchor bridge canvas""".split()
_KINDS = """stale empty shared nested sorted hidden frozen narrow sparse broken lonely second former latest remote
 silent stable static strict sturdy subtle sudden tender tiny upper vacant vivid wanted warm weak whole wide wild young
 pale plain prime quick quiet rapid ready rigid rough round scarce sharp shiny""".split()
_READ = """src/cache/pool.py src/cache/radix.py src/engine/loop.py src/engine/core.py src/store/index.py docs/replay.md
 src/text/prompt.py tests/test_pool.py""".split()
_EDITED = "src/cache/eviction.py src/engine/saving.py src/store/ledger.py tests/test_ledger.py src/cli/why.py".split()
_SOUGHT = [
    "def evict",
    "class Ledger",
    "num_blocks",
    "raise StoreError",
    "FIRST_SLOT",
    "pin_count",
    "on_saved",
    "fsync",
]
_FOLDERS = ["src/store", "src/engine", "tests/", "src/"]
_COMMANDS = [
    "python -m pytest tests/test_ledger.py -q", "git status --short", "git diff --stat", "ruff check src",
    "python -m mypy src", "ls -la src/store", "git log --oneline -5", "make check",
]  # fmt: skip
_CODE = (
    ["    held = self._held", "    if not blocks:", "    for block in blocks:", "    with self._lock:"],
    ["\\n        return 0", "\\n        self.check()", "\\n        count += 1", "\\n        del table[key]"],
    ["\\n    return held", "\\n    raise Empty", "\\n    yield block", "\\n    self._used = now"],
)
_FIXED = (
    ["    kept = self._kept", "    if blocks is None:", "    for name in sorted(blocks):", "    with self._guard:"],
    ["\\n        continue", "\\n        self._note(name)", "\\n        total += size", "\\n        table.pop(name)"],
    ["\\n    return total", "\\n    raise StoreFull", "\\n    yield name", "\\n    self._last = self._clock()"],
)
TOOLS = ("Read", "Grep", "Bash", "Edit")
# The end of a tool result, by what the model does next.
RESULT_ENDS = {
    "answer": " [done in 0.9 s]", "Read": " [done in 0.1 s]", "Grep": " [done in 0.2 s]", "Bash": " [done in 0.3 s]",
    "Edit": " [done in 0.4 s]",
}  # fmt: skip
_SPECIAL = {
    "tagged": ("<|im_start|>", "<|im_end|>"),
    "listed": (
        "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>",
    ),
    "bare": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "channels": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
}  # fmt: skip
_ENDS = {
    "tagged": ("<|im_end|>",),
    "listed": ("</s>",),
    "bare": ("<|eot_id|>",),
    "channels": ("<|return|>", "<|call|>"),
}


def script_of(behaviour: Behaviour) -> Script:
    """Return what a model of this behaviour may generate."""
    build = {"tagged": _tagged, "listed": _listed, "bare": _bare, "channels": _channels}[behaviour.calls]
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>") if behaviour.calls == "tagged" else ()
    words = ("assistant", "analysis", "commentary", "final") if behaviour.calls == "channels" else ()
    results = {f"result {what}": State((piece,)) for what, piece in RESULT_ENDS.items()}
    ends = _ENDS[behaviour.calls]
    tail = behaviour.tail + behaviour.cues[-1]
    return Script(build(behaviour) | results, behaviour.cues, _SPECIAL[behaviour.calls], ends, marks, words, tail)


def _after_result(go_on: Mapping[str, str], answer: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return followers by the end of the last tool result: the state of each tool, and of an answer."""
    found: dict[str, tuple[str, ...]] = {f"result {tool}": (state,) for tool, state in go_on.items()}
    return found | ({"result answer": (answer,)} if answer else {})


def _tagged(behaviour: Behaviour) -> dict[str, State]:
    opened = behaviour.cues[0].endswith("<think>\n")
    first = "" if opened else "\n"
    states = _arguments(then="close") | _thinking(first, "\n", then="unthink")
    states |= _sentence("\n\n", ":\n", then="call") | _answer("\n\n", "", then="end")
    unthink = REASONING_WORDS + 2 + (not opened)
    says, call = _after_result({}, "answer 0"), _after_result({tool: f"name {tool}" for tool in TOOLS})
    states |= {
        "cue": State((), ("reasoning 0",) if opened else ("think",)),
        "unthink": State(("</think>",), ("sentence 0", "answer 0"), says, place=unthink),
        "call": State(("<tool_call>",), _all("name"), call, place=unthink + SENTENCE_WORDS + 3),
        "close": State(('"}}\n',), ("uncall",)),
        "uncall": State(("</tool_call>",), ("end",)),
        "end": State(("<|im_end|>",)),
        **_names('\n{{"name": "{tool}", "arguments": {{"{key}": "'),
    }
    if behaviour.compact:
        states = {name: _compact(state) for name, state in states.items()}
    return states if opened else states | {"think": State(("<think>",), ("reasoning 0",))}


def _compact(state: State) -> State:
    """Return a state whose pieces have no blanks in the arguments of calls."""
    pieces = []
    for piece in state.pieces:
        head, arguments, rest = piece.rpartition('"arguments": ')
        pieces.append(head + arguments + rest.replace('": "', '":"').replace('", "', '","'))
    return replace(state, pieces=tuple(pieces))


def _listed(behaviour: Behaviour) -> dict[str, State]:
    says, call = _after_result({}, "answer 0"), _after_result({tool: f"name {tool}" for tool in TOOLS})
    return {
        **_arguments(then="close"),
        **_sentence(" ", ":", then="call"),
        **_answer(" ", "", then="end"),
        **_names(' [{{"name": "{tool}", "arguments": {{"{key}": "'),
        "cue": State((), ("sentence 0", "answer 0"), says, place=-1),
        "call": State(("[TOOL_CALLS]",), _all("name"), call, place=SENTENCE_WORDS + 2),
        "close": State(('"}}]',), ("end",)),
        "end": State(("</s>",)),
    }


def _bare(behaviour: Behaviour) -> dict[str, State]:
    names = _names('{{"name": "{tool}", "parameters": {{"{key}": "')
    return {
        **_arguments(then="close"),
        **_answer("", "\n", then="end"),
        **{name: replace(state, lean=CALLING / 2) for name, state in names.items()},
        "cue": State(
            (), (*names, "answer 0"), _after_result({tool: f"name {tool}" for tool in TOOLS}, "answer 0"), place=-1
        ),
        "close": State(('"}}',), ("end",)),
        "end": State(("<|eot_id|>",)),
    }


def _channels(behaviour: Behaviour) -> dict[str, State]:
    to = {f"to {tool}": State((f" to=functions.{tool} json",), ("message",)) for tool in TOOLS}
    channel = ("analysis", "commentary", "final")
    says = _after_result(dict.fromkeys(TOOLS, "commentary"), "final")
    return {
        **_arguments(then="close"),
        **_thinking("", "", then="end"),
        **_answer("", "", then="return"),
        **_names('{{"{key}": "', spare=True),
        **to,
        "cue": State((), ("channel",)),
        "channel": State(("<|channel|>",), channel, says, place=REASONING_WORDS + 8),
        "analysis": State(("analysis",), ("message",), lean=CALLING / 2),
        "commentary": State(
            ("commentary",), tuple(to), _after_result({tool: f"to {tool}" for tool in TOOLS}), REASONING_WORDS + 9
        ),
        "final": State(("final",), ("message",)),
        "message": State(
            ("<|message|>",),
            after={
                "analysis": ("reasoning 0",),
                "final": ("answer 0",),
                **{f"to {tool}": (f"name {tool}",) for tool in TOOLS},
            },
        ),
        "end": State(("<|end|>",), ("start",)),
        "start": State(("<|start|>",), ("cue",)),
        "close": State(('"}',), ("called",)),
        "called": State(("<|call|>",)),
        "return": State(("<|return|>",)),
    }


def _all(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind} {tool}" for tool in TOOLS)


_FIRST_KEY = {"Read": "file_path", "Grep": "pattern", "Bash": "command", "Edit": "path"}


def _names(form: str, *, spare: bool = False) -> dict[str, State]:
    """Return how a call of each tool begins, up to its first argument; `spare`: the name is elsewhere."""
    first = {tool: form.format(tool=tool, key=_FIRST_KEY[tool]) for tool in TOOLS}
    assert spare or len(set(first.values())) == len(TOOLS)
    return {f"name {tool}": State((first[tool],), (f"{tool} 0",)) for tool in TOOLS}


def _arguments(*, then: str) -> dict[str, State]:
    """Return the arguments after the first key of each tool."""
    states = {
        "Read 0": State(tuple(_READ), (then,)),
        "Bash 0": State(tuple(_COMMANDS), (then,)),
        "Grep 0": State(tuple(_SOUGHT), ("Grep path",)),
        "Grep path": State(('", "folder": "',), ("Grep 1",)),
        "Grep 1": State(tuple(_FOLDERS), (then,)),
        "Edit 0": State(tuple(_EDITED), ("old",)),
        "old": State(('", "old_string": "',), ("old 0",)),
        "new": State(('", "new_string": "',), ("new 0",)),
    }
    states |= _chain("old", _CODE, then=("new",)) | _chain("new", _FIXED, then=(then,))
    return states


def _thinking(first: str, last: str, *, then: str) -> dict[str, State]:
    places = [[f"{first}{word}" for word in ("First", "Okay", "Hmm", "Wait")]]
    places += [[f" {word}" for word in place] for place in _places(0, REASONING_WORDS)]
    places += [[f" {word}.{last}" for word in ("indeed", "anyway", "somehow", "otherwise")]]
    return _chain("reasoning", places, then=(then,))


def _sentence(first: str, last: str, *, then: str) -> dict[str, State]:
    places = [
        [f"{first}{word}" for word in ("Let me see what", "I will look where", "Next I check how", "Now I see if")]
    ]
    places += [[f" {word}" for word in place] for place in _places(REASONING_WORDS, SENTENCE_WORDS)]
    places += [[f" {word}{last}" for word in ("here", "there", "further", "below")]]
    found = _chain("sentence", places, then=(then,))
    head = found["sentence 0"]
    return found | {"sentence 0": replace(head, lean=CALLING)}


def _answer(first: str, last: str, *, then: str) -> dict[str, State]:
    places = [[f"{first}{word}" for word in ("Done", "Fixed", "Finished", "Ready")]]
    places += [[f" {word}" for word in place] for place in _places(REASONING_WORDS + SENTENCE_WORDS, ANSWER_WORDS)]
    places += [[f" {word}.{last}" for word in ("today", "already", "throughout", "safely")]]
    return _chain("answer", places, then=(then,))


def _places(skip: int, count: int) -> list[list[str]]:
    """Return words for `count` places after the first `skip`: kind, noun and verb in turn, each word at one place."""
    found = []
    for place in range(skip, skip + count):
        words = (_KINDS, _NOUNS, _VERBS)[place % 3]
        at = place // 3 * WAYS
        assert at + WAYS <= len(words), "too few words"
        found.append(words[at : at + WAYS])
    return found


def _chain(name: str, places: Sequence[Sequence[str]], *, then: tuple[str, ...]) -> dict[str, State]:
    """Return states `name 0`, `name 1` and so on, each following the one before."""
    follow = [*((f"{name} {at + 1}",) for at in range(len(places) - 1)), then]
    return {
        f"{name} {at}": State(tuple(pieces), after)
        for at, (pieces, after) in enumerate(zip(places, follow, strict=True))
    }
