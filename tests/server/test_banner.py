"""The banner of a server: the model, its weights and its KV in words and sizes for people, and a first request."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path

from rekindle import pocket
from rekindle.config import Settings, parse_size
from rekindle.server.serve import banner
from rekindle_pocket import MODEL_DIR
from tests.kernels.native import needs_kernels
from tests.server.conftest import Served
from tests.server.scripted import serving


def shown(served: Served) -> dict[str, str]:
    """The banner's paragraphs by their heads."""
    text = banner(served.engine, served.engine.settings, f"http://127.0.0.1:{served.port}")
    return {head: "\n".join(part.split("\n")) for head, part in re.findall(r"^(\w+) +((?:.|\n )+)", text, re.MULTILINE)}


def test_model_and_weights_are_a_line_each(served: Served) -> None:
    lines = shown(served)
    model, *about = lines["model"].splitlines()
    assert model == "pocket (LlamaForCausalLM), 7.3 million parameters, context 4,096 tokens"
    assert " ".join(" ".join(about).split()) == pocket.ABOUT and "rekindle serve smollm2" in pocket.ABOUT
    found = re.fullmatch(r"16 bits \(bf16\), (.+) in memory, from safetensors of (.+)", lines["weights"])
    assert found is not None, lines["weights"]
    took, held = (parse_size(each) for each in found.groups())
    facts = served.engine.spec.facts
    assert abs(took - facts.weight_bytes) < 1e5 and abs(held - facts.file_bytes) < 1e5
    assert facts.file_bytes == (MODEL_DIR / "model.safetensors").stat().st_size


@needs_kernels
def test_a_format_is_named_by_its_bits_and_large_sizes_are_readable() -> None:
    with serving(weights="int8", store="off", threads=1, hot_bytes="16MiB") as packed:
        lines = shown(packed)
    assert lines["weights"].startswith("8 bits, ")
    (note,) = re.findall(r"weights: .*", lines["KV"])
    assert "MiB where bf16 takes" in note and "MiB" in note.split("where")[1]
    assert not re.search(r"\d,\d{3},\d{3}", "\n".join(lines.values()))


def test_a_base_model_shows_the_route_that_it_has(tmp_path: Path) -> None:
    base = Path(shutil.copytree(MODEL_DIR, tmp_path / "base"))
    (base / "chat_template.jinja").unlink()
    with serving(model=str(base), store="off", threads=1, hot_bytes="16MiB") as plain:
        lines = shown(plain)
        assert "template: this model has none" in lines["KV"]
        url, body = re.findall(r"curl (\S+/v1/\w+\S*) -H 'X-Agent-ID: me' \\\n *-d '(.*)'", lines["ready"])[0]
        assert url.endswith("/v1/completions")
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["text"]


def test_a_model_with_a_template_shows_a_message(served: Served) -> None:
    assert "/v1/chat/completions" in shown(served)["ready"]


def test_settings_name_the_model(served: Served) -> None:
    named = Settings.load({"served_model_name": "me", "store": "off"})
    assert banner(served.engine, named, "http://here").startswith("model      me (LlamaForCausalLM)")
