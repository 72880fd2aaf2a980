"""Steps as graphs: the same results from one recorded step for any other that fits, and a step that cannot be recorded.

On a card the graphs are CUDA's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.kv.arena import KVArena
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import relative_error
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.model.loaded import LoadedModel
from rekindle_cuda.attention import TritonAttention
from rekindle_cuda.compute import TritonCompute
from rekindle_cuda.graphs import CudaGraphs, GraphRunner, Outputs, Recorder
from rekindle_cuda.tables import Sheet
from rekindle_cuda.work import Use, launches
from tests.cuda.test_attention import DEVICE, FP32, LAYERS
from tests.model.helpers import Bench, in_memory, random_ids
from tests.tiny_models import tiny_model

COMPUTE = TritonCompute("triton", "a card or the interpreter")
# The interpreter runs a program for every row and head of a layer, one after the other: a graph shows with few of them.
FEW: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
FEW_OF_TWO_KINDS = FEW | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
FEW_OF_TWO_KINDS |= {"sliding_window": 8}  # ends within a few rows


class Again:
    """Where there is no card: calls a function anew, and puts what it gives where the first results are."""

    def record(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        first = function()

        def launch() -> None:
            for old, new in zip(first, function(), strict=True):
                old.copy_(new)

        return launch, first


class Counted:
    """Notes what is recorded and launched."""

    def __init__(self) -> None:
        self.recorder: Recorder = CudaGraphs() if DEVICE.type == "cuda" else Again()
        self.recorded = self.launched = 0

    def record(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        launch, found = self.recorder.record(function)
        self.recorded += 1

        def counted() -> None:
            self.launched += 1
            launch()

        return counted, found


def loaded_model(kind: str) -> LoadedModel:
    few = FEW_OF_TWO_KINDS if kind == "gemma3" else FEW
    model = in_memory(tiny_model(kind, FP32, **few).to(DEVICE), kv="q4h")
    return replace(model, compute=COMPUTE, device=DEVICE.type)


def benches(kind: str, recorder: Recorder) -> tuple[Bench, Bench]:
    """The same model twice: its steps launched kernel by kernel, and as graphs."""
    loaded = loaded_model(kind)
    plain, graphed = Bench(replace(loaded, compute=TritonCompute("triton", "plain"))), Bench(loaded)
    graphed.runner = GraphRunner(loaded, graphed.arena, recorder)
    return plain, graphed


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_recorded_step_computes_others_of_its_bucket(kind: str) -> None:
    recorder, ids = Counted(), {name: random_ids(60, seed=seed) for seed, name in enumerate("abc")}
    plain, graphed = benches(kind, recorder)
    done, logits = dict.fromkeys(ids, 0), []
    for rows in ("a9 b11", "a1 b1", "a1 b1", "a1 b1 c2", "a2", "c3", "b1 a1 c1", "a2 c2", "a1", "c4 b2", "b5 c1 a1"):
        steps = []
        for name, count in ((each[0], int(each[1:])) for each in rows.split()):
            steps.append((name, ids[name][done[name] : done[name] + count]))
            done[name] += count
        logits.append([bench.forward(*steps) for bench in (plain, graphed)])
    for wanted, got in logits:  # kept as they came: a later launch may not write to them
        assert relative_error(torch.cat(got), torch.cat(wanted)) < 2e-5
    assert (recorder.recorded, recorder.launched) == (2, 8), "of four rows from the third step on, of eight the last"
    for name in ids:
        wanted, got = (np.frombuffer(b"".join(bench.stored_bytes(name)), np.uint8) for bench in (plain, graphed))
        assert (wanted != got).mean() < 1e-3


def test_ids_that_the_device_has_drawn_take_the_place_of_those_of_a_step() -> None:
    recorder, ids = Counted(), random_ids(9)
    plain, graphed = benches("llama", recorder)
    for bench in (plain, graphed):
        for token in ids[:3]:
            bench.forward(("a", [token]), ("b", [token]))
    steps = [[bench.step(name, [7]) for name in "ab"] for bench in (plain, graphed)]
    drawn = torch.tensor(ids[3:5], device=DEVICE)
    wanted, got = (bench.runner.launch(own, drawn).logits for bench, own in zip((plain, graphed), steps, strict=True))
    assert relative_error(got, wanted) < 2e-5 and recorder.launched == 2
    (other,) = plain.forward(("c", [7]))
    assert relative_error(other[:1], wanted[:1]) > 0.1


def test_rows_that_are_not_finite_fail_in_a_graph_too() -> None:
    recorder = Counted()
    loaded, ids = loaded_model("llama"), random_ids(20)
    bench = Bench(loaded)
    bench.runner = GraphRunner(loaded, bench.arena, recorder)

    def failed(*tokens: int) -> frozenset[int]:
        return bench.runner.launch(
            [bench.step(name, [token], "none") for name, token in zip("ab", tokens, strict=True)]
        ).wait()

    assert not any(failed(token, token) for token in ids[:4])
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[ids[5]] = float("nan")
    assert failed(ids[6], ids[5]) == {1} and recorder.launched == 3


class Refusing:
    """A card that cannot hold what a model does in a graph, so many times."""

    def __init__(self, times: int) -> None:
        self.left, self.recorder = times, Counted()

    def record(self, function: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        if self.left:
            self.left -= 1
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return self.recorder.record(function)


def test_a_step_that_cannot_be_recorded_is_launched_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried three times."""
    ids, recorders = random_ids(20), [Refusing(2), Refusing(3)]
    (plain, often), (_, always) = (benches("llama", recorder) for recorder in recorders)
    with caplog.at_level(logging.WARNING):
        for first, end in itertools.pairwise((0, 3, 4, 5, 6, 7, 8, 11)):
            wanted, *found = (torch.cat(bench.forward(("a", ids[first:end]))) for bench in (plain, often, always))
            assert all(relative_error(got, wanted) < 2e-5 for got in found)
    assert [each.recorder.launched for each in recorders] == [3, 0]
    (told,) = [record.message for record in caplog.records if record.name.endswith("graphs")]
    assert told.endswith("slower: RuntimeError: operation not permitted when stream is capturing")


def test_layers_may_not_attend_otherwise_while_a_step_is_recorded() -> None:
    """Their tables would be sent from memory that the graph reads again after it was given back."""
    layer, layout = LAYERS["q4h"], StepLayout([SequenceSpan([0], 0, 4, 4)], 32, 4)
    ours, plan, q = (
        TritonAttention(KVArena(layer.layout, 1, DEVICE)),
        AttentionPlan(layout, DEVICE),
        torch.zeros(4, 6, 64),
    )
    ours.attend(5, q.to(DEVICE), plan, **layer.scoring)
    again = AttentionPlan(layout, DEVICE)
    ours.follow(again, Sheet.of(ours.tables(layout), DEVICE))
    ours.attend(5, q.to(DEVICE), again, **layer.scoring)
    with pytest.raises(RuntimeError, match="layers attend otherwise than in earlier steps"):
        ours.attend(5, q[:, :2].to(DEVICE), again, **layer.scoring)
    ours.attend(5, q[:, :2].to(DEVICE), plan, **layer.scoring)


def test_a_sheet_refuses_a_table_that_is_too_long() -> None:
    sheet = Sheet({("ids",): 3, ("positions",): 5}, DEVICE)
    sheet.send({("ids",): np.arange(3), ("positions",): np.arange(4)})
    assert sheet["ids",].tolist() == [0, 1, 2] and sheet["positions",].tolist() == [0, 1, 2, 3, -1]
    with pytest.raises(AssertionError, match="4 numbers of"):
        sheet.send({("ids",): np.arange(4)})


def test_work_of_many_items_is_split_between_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = StepLayout([SequenceSpan(range(40), 600, 9, 600), SequenceSpan(range(40, 80), 900, 1, 900)], 32, 12)
    use = Use(None, 32, None)
    ((_, whole, pieces),) = launches(layout, use)
    monkeypatch.setattr("rekindle_cuda.work.MOST_ITEMS", 25)
    parts = launches(layout, use)
    assert [len(each.items) for each in parts] == [30, 20, 30, 25] and len(whole) == 105
    assert np.array_equal(np.concatenate([each.items for each in parts]), whole)
    read = np.concatenate([each.pieces for each in parts])
    assert sorted(read[:, 3].tolist()) == sorted(pieces[:, 3].tolist()) == list(range(12))
    for items, own in ((each.items, each.pieces) for each in parts):
        for first, count, inside, row in own.tolist():
            found = items[first : first + count]
            assert count == 0 or ((found[:, 1] + inside == row).all() and inside < found[0, 2])


def test_a_thread_that_computes_launches_on_the_card_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, used = loaded_model("llama"), list[torch.device]()
    monkeypatch.setattr("rekindle_cuda.runner.use", used.append)
    bench = Bench(loaded)
    bench.runner = loaded.compute.runner(loaded, bench.arena)
    bench.forward(("a", random_ids(2)))
    assert used == [torch.device(DEVICE.type)]
