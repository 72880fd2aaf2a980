"""Write docs/python.md, the reference of the Python interface, from signatures and docstrings.

python tools/python_reference.py
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import rekindle
from rekindle import cache, config, errors
from rekindle.engine import types
from rekindle.matching.explain import Explanation

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
HEAD = """# The Python interface

Made from the docstrings by `tools/python_reference.py`: change those. The code blocks run in a test. How to use the \
prefix cache on its own: [cache.md](cache.md).
"""
PARTS = {
    "Engines and agents": (rekindle.Engine, rekindle.Agent, rekindle.Generation),
    "What is asked and answered": (
        rekindle.SamplingParams,
        types.GenerationRequest,
        rekindle.ChatResult,
        rekindle.Delta,
        rekindle.Report,
        types.Timings,
        Explanation,
        types.Progress,
        types.AgentInfo,
        types.BranchInfo,
        types.PurgeReport,
        types.Health,
        types.EngineStats,
    ),
    "The prefix cache: `rekindle.cache`": (
        cache.CacheManager,
        cache.CacheConfig,
        cache.CacheEntry,
        cache.PrefixMatch,
        cache.CacheStats,
        cache.analyze_batch,
        cache.BatchAnalysis,
        cache.SharedPrefix,
        cache.RadixTrie,
        cache.BlockPool,
        cache.BlockTable,
        cache.BlockCopy,
        cache.Published,
        cache.root_hash,
        cache.block_hash,
        cache.tail_hash,
        cache.chain_hashes,
        cache.content_key,
        cache.id_bytes,
    ),
}


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, members in PARTS.items():
        parts += [f"## {title}\n", *(_described(member) for member in members)]
        if title.startswith("Engines"):
            parts += ["## Settings\n", _settings()]
    parts += ["## Errors\n", "All are in `rekindle` and `rekindle.errors`.\n", f"```text\n{_tree()}```\n", *_errors()]
    return "\n".join(parts)


def _described(member: Any) -> str:
    name = f"{member.__module__}.{member.__name__}" if member.__name__ not in rekindle.__all__ else member.__name__
    node = _node(member)
    if isinstance(node, ast.FunctionDef):
        return f"### `{member.__name__}`\n\n```text\n{_signature(node)}\n```\n\n{_prose(node)}\n"
    head = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    lines = [_signature(head, node.name)] if head is not None else []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            if isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "_parameter":
                each.value = each.value.args[0]  # its default; the rest of its row is for bodies
            lines.append(ast.unparse(each))
    shown = f"```text\n{chr(10).join(lines)}\n```\n\n" if lines else ""
    where = f"`{name.removesuffix('.' + node.name)}`\n\n" if name != node.name and "cache" not in name else ""
    return f"### `{node.name}`\n\n{where}{_prose(node)}\n\n{shown}" + "".join(_members(node))


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each, following in zip_longest(node.body, node.body[1:]):
        if isinstance(each, ast.Assign) and isinstance(following, ast.Expr):  # an alias and its docstring
            yield f"**`{ast.unparse(each)}`**\n\n{ast.literal_eval(following.value)}\n\n"
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith("_"):
            continue
        is_property = any(ast.unparse(mark) == "property" for mark in each.decorator_list)
        result = f" -> {ast.unparse(each.returns)}" if each.returns else ""
        signature = f"{each.name}{result}" if is_property else _signature(each)
        yield f"**`{signature}`**\n\n{_prose(each)}\n\n"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str | None = None) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self").removeprefix("cls, ")
    result = f" -> {ast.unparse(node.returns)}" if node.returns and name is None else ""
    mark = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{mark}{name or node.name}({arguments}){result}"


def _node(member: Any) -> ast.ClassDef | ast.FunctionDef:
    path = inspect.getsourcefile(member)
    assert path is not None, member
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == member.__name__:
            return node
    raise LookupError(f"{member} is not in {path}")


def _prose(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a docstring as Markdown: one line per paragraph, indented text as code."""
    text, parts = ast.get_docstring(node), []
    if text is None:
        raise LookupError(f"{node.name} is public and has no docstring")
    for paragraph in text.split("\n\n"):
        code = paragraph.startswith("    ")
        parts.append(f"```python\n{textwrap.dedent(paragraph)}\n```" if code else " ".join(paragraph.split()))
    return "\n\n".join(parts).replace("\n```\n\n```python\n", "\n\n")


def _settings() -> str:
    rows = ["| keyword | type | default |", "|---|---|---|"]
    kinds = config.SettingsKeywords.__annotations__
    for name, kind in kinds.items():
        annotation = kind.__forward_arg__.replace("|", "\\|")
        rows.append(f"| `{name}` | `{annotation}` | `{config.SETTINGS[name].default!r}` |")
    about = f"{_prose(_node(config.Settings))} None: not given, or decided by the engine."
    return about + "\n\n" + "\n".join(rows) + "\n"


def _tree() -> str:
    assert errors.__doc__ is not None
    return textwrap.dedent(errors.__doc__.split("\n\n")[1]) + "\n"


def _errors() -> Iterator[str]:
    for node in ast.parse(inspect.getsource(errors)).body:
        if isinstance(node, ast.ClassDef):
            yield f"- `{node.name}`: {_prose(node)}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
