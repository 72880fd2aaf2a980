"""What a session is played on: six chat templates, each with the behaviour of a model family's templates on a growing
conversation, and one of them with four habits of clients.

Written for this measurement, to show a behaviour; they contain no model's own text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Calls = Literal["tagged", "listed", "bare", "channels"]
Habit = Literal["git-status", "image", "compaction"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One way of rendering, or of sending: its name, what it does to history, the template, what ends its prompts.

    `calls`: the form of the model's tool calls; with `compact` it writes their arguments without blanks, and its client
    reads them and writes them with blanks. `tail` is the text between the content of a tool result and the cue.
    `thinking`: whether the model emits its reasoning. `habit`: what else the client does.
    """

    name: str
    does: str
    template: str
    cues: tuple[str, ...]
    calls: Calls
    tail: str
    thinking: bool = True
    compact: bool = False
    habit: Habit | None = None

    @property
    def keeps_stored_text(self) -> bool:
        """Whether prompts have stored text in place of what is sent, so that they are others where nothing is reused:
        arguments as the model wrote them, the first state of the repository where it was, a summary's tools."""
        return self.compact or self.habit in ("git-status", "compaction")


_SYSTEM = r"""
{%- set chat = namespace(system='', rest=messages, last=-1) %}
{%- if messages[0].role == 'system' %}
{%- set chat.system = messages[0].content %}{% set chat.rest = messages[1:] %}
{%- endif %}
{%- for message in chat.rest %}{% if message.role == 'user' %}{% set chat.last = loop.index0 %}{% endif %}{% endfor %}
"""

_TAGGED_HEAD = (
    _SYSTEM
    + r"""
{%- macro called(message) %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
{{- '<|im_start|>system\n' + chat.system }}
{%- if tools %}
{{- '\n\n# Functions\nCall one by its name and arguments, as JSON between tool_call signs.\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in chat.rest %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role != 'assistant' %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>assistant\n' }}
"""
)
_TAGGED_TAIL = r"""
{{- message.content | trim }}{{ called(message) + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
"""
_REASONING = r"{{- '<think>\n' + message.reasoning_content | trim + '\n</think>\n\n' }}"

_APPENDING = f"""{_TAGGED_HEAD}
{{%- if message.reasoning_content %}}{_REASONING}{{% endif %}}
{_TAGGED_TAIL}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""

_STRIPPING = f"""{_TAGGED_HEAD}
{{%- if message.reasoning_content and loop.index0 > chat.last %}}{_REASONING}{{% endif %}}
{_TAGGED_TAIL}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""

_OPENING = f"""{_TAGGED_HEAD}
{_TAGGED_TAIL}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n<think>\\n' }}}}{{% endif %}}
"""

_MOVING_TOOLS = (
    _SYSTEM
    + r"""
{%- if chat.system %}{{ '[SYSTEM_PROMPT] ' + chat.system + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- for message in chat.rest %}
{%- if message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + '}[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}
{%- if message.content %}{{ ' ' + message.content | trim }}{% endif %}
{%- if message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- ']' }}
{%- endif %}
{{- '</s>' }}
{%- else %}
{%- if loop.previtem is defined and loop.previtem.role != 'assistant' %}
{{- raise_exception('a user speaks at the beginning or after a reply') }}
{%- endif %}
{%- if tools and loop.index0 == chat.last %}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- endif %}
{%- endfor %}
"""
)

_DATED = (
    _SYSTEM
    + r"""
{{- '<|start_header_id|>system<|end_header_id|>\n\nKnowledge ends: March 2026\nToday: ' + strftime_now('%d %b %Y') }}
{{- '\n\n<|eot_id|>' }}
{%- for message in chat.rest %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- if message.tool_calls %}
{%- set function = message.tool_calls[0].function %}
{{- '{"name": "' + function.name + '", "parameters": ' }}{{ function.arguments | tojson }}{{ '}' }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
{%- if loop.first %}
{{- (chat.system | trim) + '\n\n' }}
{%- if tools %}
{{- 'To call a function, answer with JSON that holds its name and parameters, and nothing else.\n\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=2)) + '\n\n' }}{% endfor %}
{%- endif %}
{%- endif %}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
)

_CHANNELS = (
    _SYSTEM
    + r"""
{%- set answered = namespace(last=-1) %}
{%- for message in chat.rest %}
{%- if message.role == 'assistant' and not message.tool_calls %}{% set answered.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- '<|start|>system<|message|>Knowledge: 2026-03\nDate: ' + strftime_now('%Y-%m-%d') }}
{{- '\n\n# Channels: analysis, commentary, final.<|end|>' }}
{{- '<|start|>developer<|message|># Instructions\n\n' + chat.system }}
{%- if tools %}
{{- '\n\n# Tools\n\nnamespace functions {\n' }}
{%- for tool in tools %}
{{- '// ' + (tool.function.description or '') + '\ntype ' + tool.function.name + ' = (_: ' }}
{{- (tool.function.parameters | tojson) + ') => any;\n' }}
{%- endfor %}
{{- '}' }}
{%- endif %}
{{- '<|end|>' }}
{%- for message in chat.rest %}
{%- if message.role == 'tool' %}
{{- '<|start|>functions.' + chat.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.thinking and loop.index0 > answered.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- set function = message.tool_calls[0].function %}
{%- set chat.called = function.name %}
{{- '<|start|>assistant to=functions.' + function.name + '<|channel|>commentary json<|message|>' }}
{{- (function.arguments | tojson) + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- else %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
)

_ASSISTANT = "<|im_start|>assistant\n"
_TAGGED_RESULT_END = "\n</tool_response><|im_end|>\n"
_APPEND = Behaviour(
    "append", "says everything again as it was", _APPENDING, (_ASSISTANT,), "tagged", _TAGGED_RESULT_END
)
TEMPLATES = (
    _APPEND,
    Behaviour(
        "strip-thinking",
        "drops the thinking of replies before the last user message",
        _STRIPPING,
        (_ASSISTANT,),
        "tagged",
        _TAGGED_RESULT_END,
    ),
    Behaviour(
        "move-tools",
        "shows the tools before the last user message only, takes no user after a tool result",
        _MOVING_TOOLS,
        ("[/INST]", "[/TOOL_RESULTS]"),
        "listed",
        '"}',
        thinking=False,
    ),
    Behaviour(
        "dated",
        "begins with the date, moves the system prompt into the first user message, trims contents",
        _DATED,
        ("<|start_header_id|>assistant<|end_header_id|>\n\n",),
        "bare",
        '"<|eot_id|>',
        thinking=False,
    ),
    Behaviour(
        "open-thinking",
        "opens the thinking in the cue and drops it from history",
        _OPENING,
        (f"{_ASSISTANT}<think>\n",),
        "tagged",
        _TAGGED_RESULT_END,
    ),
    Behaviour(
        "channels",
        "writes calls another way than they were made, drops thinking once answered",
        _CHANNELS,
        ("<|start|>assistant",),
        "channels",
        '"<|end|>',
    ),
)
CLIENTS = (
    replace(
        _APPEND,
        name="git-status",
        does="ends the system text with the state of the repository, which changes between conversations",
        habit="git-status",
    ),
    replace(_APPEND, name="image", does="sends pictures with results of tools", habit="image"),
    replace(_APPEND, name="reserialised-arguments", does="writes the arguments of calls anew as JSON", compact=True),
    replace(
        _APPEND,
        name="compaction",
        does="lets the model summarise the history, without tools, and goes on from the summary",
        habit="compaction",
    ),
)
BEHAVIOURS = (*TEMPLATES, *CLIENTS)


def behaviour(name: str) -> Behaviour:
    """Return the behaviour of this name; KeyError for others."""
    return {each.name: each for each in BEHAVIOURS}[name]
