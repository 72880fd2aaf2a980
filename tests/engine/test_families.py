"""Every family of `rekindle models` is what its row says, and its turns are those of no reuse: new, extended, after a
restart, diverging, forked, rewound, cancelled, two at once.

`make models` takes a tiny model of every type that a row names; the usual run takes one of each kind of family.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.engine.api import Engine
from rekindle.errors import ModelRefused
from rekindle.model.families import FAMILIES, Family
from tests.engine.turns import turn, with_template
from tests.tiny_models import KINDS, tiny_model_dir

Start = Callable[..., Engine]
TEXTS = ("What is on the table? " * 4, "Where does the river end?", "And then? " * 6)
SERVED = [family for family in FAMILIES if family.served != "no"]
REASONS = {
    "jamba": "does not go on from its state",
    "deepseek-v32": "by an index",
    "glm-5": "by an index",
    "minimax": "cache of its own",
    "llama4": "attend within chunks",
    "stablelm": "does not pass keywords on to its attention",
    "falcon": "cannot be loaded",
}
OF_EACH_KIND = ("llama", "gemma3", "qwen3-moe", "deepseek-v3", "mistral3", "lfm2", "qwen3.5", "nemotron-h")


def family_of(kind: str) -> Family:
    """Return the family of a tiny model."""
    (found,) = (family for family in FAMILIES if KINDS[kind][0] in family.model_types)
    return found


def kinds_of(family: Family) -> list[str]:
    """Return the tiny models of a family, the plain ones."""
    variants = ("llama-80", "llama-dynamic", "phi3-longrope")
    return [kind for kind, (name, _) in KINDS.items() if name in family.model_types and kind not in variants]


ALL = [kind for family in SERVED for kind in kinds_of(family)]
CHOSEN = ALL if os.environ.get("FAMILIES") == "all" else list(OF_EACH_KIND)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_type_of_a_row_has_a_tiny_model(family: Family) -> None:
    assert {KINDS[kind][0] for kind in kinds_of(family)} == set(family.model_types)


def test_every_kind_of_family_is_tried() -> None:
    assert {family.kind for family in SERVED} == {family_of(kind).kind for kind in OF_EACH_KIND}


@pytest.fixture(params=CHOSEN)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_family_is_what_its_row_says(kind: str, tmp_path: Path) -> None:
    """In bf16, as it is shipped."""
    family = family_of(kind)
    directory = tiny_model_dir(kind, "bf16", tmp_path)
    loaded = load_model(
        ModelSettings(model=str(directory), threads=1), block_tokens=64, max_context=None, format_map_dir=None
    )
    layout = loaded.spec.layout
    assert loaded.promise == family.promise or (loaded.promise, family.promise) == ("bitwise", "close"), loaded.notes
    assert bool(layout.states) == (family.kind in ("convolutions", "delta rule", "mamba"))
    assert any(layer.window for layer in layout.layers) == (family.kind == "windows" or kind in ("mistral", "lfm3"))
    if layout.states and loaded.promise == "close" and loaded.dtype == torch.bfloat16:  # fp32 depends on rows
        assert "prompts, in pieces of whole blocks, give the same bytes" in loaded.notes[-1]
    if family.example is not None:
        if "bf16" in {layer.k_format for layer in family.example.layout.layers}:  # by a rule, not by a self-check
            assert {layer.k_format for layer in layout.layers} <= {"bf16", "fp32"}
        assert bool(family.example.layout.states) == bool(layout.states)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.served == "no"], ids=lambda each: each.name)
def test_what_is_not_served_is_refused(family: Family, tmp_path: Path) -> None:
    for kind in kinds_of(family):
        directory = tiny_model_dir(kind, "bf16", tmp_path)
        with pytest.raises(ModelRefused, match=REASONS[kind]):
            load_model(ModelSettings(model=str(directory)), block_tokens=64, max_context=None, format_map_dir=None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(directory: Path) -> Engine:
        for engine in engines:
            engine.close()
        settings = {"threads": 1, "hot_bytes": 8 << 20, "block_tokens": 16, "store": str(tmp_path / "store")}
        engines.append(Engine.from_pretrained(str(directory), anticipate="off", **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def replies(engine: Engine, agent: str, *texts: str) -> int:
    """Ask and compare with the reply of no reuse; return the reused tokens."""
    result = engine.chat(agent, turn(*texts), temperature=0.0, max_tokens=5)
    plain = engine.chat("plain", turn(*texts), temperature=0.0, max_tokens=5, reuse="off")
    assert result.token_ids == plain.token_ids, (agent, len(texts))
    assert result.report.reused_tokens + result.report.computed_tokens == result.report.prompt_tokens
    return result.report.reused_tokens


def test_turns_of_a_family_are_those_of_no_reuse(kind: str, tmp_path: Path, start: Start) -> None:
    """In fp32, where what another order of sums changes is far below the difference of two tokens."""
    directory = with_template(tiny_model_dir(kind, "fp32", tmp_path))
    engine = start(directory)
    first, second, third = TEXTS
    assert replies(engine, "ada", first) == 0
    assert replies(engine, "ada", first, "A book.", second) > 60, "it extends its turn"
    engine.flush()
    engine = start(directory)
    assert replies(engine, "ada", first, "A book.", second, "In the sea.", third) > 60, "after a restart"
    replies(engine, "ada", first, "A cup.", second)
    engine.agent("ada").fork("eve")
    assert replies(engine, "eve", first, "A cup.", second, "There.", third) > 60
    engine.agent("ada").rewind(1)
    replies(engine, "ada", first, "A cup and a book.", third)
    stream = engine.stream("bob", turn(*TEXTS), temperature=0.0, max_tokens=60)
    next(iter(stream))
    stream.cancel()
    stream.result()
    assert replies(engine, "bob", *TEXTS) > 60, "what it had computed is kept"
    both = [engine.stream(agent, turn(first, agent, third), temperature=0.0, max_tokens=12) for agent in ("cy", "di")]
    for agent, stream in zip(("cy", "di"), both, strict=True):
        plain = engine.chat("plain", turn(first, agent, third), temperature=0.0, max_tokens=12, reuse="off")
        assert stream.result().token_ids == plain.token_ids
    engine.components.loop.call(lambda core: core.check()).result()
