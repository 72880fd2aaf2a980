"""Chat templates that render the past otherwise than it was generated, each in one way that models' templates have.

A reply's first words stand for its thinking, so that any reply has some.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_HEAD = (
    "{%- set last = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_CUE = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"


def _each(body: str, cue: str = _CUE) -> str:
    return _HEAD + "{%- for m in messages -%}" + body + "{%- endfor -%}" + cue


_PLAIN = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
REWRITING = {
    "append only": _each(_PLAIN),
    "thoughts dropped": _each(
        "{%- if m.role == 'assistant' and loop.index0 < last.user -%}"
        "{{- '<|im_start|>assistant\n' + m.content[9:] + '<|im_end|>\n' -}}{%- else -%}" + _PLAIN + "{%- endif -%}"
    ),
    "tools moved": _each(
        "{%- if tools and loop.index0 == last.user -%}{{- '<|tool|>' + (tools | tojson) + '<|tool|>' -}}{%- endif -%}"
        + _PLAIN
    ),
    "system moved": _each(
        "{%- if m.role != 'system' -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{%- if loop.index0 == last.user and messages[0].role == 'system' -%}{{- messages[0].content + '\n' -}}"
        "{%- endif -%}{{- m.content + '<|im_end|>\n' -}}{%- endif -%}"
    ),
    "trimmed and dated": _each(
        "{%- if loop.first -%}{{- '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' -}}"
        "{%- endif -%}{{- '<|im_start|>' + m.role + '\n' + (m.content | trim) + '<|im_end|>\n' -}}"
    ),
    "cue opens thoughts": _each(
        _PLAIN, "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
    ),
    "user words quoted": _each(
        "{%- if m.role == 'user' and loop.index0 < last.user -%}{{- '<|im_start|>earlier\n' + m.content + '\n' -}}"
        "{%- else -%}" + _PLAIN + "{%- endif -%}"
    ),
}
# What begins with a d was thought; a reply that was not stays as it was generated.
SOME_THOUGHTS_DROPPED = _each(
    "{%- if m.role == 'assistant' and m.content[:1] == 'd' and loop.index0 < last.user -%}"
    "{{- '<|im_start|>assistant\n' + m.content[9:] + '<|im_end|>\n' -}}{%- else -%}" + _PLAIN + "{%- endif -%}"
)


def with_template(model: Path, template: str, directory: Path) -> Path:
    """A copy of a model directory with another chat template."""
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    return directory
