"""A GGUF file for a scripted day at llama-server: the weights of another, a template with tools, more context.

Owns the signs of turns: the template has those of the file's vocabulary, the script's prompts have ChatML's.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from benchmarks.coding_day.templates import behaviour
from tools.real_clients.script import END, TURN

BEHAVIOUR = "append"  # tools after the system text; nothing of the history is left out
SIGNS = {TURN: "<start_of_turn>", END: "<end_of_turn>"}  # Gemma's
CONTEXT = 49152  # system text and tools of a coding agent take up to 25,000


def as_scripted(prompt: str) -> str:
    """Return a rendered prompt with the signs of turns that the script reads."""
    for sign, other in SIGNS.items():
        prompt = prompt.replace(other, sign)
    return prompt


def write_gguf(source: Path, directory: Path) -> Path:
    """Write the file with the weights of `source` unless it is there; takes seconds."""
    path = directory / source.name
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        reader = GGUFReader(source)
        architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
        words = set(reader.fields[Keys.Tokenizer.LIST].contents())
        template = behaviour(BEHAVIOUR).template
        for sign, other in SIGNS.items():
            template = template.replace(sign, other) if other in words else template
        changed = {
            Keys.Tokenizer.CHAT_TEMPLATE: MetadataDetails(GGUFValueType.STRING, "{{ bos_token }}" + template.lstrip()),
            Keys.LLM.CONTEXT_LENGTH.format(arch=architecture): MetadataDetails(GGUFValueType.UINT32, CONTEXT),
        }
        partial = path.with_suffix(".partial")
        copy_with_new_metadata(reader, GGUFWriter(partial, architecture), changed, [])
        partial.replace(path)
    return path
