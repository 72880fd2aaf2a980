"""Which device computes and what its memory holds: rules over values, as no test can rely on a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.compute import devices
from rekindle.compute.cpu import memory
from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelChoice
from rekindle.compute.devices import Chosen, choose_device, with_room
from rekindle.compute.load import read_config
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError
from rekindle.model.device import Memory

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


def test_steps_are_as_long_as_memory_lets_them_be() -> None:
    assert [replace(OF_24_GB, total=total * GB).chunk_tokens for total in (12, 40, 48, 141)] == [2048, 2048, 8192, 8192]
    assert Memory(512 * GB, 512 * GB).chunk_tokens == 512


def test_weights_may_take_what_leaves_room_for_16k_tokens() -> None:
    assert OF_24_GB.weight_bytes == OF_24_GB.hot_bytes(2048) - 600_000_000
    assert Memory(64 * GB, 8 * GB).weight_bytes == 64 * GB


def test_auto_takes_a_card_on_which_kernels_of_ours_run() -> None:
    assert devices.choose(ModelSettings(), RUNS) == CARD
    assert CARD.notes == ("device: cuda, by torch",)


def test_what_keeps_a_card_from_computing_is_said_in_one_line() -> None:
    found = devices.choose(ModelSettings(), "its driver is too old")
    assert found.device == "cpu"
    assert found.notes == (f"device: cpu, by {found.compute.level}, not on the card: its driver is too old",)


@pytest.mark.parametrize("given", [{"kernels": "torch"}, {"weights": "int8"}, {"weights": "int4"}], ids=str)
def test_settings_of_the_processor_leave_the_card_alone(given: dict[str, Any]) -> None:
    settings = ModelSettings(**given)
    ((name, value),) = given.items()
    if name == "weights" and devices.choose_kernels(ModelSettings(), "cpu").library is None:
        with pytest.raises(ConfigError, match=f"weights={value} needs the kernels"):
            devices.choose(settings, RUNS)
        return
    found = devices.choose(settings, RUNS)
    assert found.device == "cpu" and f"{name}={value} is for the processor" in found.notes[0]


def test_weights_that_do_not_fit_on_a_card_go_to_the_processor(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` stands for a card: what is read as its memory is that of the machine, with a limit."""
    directory, limit, place = model_dir("llama", "bf16"), tmp_path / "memory.max", replace(CARD, device="meta")
    needed = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    monkeypatch.setattr(memory, "LIMITS", (limit,))

    def found(most: int, device: str = "auto") -> Chosen:
        limit.write_text(f"{most}\n")
        return with_room(place, ModelSettings(device=device), directory, read_config(directory), None)

    assert found(needed) is place and found(10, device="meta") is place
    assert found(10).device == "cpu" and "and it has room for 10 B" in found(10).notes[0]


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
