"""Which device computes and what its memory holds: rules over values, as no test can rely on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle_cuda
from rekindle.compute import devices
from rekindle.compute.cpu import memory
from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelChoice
from rekindle.compute.devices import Chosen, choose_device
from rekindle.compute.load import load_model, read_config
from rekindle.compute.room import rounded_bytes, with_room
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.extensions import extensions, load
from rekindle.model.checkpoint import expected_bytes, expert_share, weight_files
from rekindle.model.device import Memory
from rekindle.model.proof import code_digest
from rekindle_cuda.compute import TritonCompute, triton_compute
from tests.kernels.native import needs_kernels
from tests.memory_limit import limit_memory

GB = 10**9
RUNS = KernelCompute(None)  # what computes on a card: any Compute
CARD = Chosen("cuda", RUNS, KernelChoice(None))
OF_24_GB = Memory(24 * GB, 24 * GB, on_card=True)


def test_hot_memory_is_what_a_card_has_left_and_a_part_of_a_machine() -> None:
    loaded = replace(OF_24_GB, free=18 * GB)  # weights of 6 GB
    assert loaded.hot_bytes(2048) == int(0.92 * 24 * GB) - 6 * GB - (430_000_000 + 2048 * 180_000) - 500_000_000
    assert loaded.hot_bytes(8192) == loaded.hot_bytes(2048) - 6144 * 180_000
    assert replace(loaded, free=GB).hot_bytes(2048) == 0
    assert Memory(64 * GB, 8 * GB).hot_bytes(512) == 2 * GB
    assert Memory(64 * GB, 64 * GB).hot_bytes(512) == 4 << 30


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_leave_less_than_the_machine_has(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service inside a slice: the least of the limits, and of what each of them still leaves."""
    limit_memory(monkeypatch, tmp_path)
    machine = memory.memory_of("cpu")
    limit, used, droppable = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    root = tmp_path / "memory" if version == 1 else tmp_path
    membership = "4:cpu:/\n3:memory:/a.slice/b.service\n" if version == 1 else "0::/a.slice/b.service\n"
    memory.MEMBERSHIP.write_text(membership)

    def set_group(name: str, most: int | str, now: int, files: int) -> None:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / limit).write_text(f"{most}\n")
        (root / name / used).write_text(f"{now}\n")
        (root / name / "memory.stat").write_text(f"anon 1\n{droppable} {files}\n")

    set_group("a.slice", 3000, 2500, 100)
    set_group("a.slice/b.service", 2000, 700, 200)
    assert memory.memory_of("cpu") == Memory(2000, 600)
    set_group("a.slice/b.service", 9223372036854771712 if version == 1 else "max", 700, 200)
    assert memory.memory_of("cpu") == Memory(3000, 600)
    set_group("a.slice", 2000, 2500, 100)
    assert memory.memory_of("cpu") == Memory(2000, 0)
    memory.MEMBERSHIP.write_text(membership.replace("a.slice/b.service", "not/seen/from/here"))
    assert memory.memory_of("cpu").total == machine.total
    set_group("", 4000, 1000, 0)
    assert memory.memory_of("cpu") == Memory(4000, 3000)


def test_steps_are_as_long_as_memory_lets_them_be() -> None:
    assert [replace(OF_24_GB, total=total * GB).chunk_tokens for total in (12, 40, 48, 141)] == [2048, 2048, 8192, 8192]
    assert Memory(512 * GB, 512 * GB).chunk_tokens == 512


def test_weights_may_take_what_leaves_room_for_16k_tokens() -> None:
    assert OF_24_GB.weight_bytes == OF_24_GB.hot_bytes(2048) - 600_000_000
    assert Memory(64 * GB, 8 * GB).weight_bytes == 64 * GB


def test_auto_takes_a_card_on_which_kernels_of_ours_run() -> None:
    assert devices.choose(ModelSettings(), RUNS) == CARD
    assert CARD.notes == ("device: cuda, by torch",)


@pytest.mark.parametrize(("name", "card"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_thread_that_loads_launches_on_the_card_that_is_named(
    name: str, card: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current one; torch makes no card the current one whose number it is not told."""
    used = list[int]()
    monkeypatch.setattr(devices, "kernels_on", lambda device: RUNS)
    monkeypatch.setattr("torch.cuda.set_device", used.append)
    found = devices.named_device(ModelSettings(device=name))
    assert (found.device, found.compute, used) == (name, RUNS, [card])


def test_kernels_for_a_card_come_from_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is part of what a proof depends on, as the core's is."""
    (found,) = extensions("rekindle.cards")
    assert load(found) is triton_compute
    code = code_digest(Path(rekindle_cuda.__file__).parent)
    assert TritonCompute("triton 3", "a card").digest == f"triton 3, a card, code {code}"
    assert code != code_digest(*Path(rekindle_cuda.__file__).parent.glob("[!a]*.py"))
    devices.kernels_on.cache_clear()
    monkeypatch.setattr("rekindle.extensions.entry_points", lambda group: ())
    assert str(devices.kernels_on(torch.device("cuda"))).startswith("the package rekindle-cuda is missing: pip install")
    devices.kernels_on.cache_clear()


def test_what_keeps_a_card_from_computing_is_said_in_one_line() -> None:
    found = devices.choose(ModelSettings(), "its driver is too old")
    assert found.device == "cpu"
    assert found.notes == (f"device: cpu, by {found.compute.level}, not on the card: its driver is too old",)


def test_kernels_of_the_processor_leave_the_card_alone() -> None:
    found = devices.choose(ModelSettings(kernels="torch"), RUNS)
    assert found.device == "cpu" and "kernels=torch is for the processor" in found.notes[0]
    assert devices.choose(ModelSettings(weights="int4"), RUNS) == CARD


def test_weights_that_do_not_fit_on_a_card_go_to_the_processor(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a card: what is read as its memory is that of the machine, with a limit."""
    directory, place = model_dir("llama", "bf16"), replace(CARD, device="meta")
    needed = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    limit = limit_memory(monkeypatch, tmp_path)

    def found(most: int, device: str = "auto") -> Chosen:
        limit.write_text(f"{most}\n")
        return with_room(place, ModelSettings(device=device), directory, read_config(directory), None)

    assert found(needed) is place and found(10, device="meta") is place
    assert found(10).device == "cpu" and "and it has room for 10 B" in found(10).notes[0]


def test_weights_take_the_widest_form_that_a_card_has_room_for(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` means the checkpoint's own form, 8 bits or 4; what is asked for is rounded without a word, or refused."""
    directory = model_dir("llama", "bf16", intermediate_size=2048)
    card = replace(CARD, device="meta", compute=TritonCompute("triton", "a card"))
    config, native = read_config(directory), sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    limit = limit_memory(monkeypatch, tmp_path)

    def found(share: float, **given: Any) -> Chosen:
        limit.write_text(f"{int(share * native)}\n")
        return with_room(card, ModelSettings(**{"device": "meta", "weights": "auto", **given}), directory, config, None)

    forms = {share: found(share).named(ModelSettings(weights="auto")).weights for share in (1.0, 0.99, 0.52, 0.5, 0.3)}
    assert list(forms.values()) == ["native", "int8", "int8", "int4", "int4"]
    assert "weights: in 8 bits, as in their own form they take" in found(0.6).notes[-1] and len(found(1.0).notes) == 1
    assert found(0.6, weights="int8") is card is found(0.3, weights="int4")
    for given in ({}, {"weights": "int4"}):
        assert found(0.2, device="auto", **given).device == "cpu"
        with pytest.raises(ModelRefused, match="in 4 bits, and meta has room for"):
            found(0.2, **given)
    assert found(0.2, weights="native") is card  # which the loader refuses
    assert "(weights=int8 would fit)" in found(0.6, weights="native", device="auto").notes[0]
    assert found(1.0, dtype="fp32") is card and found(1.0, dtype="fp32", device="auto").device == "cpu"


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["head", "tied head"])
def test_bytes_of_rounded_weights_are_estimated_before_they_are_read(
    weights: Any, changes: dict[str, Any], model_dir: Callable[..., Path]
) -> None:
    directory = model_dir("llama", "bf16", hidden_size=256, intermediate_size=512, **changes)
    settings = ModelSettings(model=str(directory), device="cpu", weights=weights)
    found = rounded_bytes(weight_files(directory), read_config(directory), settings, None)
    loaded = load_model(settings, block_tokens=16, max_context=None, format_map_dir=None)
    assert found[weights] == pytest.approx(loaded.spec.facts.weight_bytes, rel=0.05)


def test_experts_are_counted_as_they_are(model_dir: Callable[..., Path]) -> None:
    directory = model_dir("mixtral", "bf16")
    files, config = weight_files(directory), read_config(directory)
    experts = 3 * config.num_hidden_layers * config.num_local_experts * 64 * config.intermediate_size
    assert expert_share(files) == pytest.approx(2 * experts / expected_bytes(files, None))
    wide, table = expected_bytes(files, None), config.vocab_size * config.hidden_size
    found = rounded_bytes(files, config, ModelSettings(device="cpu"), None)
    assert found["int8"] == pytest.approx(experts * 2 + 3 * table + (wide - experts * 2 - 4 * table) / 2, rel=0.001)


@pytest.mark.skipif(torch.cuda.is_available() or devices.is_card_seen(), reason="this machine has a card")
def test_a_machine_without_a_card_says_nothing_of_one() -> None:
    found = choose_device(ModelSettings())
    assert (found.device, found.notes) == ("cpu", ())
    assert found == choose_device(ModelSettings(device="cpu"))


def test_a_card_is_seen_by_its_driver_or_its_tool(tmp_path: Path) -> None:
    assert not devices.is_card_seen(tmp_path, str(tmp_path))
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert devices.is_card_seen(tmp_path, str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert devices.is_card_seen(tmp_path / "none", str(tmp_path))
