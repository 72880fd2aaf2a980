"""Chat templates, rendered the way transformers renders them.

Owns the environment that models' templates expect: `trim_blocks` and `lstrip_blocks`, loop controls, the `generation`
tag, `tojson` that keeps non-ASCII, `raise_exception`, `strftime_now` by a clock that is passed in; sandbox and bounds
are those of text/bounded. Knows no tokens: it takes guarded values and returns guarded text. Every error of a template
becomes BadRequest, because it depends on the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from rekindle.errors import BadRequest, ModelRefused, PromptTooLong
from rekindle.text.arguments import Arguments
from rekindle.text.bounded import FAILURES, MOST_SOURCE, MOST_WORK, MOST_WRITTEN, BoundedEnvironment, render
from rekindle.text.messages import GUARD
from rekindle.text.metered_filters import metered
from rekindle.text.metering import Exceeded

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
PROCESSORS_FILE = "chat_template.json"
_PROBE = "quicksilver"
_GENERATION_TAGS = {"generation"}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks replies for training; here its body is rendered and nothing else."""

    tags = _GENERATION_TAGS

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r}")
        super().__setitem__(name, value)


@dataclass(frozen=True, slots=True)
class _Source:
    """What a template's source says: its code, all that it may print, and what it reads without setting it."""

    code: CodeType
    literals: frozenset[str]
    variables: frozenset[str]


class ChatTemplate:
    """One or more named Jinja templates (`default`, `tool_use`) and the special tokens they may print.

    A directory without a template gives a ChatTemplate without sources: rendering it is refused, completions work.
    ModelRefused for more than `MOST_SOURCE` characters in all of them, or one that cannot be parsed.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], datetime] = datetime.now,
        most_work: int = MOST_WORK,
    ) -> None:
        self.sources = dict(sources)
        total = sum(map(len, self.sources.values()))
        if total > MOST_SOURCE:
            raise ModelRefused(f"the chat templates have {total:,} characters: at most {MOST_SOURCE:,} are read")
        self.special_tokens = dict(special_tokens)
        self._most_work = most_work
        self._known = {name: _read(source) for name, source in self.sources.items()}
        environment = _environment(clock)
        self._compiled = {name: environment.loaded(known.code) for name, known in self._known.items()}

    @classmethod
    def from_dir(cls, directory: Path, *, clock: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """Read `chat_template.jinja`, else `chat_template` of tokenizer_config.json, else that of chat_template.json,
        where older models that see have it; special tokens from tokenizer_config.json.

        Templates of other names are in that list, or files of these names in `additional_chat_templates`.
        """
        config = read_config(directory)
        sources: dict[str, str] = {}
        entry = config.get("chat_template")
        if isinstance(entry, str):
            sources["default"] = entry
        elif isinstance(entry, list):
            if not all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in entry):
                raise ModelRefused(f"{CONFIG_FILE}: each entry of chat_template needs a name and a template")
            sources = {str(item["name"]): str(item["template"]) for item in entry}
        sources |= {path.stem: path.read_text("utf-8") for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))}
        if not sources:
            sources = _of_processor(directory)
        path = directory / TEMPLATE_FILE
        if path.is_file():
            sources["default"] = path.read_text(encoding="utf-8")
        return cls(sources, special_token_names(config), clock=clock)

    @property
    def exists(self) -> bool:
        """False if the model has none: it continues texts, and takes no messages."""
        return bool(self.sources)

    @property
    def variables(self) -> frozenset[str]:
        """The names of all that the templates read without setting it: messages, switches of the caller, and so on."""
        return frozenset().union(*(known.variables for known in self._known.values()))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether they write content only as a list of parts, as those of models that see often do."""
        if not self.exists:
            return False
        shown = []
        for content in (_PROBE, _parts(_PROBE)):
            try:
                shown.append(_PROBE in self._rendered([{"role": "user", "content": content}], None, {}, MOST_WRITTEN))
            except BadRequest:
                shown.append(False)
        return shown == [False, True]

    def with_clock(self, clock: Callable[[], datetime]) -> ChatTemplate:
        """Return the same template with another clock."""
        return ChatTemplate(self.sources, self.special_tokens, clock=clock, most_work=self._most_work)

    def literals(self) -> frozenset[str]:
        """Every piece of text and every string constant the templates may print."""
        return frozenset().union(*(known.literals for known in self._known.values()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        most_chars: int = MOST_WRITTEN,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation. Raises BadRequest if the template refuses or fails on it.

        PromptTooLong if the text has more than `most_chars` characters, or takes more work than a template may do;
        both are known after that much work, however long the whole would be. Content is a text, or a list of parts.
        """
        if self.takes_parts:
            messages = [_in_parts(message) for message in messages]
        variables["add_generation_prompt"] = add_generation_prompt
        return self._rendered(messages, tools, variables, most_chars)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        most_chars: int,
    ) -> str:
        if not self.exists:
            raise BadRequest("this model has no chat template: use /v1/completions, or add chat_template.jinja")
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            known = ", ".join(sorted(self._compiled))
            raise BadRequest(f"this model has no template named default (only {known}): add chat_template.jinja")
        values = {
            **self.special_tokens,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": variables.get("documents"),
        }
        try:
            return render(self._compiled[name], values, most=most_chars, work=self._most_work)
        except Exceeded as error:
            message = f"prompt is too long: the model's chat template stops on this conversation: {error.message}"
            raise PromptTooLong(message, param="messages") from error
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses this conversation: {error.message or error}"
            raise BadRequest(message, param="messages") from error
        except FAILURES as error:
            message = f"the model's chat template fails on this conversation: {type(error).__name__}: {error}"
            raise BadRequest(message, param="messages") from error


@lru_cache(maxsize=16)
def _read(source: str) -> _Source:
    """Parse and compile a template, once in a process: it takes tens of milliseconds, and a start asks at several
    clocks."""
    environment = _environment(datetime.now)
    try:
        tree = environment.parse(source)
        code = environment.code(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelRefused(f"the chat template cannot be parsed, line {error.lineno}: {error.message}") from error
    literals = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
    literals |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
    return _Source(code, frozenset(literals), frozenset(jinja2.meta.find_undeclared_variables(tree)))


def _environment(clock: Callable[[], datetime]) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = metered("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _Namespace
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


def _of_processor(directory: Path) -> dict[str, str]:
    template = _object_in(directory / PROCESSORS_FILE).get("chat_template")
    return {"default": template} if isinstance(template, str) else {}


def read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json as a dict, empty when there is none."""
    return _object_in(directory / CONFIG_FILE)


def _object_in(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelRefused(f"{path.name} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def special_token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on with their text; entries are strings or objects with `content`."""
    named = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                named[name] = content
    return named


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content, if it is a text, is a part."""
    content = message.get("content")
    return {**message, "content": _parts(content)} if isinstance(content, str) else message


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes. Tool arguments by themselves are written as the model generated them."""
    if isinstance(value, Arguments) and not (ensure_ascii or indent or separators or sort_keys):
        return value.verbatim
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # An escaped guard would stay in the prompt: everything else is escaped.
        text = re.sub(rf"[^\x00-\x7f{GUARD}]", lambda found: json.dumps(found.group())[1:-1], text)
    return text
