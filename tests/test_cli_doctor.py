"""doctor: what is wrong on purpose is found, with what to do about it; what is right passes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

from rekindle import Engine
from rekindle.cli import app, device_probes, disk_probes, doctor, model_probes
from rekindle.cli.device_probes import Card
from rekindle.cli.findings import ADVICE, Finding, judged, spread
from rekindle.cli.model_probes import KernelSpeed, Place, measure_kernels
from rekindle.compute import devices
from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.devices import choose_kernels
from rekindle.config import CacheSettings, ModelSettings, ServerSettings, StoreSettings
from rekindle.harness.client import free_port
from rekindle.model.device import Memory
from rekindle.spec import KVLayout, LayerSpec
from tests.forks import ForkedServer
from tests.kernels.native import needs_kernels


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", **env}).invoke(app, ["doctor", *arguments])


def found(result: Result) -> dict[str, Mapping[str, Any]]:
    """The findings of a run with --json, by topic."""
    return {finding["topic"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_a_sound_machine_passes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(0o700)
    (store / "proof-x.json").write_text("not read")
    result = run("--store", str(store), "--threads", "1", "--port", str(free_port()), "--json")
    assert result.exit_code == 0, result.output
    findings = found(result)
    assert [finding for finding in findings.values() if finding["verdict"] == "fail"] == []
    assert {"versions", "device", "memory", "port", "clock", "store", "space", "durability", "holes"} <= set(findings)
    assert {"model", "trial forward", "KV formats", "self-test", "prefill", "step", "disk speed"} <= set(findings)
    assert re.fullmatch(r"1[45],\d{3},\d{3} bytes", findings["weights"]["said"])
    assert "bitwise" in findings["self-test"]["said"]
    assert findings["kernels"]["said"].partition(",")[0] in ("amx", "avx512", "avx2", "torch")
    assert "0 stored bytes differ" in findings["kernels q4h/q4h 64"]["said"]
    assert "1,000 tokens are saved in" in findings["disk speed"]["said"]
    assert [path.name for path in store.iterdir()] == ["proof-x.json"]


def test_settings_that_may_serve_a_refused_model_are_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.eager_attention_forward

    def wrong(*args: Any, scaling: float, **others: Any) -> Any:
        return own(*args, scaling=scaling * 1.5, **others)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", wrong)
    finding = found(run("--store", "off", "--threads", "1", "--port", str(free_port()), "--json"))["model"]
    assert finding["verdict"] == "fail" and "attention call 1:" in finding["said"], finding
    assert "dtype=fp32" in finding["advice"] and "dtype=fp32" not in finding["said"], finding


def test_what_fails_is_said_with_what_to_do_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    arguments = ("--store", "off", "--port", str(free_port()), str(tmp_path / "model"))
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False
    findings = found(result)
    assert (findings["model"]["verdict"], findings["store"]["verdict"]) == ("fail", "warn")
    assert "config.json" in findings["model"]["said"]
    assert all(finding["advice"] for finding in findings.values() if finding["verdict"] != "ok")
    assert [topic for topic in findings if topic.startswith("kernels")]  # what most models need is tried all the same
    printed = run(*arguments)
    assert (printed.exit_code, findings["model"]["advice"] in printed.output) == (1, True)


def test_a_device_that_is_not_there_fails_and_nothing_is_loaded_on_it() -> None:
    findings = found(run("--device", "xpu:7", "--store", "off", "--port", str(free_port()), "--json"))
    assert findings["device"]["verdict"] == "fail"
    assert "model" not in findings


def test_kernels_that_cannot_run_fail_with_advice() -> None:
    finding, chosen = device_probes.probe_choice(ModelSettings(weights="int8", kernels="torch"))
    assert (finding.verdict, "weights=int8" in finding.said, "--kernels" in finding.advice) == ("fail", True, True)
    assert chosen is None
    finding, chosen = device_probes.probe_choice(ModelSettings(kernels="torch"))
    assert chosen is not None and finding == Finding("device", "ok", "cpu, by torch")
    assert device_probes.probe_kernel_library(chosen) == Finding("kernels", "ok", "torch")


def test_a_card_is_shown_with_what_runs_on_it(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    driver = device_probes.driver_version(tmp_path / "version")
    card = Card("RTX 4090", Memory(24 << 30, 20 << 30, on_card=True), (8, 9), driver, "13.0", None)
    assert str(card) == (
        "RTX 4090, 20.0 GiB of 24.0 GiB free, compute capability 8.9; driver 580.65.06, "
        f"torch {torch.__version__} for CUDA 13.0, no Triton"
    )
    assert device_probes.driver_version(tmp_path / "none") is None


def test_a_card_that_is_not_taken_is_something_to_look_at() -> None:
    chosen = devices.choose(ModelSettings(), "its driver is too old")
    finding = device_probes.finding_of(chosen)
    assert finding.verdict == "warn" and "its driver is too old" in finding.said and "gpu.md" in finding.advice


def test_the_port_of_another_program_and_of_our_own_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=_speak, args=(other,), daemon=True).start()
        port = other.getsockname()[1]
        finding = doctor.probe_port(ServerSettings(port=port))
    assert (finding.verdict, "another program" in finding.said) == ("fail", True)
    flags = ["--store", "off", "--hot-bytes", "32MiB", "--threads", "1"]
    with ForkedServer(flags, log=tmp_path / "log", server=ServerSettings(port=0, api_key="k")) as server:
        server.wait_ready()
        finding = doctor.probe_port(ServerSettings(port=server.port))
    assert (finding.verdict, "our server" in finding.said) == ("ok", True)


def _speak(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")


def test_addresses_that_are_not_ours_cannot_be_listened_on() -> None:
    finding = doctor.probe_port(ServerSettings(host="192.0.2.1", port=1, open=True))
    assert (finding.verdict, "--host" in finding.advice) == ("fail", True)


@pytest.mark.parametrize(
    ("version", "wanted", "said"),
    [
        ("5.17.0", "<6,>=5.17", None),
        ("5.23.0.dev0", "<6,>=5.17", None),
        ("2.13.0+cpu", ">=2.8", None),
        ("6", "<6,>=5.17", "too new"),
        ("6.0.0rc1", "<6,>=5.17", "too new"),
        ("5.9.4", "<6,>=5.17", "too old"),
        ("0.9", ">=0.10", "too old"),
    ],
)
def test_versions_are_held_against_their_ranges(version: str, wanted: str, said: str | None) -> None:
    finding = doctor.in_range("package", version, wanted)
    assert finding.verdict == ("ok" if said is None else "fail")
    assert (said or version) in finding.said


def test_a_package_that_is_missing_says_how_to_get_it() -> None:
    finding = doctor.package("no-such-package-at-all", ">=1")
    assert (finding.verdict, doctor.is_missing(finding), finding.advice) == (
        "fail",
        True,
        "pip install 'rekindle[serve]'",
    )


def test_sources_that_were_not_installed_are_a_finding(tmp_path: Path) -> None:
    """In an interpreter that sees the packages beside ours, and of ours the sources only."""
    program = """
import sys
from importlib.metadata import MetadataPathFinder
found = MetadataPathFinder.find_distributions
MetadataPathFinder.find_distributions = lambda *given: (x for x in found(*given) if x.name != "rekindle")
from rekindle.cli.doctor import probe_versions
print(*probe_versions(), sep=chr(10))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("Finding(topic='versions', verdict='warn', said='unknown: rekindle runs from its sources")


def test_the_clock() -> None:
    now = 1.8e9
    assert doctor.probe_clock(None, now).verdict == "ok"
    assert doctor.probe_clock(now - 1, now).verdict == "ok"
    assert doctor.probe_clock(now + 7200, now).said == "is 2 h before the last use in the store"
    assert doctor.probe_clock(None, 1000.0).verdict == "fail"


def test_more_memory_than_there_is() -> None:
    machine = Memory(total=8 << 30, free=4 << 30)
    assert device_probes.probe_memory(CacheSettings(hot_bytes=1 << 20), machine).verdict == "ok"
    assert device_probes.probe_memory(CacheSettings(hot_bytes=1 << 33), machine).verdict == "fail"
    assert device_probes.probe_memory(CacheSettings(), replace(machine, free=1 << 29)).verdict == "warn"
    finding = device_probes.probe_memory(CacheSettings(), Memory(24 << 30, 24 << 30, on_card=True))
    assert finding == Finding("memory", "ok", "weights may take 20.3 GiB of 24.0 GiB free; hot KV what they leave")


def test_a_store_that_others_can_read_or_that_is_no_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    finding = disk_probes.probe_directory(tmp_path)
    assert (finding.verdict, finding.advice) == ("warn", f"chmod 700 {tmp_path}")
    tmp_path.chmod(0o700)
    assert disk_probes.probe_directory(tmp_path).verdict == "ok"
    (tmp_path / "file").touch()
    assert disk_probes.probe_directory(tmp_path / "file" / "store").verdict == "fail"
    assert disk_probes.probe_directory(tmp_path / "new").verdict == "ok"
    assert not (tmp_path / "new").exists()


def test_a_budget_beyond_the_disk(tmp_path: Path) -> None:
    assert disk_probes.probe_space(StoreSettings(dir=tmp_path, disk_bytes=1 << 20)).verdict == "ok"
    assert disk_probes.probe_space(StoreSettings(dir=tmp_path, disk_bytes=1 << 60)).verdict == "warn"
    (tmp_path / "file").write_bytes(os.urandom(100_000))
    os.truncate(tmp_path / "file", 1 << 40)  # holes take nothing
    assert 100_000 <= disk_probes.taken_bytes(tmp_path) < 1 << 20


def test_who_holds_the_store_is_said(tmp_path: Path) -> None:
    with Engine.from_pretrained("pocket", store=tmp_path, hot_bytes="64MiB", threads=1) as engine:
        fingerprint = engine.spec.fingerprint
        free = disk_probes.probe_lock(StoreSettings(dir=tmp_path), bytes(32), is_served=False)
        held = disk_probes.probe_lock(StoreSettings(dir=tmp_path), fingerprint, is_served=False)
        served = disk_probes.probe_lock(StoreSettings(dir=tmp_path), fingerprint, is_served=True)
        (info,) = disk_probes.probe_stores(tmp_path)
    assert free is None and held is not None and served is not None
    assert (held.verdict, served.verdict, info.verdict) == ("warn", "ok", "ok")
    assert str(os.getpid()) in held.said and str(os.getpid()) in info.said
    assert disk_probes.probe_lock(StoreSettings(dir=tmp_path), fingerprint, is_served=False) is None


def test_a_file_system_in_memory_or_over_a_network_is_named(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    rows = ["/dev/x / ext4 rw 0 0", f"srv:/x {tmp_path} nfs4 rw 0 0", f"t {tmp_path}/t\\040mp tmpfs rw 0 0"]
    mounts.write_text("\n".join(rows))
    assert disk_probes.kind_of_mount(tmp_path / "a", mounts) == "nfs4"
    assert disk_probes.kind_of_mount(tmp_path / "t mp" / "b", mounts) == "tmpfs"
    assert disk_probes.kind_of_mount(Path("/"), mounts) == "ext4"
    assert disk_probes.kind_of_mount(Path("/"), tmp_path / "none") is None


TORCH = KernelCompute(None)
LAYER = LayerSpec(0, 2, 64, 64, None, "q4h", "q4h")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        replace(LAYER, window=100),
        replace(LAYER, k_format="fp32", v_dim=32),
        LayerSpec(0, 1, 64, 32, None, "q4h", "bf16", latent=True),
    ],
)
def test_kernels_agree_with_the_definition(layer: LayerSpec, dtype: torch.dtype) -> None:
    (finding,) = model_probes.probe_kernels([layer, layer], dtype, Place("cpu", TORCH), 64)
    assert finding.verdict == "ok", finding


@needs_kernels
@pytest.mark.parametrize("layer", [LAYER, LayerSpec(0, 1, 64, 32, None, "q4h", "bf16", latent=True)])
def test_the_kernels_that_compute_are_compared(layer: LayerSpec) -> None:
    library = choose_kernels(ModelSettings(), "cpu").library
    assert library is not None
    compared, by_torch = (
        model_probes.compare_kernels(layer, torch.bfloat16, place, 64)
        for place in (Place("cpu", KernelCompute(library)), Place("cpu", TORCH))
    )
    assert compared.bytes_differ == 0 and compared.error != by_torch.error
    (finding,) = model_probes.probe_kernels([layer], torch.bfloat16, Place("cpu", KernelCompute(library)), 64)
    assert finding.verdict == "ok" and finding.said.startswith(f"cpu ({library.level}) against the definition")


@needs_kernels
def test_the_speed_of_the_kernels_is_measured() -> None:
    library = choose_kernels(ModelSettings(), "cpu").library
    assert library is not None
    threads = torch.get_num_threads()
    speed = measure_kernels(library, 1, columns=256, depth=128, matrices=2)
    assert torch.get_num_threads() == threads
    assert speed.widest > 1 and speed.memory > 0 and speed.one_row.keys() == speed.many_rows.keys() == {"bf16", "int8"}
    assert str(KernelSpeed(40.0, {"bf16": 30.0, "int8": 20.0}, {"bf16": 2000.0, "int8": 4000.0})) == (
        "memory is read at 40 GB/s, weights for one row at 30 GB/s in bf16 (75%), 20 GB/s in int8 (50%); "
        "256 rows at 2,000 GFLOP/s in bf16, 4,000 GFLOP/s in int8"
    )


def test_a_device_that_computes_or_stores_otherwise_is_refused() -> None:
    good = model_probes.compare_kernels(LAYER, torch.float32, Place("cpu", TORCH), 64)
    assert good.bytes_differ == 0

    def verdict(**changed: Any) -> str:
        return model_probes.judge("kernels", replace(good, **changed), torch.float32, "x").verdict

    assert verdict() == "ok"
    assert verdict(error=1e-3) == "fail"
    assert verdict(error=float("nan")) == "fail"
    assert verdict(lost=0.02) == "fail"
    assert verdict(bytes_differ=3) == "warn"


def test_a_device_that_cannot_run_a_kernel_is_a_finding() -> None:
    (finding,) = model_probes.probe_kernels([LAYER], torch.float32, Place("meta", TORCH), 64)
    assert (finding.verdict, "--device cpu" in finding.advice) == ("fail", True)


def test_a_disk_slower_than_the_model_is_said_so(tmp_path: Path) -> None:
    layout = KVLayout(64, (LAYER,))
    speed = disk_probes.measure_disk(tmp_path, disk_probes.record_bytes(layout))
    assert speed is not None
    assert min(speed.written, speed.read) > 0
    assert list(tmp_path.iterdir()) == []
    assert disk_probes.judge_speed(speed, layout, 1.0).verdict == "ok"
    assert disk_probes.judge_speed(speed, layout, 1e15).verdict == "warn"
    assert disk_probes.judge_speed(None, layout, 1.0).verdict == "warn"


def test_arithmetic_of_the_speed() -> None:
    layout = KVLayout(64, (LAYER,))
    speed = disk_probes.DiskSpeed(written=1e6, read=2e6, cached=True)
    per_1000 = disk_probes.record_bytes(layout) * 1000 / 64
    said = disk_probes.judge_speed(speed, layout, 500.0).said
    assert f"saved in {per_1000 / 1e6:.3f} s and loaded in {per_1000 / 2e6:.3f} s" in said
    assert "computing them takes 2.00 s" in said
    assert np.isclose(per_1000 / 1000, disk_probes.record_bytes(layout) / 64)


def test_speeds_that_disagree_are_said_to_be_disturbed() -> None:
    quiet = Finding("prefill", "ok", "520 tokens a second")
    assert judged(quiet, spread([500.0, 520.0, 610.0])) == quiet
    disturbed = judged(quiet, spread([520.0, 21.0, 480.0]))
    assert (disturbed.verdict, disturbed.advice) == ("warn", ADVICE)
    assert disturbed.said == (
        "520 tokens a second; disturbed: of runs of the same work one took 24.8 times as long as another"
    )
    slow = Finding("disk speed", "warn", "slow", "use a faster disk")
    assert judged(slow, 2.0).advice == f"use a faster disk; {ADVICE}"
