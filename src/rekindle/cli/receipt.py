"""receipt: what one answer of a running server read of stored blocks, what was computed for it, and by which model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from rekindle.cli.console import show_ago, show_id
from rekindle.cli.remote import Remote
from rekindle.cli.settings import with_settings
from rekindle.cli.why import JsonOption, UrlOption
from rekindle.config import Settings

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="the answer's id; of Ollama's its X-Request-ID")]
SHOWN = 3  # hashes of blocks at each end of a long chain


@with_settings(only=())
def receipt(settings: Settings, id: IdArgument, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Show which stored blocks an answer read, and what was computed; exit code 2 if there is no such receipt."""
    answer = Remote.of(settings.server, url).ask("GET", f"/v1/receipts/{quote(id, safe='').replace('.', '%2E')}")
    typer.echo(json.dumps(answer) if as_json else "\n".join(receipt_lines(answer, time.time())))
    return 0


def receipt_lines(answer: Mapping[str, Any], now: float) -> Iterator[str]:
    """The lines about one receipt."""
    identity = answer["identity"]
    of = "" if answer["agent"] is None else f" of agent {show_id(answer['agent'])}"
    yield f"{answer['id']}{of}, {show_ago(answer['created'], now)}, {answer['endpoint']}"
    kv = "KV " + ", ".join(f"{form} on {count} layers" for form, count in identity["kv"].items())
    backend, ids = identity.get("backend"), "no KV here, blocks hold token ids alone"
    by = "" if backend is None else f", computed by {backend}"
    yield f"  model {show_id(identity['model'])}, fingerprint {identity['fingerprint']}{by}"
    yield f"  {kv if identity.get('holds', 'kv') == 'kv' else ids}, blocks of {identity['block_tokens']} tokens"
    for name, digest in identity["templates"].items():
        yield f"  template {show_id(name)}, SHA-256 {digest}"
    if answer["changed"]:
        yield f"  NOT what serves now: {', '.join(answer['changed'])}"
    for choice in answer["choices"]:
        yield from _choice_lines(choice, identity["block_tokens"])


def _choice_lines(choice: Mapping[str, Any], block_tokens: int) -> Iterator[str]:
    read, computed, head = choice["read"], choice["computed"], choice["head"]
    yield f"  choice {choice['index']}: {choice['outcome']}, ended by {choice['finish_reason']}"
    yield (
        f"    read tokens 0 to {read['tokens']:,} of {choice['prompt_tokens']:,}: "
        f"{read['hot_tokens']:,} hot, {read['warm_tokens']:,} warm"
    )
    blocks, count = choice["blocks"], -(-read["tokens"] // block_tokens)
    if read["hash"] is not None:
        yield f"    in {count:,} blocks, the last one {read['hash']}" + ("" if choice["is_whole"] else _lost(blocks))
    for number, block in enumerate(blocks):
        if SHOWN <= number < len(blocks) - SHOWN:
            if number == SHOWN:
                yield f"      ... {len(blocks) - 2 * SHOWN:,} more (--json has all)"
        else:
            yield f"      {block['hash']}  {block['tokens']} tokens"
    if choice["checked"] is not None and blocks:
        yield f"    {_checks(**choice['checked'])}"
    yield (
        f"    computed from token {computed['first']:,} on: {computed['prompt']:,} of the prompt, "
        f"{computed['reply']:,} of the reply"
    )
    yield f"    its first {head['tokens']:,} tokens are held by the chain that ends with {head['hash']}"


def _checks(equal: int, differed: int) -> str:
    if differed:
        return f"{differed:,} of these blocks had other bits when they were computed again, and were dropped"
    return f"{equal:,} of these blocks were computed again since the server started, with the same bits"


def _lost(blocks: list[Any]) -> str:
    return f"; {len(blocks):,} of them are known, others were evicted or never written"
