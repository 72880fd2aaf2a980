"""Templates of the kinds that models with tools and thoughts have, each written for these tests, and their tokens.

Every template writes calls and thoughts as its family does and shows no more of a real one than that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import ParsedReply, ReplyFormat, ReplyStream
from rekindle.text.stream import TextStream
from rekindle.text.template import ChatTemplate
from rekindle.text.tokenizer import TokenizerFile
from tests.text.factories import tokenizer_json

IM_CUE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}" + IM_CUE
)
OPENED = HERMES.replace(IM_CUE, IM_CUE.replace("assistant\n{%", "assistant\n<think>\n{%"))
EMPTY = HERMES.replace(IM_CUE, IM_CUE.replace("assistant\n{%", "assistant\n<think>\n\n</think>\n\n{%"))
CODER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' }}<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + IM_CUE
)
_TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}OPEN"
    "{% for c in m.tool_calls %}CALL{% endfor %}CLOSE{% endif %}<|im_end|>\n{% endfor %}" + IM_CUE
)
_ARGUMENTS = "{% for key, value in c.function.arguments.items() %}ARGUMENT{% endfor %}"
_VALUE = "{{ value if value is string else value | tojson }}"


def tagged(opening: str, call: str, argument: str, closing: str) -> str:
    """A template with calls in tags; `ARGUMENTS` in `call` are those of a call."""
    call = call.replace("NAME", "{{ c.function.name }}").replace("ARGUMENTS", _ARGUMENTS)
    parts = {"OPEN": opening, "CALL": call.replace("ARGUMENT", argument.replace("VALUE", _VALUE)), "CLOSE": closing}
    template = _TAGGED
    for name, text in parts.items():
        template = template.replace(name, text, 1)
    return template


GLM = tagged(
    "",
    "{{ '\n' }}<tool_call>NAME\nARGUMENTS</tool_call>",
    "<arg_key>{{ key }}</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "",
)
GLM_DENSE = tagged(
    "", "<tool_call>NAMEARGUMENTS</tool_call>", "<arg_key>{{ key }}</arg_key><arg_value>VALUE</arg_value>", ""
)
INVOKED = tagged(
    "{{ '\n' }}<minimax:tool_call>\n",
    '<invoke name="NAME">\nARGUMENTS</invoke>\n',
    '<parameter name="{{ key }}">VALUE</parameter>\n',
    "</minimax:tool_call>",
)
DSML = tagged(
    "{{ '\n\n' }}<|DSML|function_calls>\n",
    '<|DSML|invoke name="NAME">\nARGUMENTS</|DSML|invoke>\n',
    "<|DSML|parameter name=\"{{ key }}\" string=\"{{ 'true' if value is string else 'false' }}\">VALUE"
    "</|DSML|parameter>\n",
    "</|DSML|function_calls>",
)
SEED = tagged(
    "",
    "{{ '\n' }}<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
    "<parameter={{ key }}>VALUE</parameter>\n",
    "",
)
PYTHONIC = tagged(
    "<|tool_call_start|>[",
    "{{ ', ' if not loop.first }}NAME(ARGUMENTS)",
    "{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}",
    "]<|tool_call_end|>",
)
_ESCAPED = r"""replace('\\', '\\\\') | replace("'", "\\'") | replace('\n', '\\n')"""
_REPR = "{% if value is string %}'{{ value | " + _ESCAPED + " }}'{% else %}{{ value }}{% endif %}"
PYTHON_LINES = tagged(
    "{{ '\n' }}<function_calls>\n",
    "NAME(ARGUMENTS)\n",
    "{{ ', ' if not loop.first }}{{ key }}=" + _REPR,
    "</function_calls>",
)
ACTIONS = tagged(
    "<|START_ACTION|>[\n",
    '{{ ",\n" if not loop.first }}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "NAME", "parameters": '
    "{{ c.function.arguments | tojson }}}",
    "",
    "\n]<|END_ACTION|>",
)
KIMI = tagged(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>",
    "",
    "<|tool_calls_section_end|>",
)
DISTILLED = tagged(
    "<|tool▁calls▁begin|>",
    "<|tool▁call▁begin|>function<|tool▁sep|>NAME\n```json\n{{ c.function.arguments | tojson }}\n```<|tool▁call▁end|>",
    "",
    "<|tool▁calls▁end|>",
)
NAME_THEN_FENCE = tagged(
    "", "{{ '\n' }}<tool_call>NAME\n```json\n{{ c.function.arguments | tojson }}\n```</tool_call>", "", ""
)
NAME_KEYS = tagged(
    "<|tools_prefix|>[",
    "{{ ', ' if not loop.first }}{\"NAME\": {{ c.function.arguments | tojson }}}",
    "",
    "]<|tools_suffix|>",
)
# Templates that render tools, and no calls.
_SILENT = (
    "{% for t in tools or [] %}{{ t | tojson }} TEXT{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + IM_CUE
)
TOOLS_ALONE = _SILENT.replace("TEXT", "")
TOOLS_AND_MARK = _SILENT.replace("TEXT", "Write <tool_call></tool_call>.")
FUNCTIONS = tagged("", "<function=NAME>{{ c.function.arguments | tojson }}</function>", "", "")
LLAMA = (
    "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{% if loop.first and tools %}{{ tools | tojson }} Use <|python_tag|> never.{% endif %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
_INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}"
    "{% for c in m.tool_calls if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endfor %}"
)
MISTRAL_LIST = (
    _INST + "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_ARGS = (
    _INST + "{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{# they think in [THINK][/THINK] #}{% if false %}[THINK][/THINK]{% endif %}"
)
MISTRAL_ID = MISTRAL_ARGS.replace("}[ARGS]", "}[CALL_ID]{{ c.id }}[ARGS]")
KEYED = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{ {%- for k in v | sort %}'
    "{{ ',' if not loop.first }}{{ k }}:{{ value(v[k]) }}{% endfor %}}{% elif v is sequence %}[{% for e in v %}"
    "{{ ',' if not loop.first }}{{ value(e) }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and m.tool_calls %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}"
    "{{ value(c.function.arguments) }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% if enable_thinking is false %}<|channel>thought\n<channel|>"
    "{% endif %}{% endif %}"
).replace("{ {%-", "{{ '{' }}{%-")
# Calls before text, and a cue that begins with the same sign as they do.
KEYED_FIRST = (
    KEYED.replace("{{ m.content }}{% for c", "{% for c")
    .replace("<turn|>\n{% endfor %}", "{{ m.content }}<turn|>\n{% endfor %}")
    .replace("is false", "is not true")
    .replace("m.reasoning_content and m.tool_calls", "false")
)
FENCED = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    '{{ "\n" }}```tool_code\n{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}\n```'
    "{% endfor %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and (m.tool_calls or loop.last) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('text or thoughts') }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% if m.content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
STRIPPED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    + IM_CUE
)

IM = ("<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>")


@dataclass(frozen=True)
class Family:
    """A template, its tokens flagged special, and its other added tokens."""

    template: str
    special: tuple[str, ...]
    unflagged: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The tokens that end a reply."""
        known = ("<|im_end|>", "<|eot|>", "</s>", "<turn|>", "<end_of_turn>", "<|call|>", "<|return|>")
        return tuple(token for token in self.special if token in known)


FAMILIES = {
    "hermes": Family(HERMES, IM, THINK),
    "opened": Family(OPENED, IM, THINK),
    "empty": Family(EMPTY, IM, THINK),
    "spelled": Family(HERMES, IM),
    "special": Family(HERMES, (*IM, *THINK)),
    "stripped": Family(STRIPPED, IM),
    "coder": Family(CODER, IM, ("<tool_call>", "</tool_call>")),
    "glm": Family(GLM, IM, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "glm_dense": Family(GLM_DENSE, (*IM, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
    "invoked": Family(INVOKED, IM, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "dsml": Family(DSML, (*IM, "|DSML|")),
    "seed": Family(SEED, (*IM, "<seed:tool_call>", "</seed:tool_call>")),
    "pythonic": Family(PYTHONIC, (*IM, "<|tool_call_start|>", "<|tool_call_end|>")),
    "python_lines": Family(PYTHON_LINES, IM, ("<function_calls>", "</function_calls>")),
    "actions": Family(ACTIONS, (*IM, "<|START_ACTION|>", "<|END_ACTION|>")),
    "functions": Family(FUNCTIONS, IM),
    "kimi": Family(
        KIMI,
        (
            *(*IM, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
    "distilled": Family(
        DISTILLED,
        (
            *(*IM, "<|tool▁calls▁begin|>", "<|tool▁calls▁end|>", "<|tool▁call▁begin|>", "<|tool▁sep|>"),
            "<|tool▁call▁end|>",
        ),
    ),
    "name_then_fence": Family(NAME_THEN_FENCE, IM, ("<tool_call>", "</tool_call>")),
    "name_keys": Family(
        NAME_KEYS, (*IM, "<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>")
    ),
    "silent_list": Family(TOOLS_ALONE, (*IM, "<|tool_call|>")),
    "silent_pythonic": Family(TOOLS_ALONE, (*IM, "<|tool_call_start|>", "<|tool_call_end|>")),
    "silent_hermes": Family(TOOLS_AND_MARK, IM),
    "llama": Family(LLAMA, ("<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<|python_tag|>")),
    "mistral_list": Family(MISTRAL_LIST, MISTRAL),
    "mistral_args": Family(MISTRAL_ARGS, (*MISTRAL, "[ARGS]", "[THINK]", "[/THINK]")),
    "mistral_id": Family(MISTRAL_ID, (*MISTRAL, "[ARGS]", "[CALL_ID]")),
    "keyed": Family(
        KEYED,
        ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "keyed_first": Family(
        KEYED_FIRST,
        ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "fenced": Family(FENCED, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "channels": Family(
        CHANNELS, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
    ),
}


SILENT = ("silent_list", "silent_pythonic", "silent_hermes")  # they render no calls


@cache
def encoder_for(name: str, kind: str = "cl100k") -> PromptEncoder:
    """The family's encoder, on a tokenizer of this kind (see factories)."""
    family = FAMILIES[name]
    return encoder_with(family.template, family.special, family.unflagged, kind)


def encoder_with(
    template: str, special: Sequence[str], unflagged: Sequence[str] = (), kind: str = "cl100k"
) -> PromptEncoder:
    """The encoder of a template whose tokens these are, flagged special or not."""
    data = json.loads(tokenizer_json(kind))
    data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["content"] == "<s>"]
    next_id = 1 + max([*data["model"]["vocab"].values(), *(entry["id"] for entry in data["added_tokens"])])
    for number, content in enumerate((*special, *unflagged)):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        entry = {"id": next_id + number, "content": content, "special": content in special, **flags}
        data["added_tokens"].append(entry)
    return PromptEncoder(TokenizerFile(json.dumps(data).encode()), {}, ChatTemplate({"default": template}, {}))


def read_reply(
    form: ReplyFormat,
    encoder: PromptEncoder,
    ids: Sequence[int] | np.ndarray,
    *,
    opening: str = "",
    tools: bool | Sequence[Any],
) -> ParsedReply:
    """Read a whole reply from its token ids."""
    stream = TextStream(encoder, visible=form.visible)
    reader = ReplyStream(form, tools=tools, opening=opening)
    reply = ParsedReply()
    for token_id in ids:
        for event in reader.push(stream.push(int(token_id))):
            reply.take(event)
    for event in (*reader.push(stream.finish()), *reader.finish()):
        reply.take(event)
    return reply
