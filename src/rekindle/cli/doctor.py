"""doctor: check whether `rekindle serve` would work here with these settings. Runs the probes and prints findings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from rekindle.cli.findings import Finding
from rekindle.cli.probes import (
    OURS,
    is_missing,
    newest_change,
    probe_clock,
    probe_devices,
    probe_memory,
    probe_port,
    probe_versions,
)
from rekindle.cli.repeats import judged, several, spread
from rekindle.cli.settings import with_settings
from rekindle.config import ModelSettings, Settings

if TYPE_CHECKING:
    from rekindle.spec import KVLayout

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@with_settings()
def doctor(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> int:
    """Check versions, devices, the model, the store's disk and the port, and give advice; 1 if something fails."""
    console = Console(highlight=False, soft_wrap=True)
    found = []
    for finding in examine(settings):
        found.append(finding)
        if not as_json:
            console.print(line(finding))
    verdicts = [finding.verdict for finding in found]
    if as_json:
        typer.echo(json.dumps({"ok": "fail" not in verdicts, "findings": [asdict(finding) for finding in found]}))
    else:
        counts = (
            f"{verdicts.count('ok')} ok",
            f"{verdicts.count('warn')} to look at",
            f"{verdicts.count('fail')} failed",
        )
        console.print("\n" + ", ".join(counts))
    return 1 if "fail" in verdicts else 0


def line(finding: Finding) -> Text:
    """A finding as text: verdict, topic, result; below it the advice."""
    text = Text(f"{finding.verdict:<6}", STYLES[finding.verdict])
    text.append(f"{finding.topic}: {finding.said}", "default")
    if finding.advice:
        text.append(f"\n      → {finding.advice}", "default")
    return text


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known."""
    broken = False
    for finding in probe_versions():
        broken = broken or is_missing(finding)
        yield finding
    if broken:
        yield Finding("the rest", "fail", "not looked at", "install what is missing first")
        return
    device = settings.model.device
    usable = True
    for finding in probe_devices(device):
        usable = usable and finding.verdict != "fail"
        yield finding
    if usable:
        for finding in _kernels(settings.model):
            usable = usable and finding.verdict != "fail"
            yield finding
        yield probe_memory(settings.cache, device)
    port = probe_port(settings.server)
    yield port
    yield probe_clock(newest_change(settings.store.directory()) if settings.store.enabled else None, time.time())
    if settings.store.enabled:
        yield from _store(settings)
    else:
        yield Finding("store", "warn", "off", "nothing survives a restart: give a directory by --store")
    if usable:
        yield from _model(settings, is_served=port.said.startswith(OURS))


def _kernels(settings: ModelSettings) -> Iterator[Finding]:
    from rekindle.cli import kernel_speed, model_probes
    from rekindle.compute.load import choose_kernels

    finding = model_probes.probe_kernel_library(settings)
    yield finding
    library = choose_kernels(settings).library if finding.verdict != "fail" else None
    if library is not None:
        yield kernel_speed.probe_kernel_speed(library, settings.threads)


def _store(settings: Settings) -> Iterator[Finding]:
    from rekindle.cli import disk_probes

    directory = settings.store.directory()
    finding = disk_probes.probe_directory(directory)
    yield finding
    if finding.verdict == "fail":
        return
    yield from disk_probes.probe_stores(directory)
    yield disk_probes.probe_space(settings.store)
    yield from disk_probes.probe_file_system(directory)


def _model(settings: Settings, *, is_served: bool) -> Iterator[Finding]:
    from rekindle.cli import disk_probes, model_probes
    from rekindle.compute.load import choose_kernels

    findings, loaded = model_probes.probe_model(settings)
    yield from findings
    layers = model_probes.USUAL_LAYERS if loaded is None else loaded.spec.layout.layers
    dtype = model_probes.USUAL_DTYPE if loaded is None else loaded.dtype
    place = model_probes.Place(settings.model.device, choose_kernels(settings.model).library)
    yield from model_probes.probe_kernels(layers, dtype, place, settings.cache.block_tokens)
    if loaded is not None:
        rates = model_probes.prefill_rates(loaded)
        rate = median(rates)
        said = f"{rate:,.0f} tokens a second in a prompt of {model_probes.PREFILL_TOKENS[1]}"
        yield judged(Finding("prefill", "ok", said), spread(rates))
        if settings.store.enabled and disk_probes.nearest(settings.store.directory()).is_dir():
            layout = loaded.spec.layout
            lock = disk_probes.probe_lock(settings.store, loaded.spec.fingerprint, is_served=is_served)
            if lock is not None:
                yield lock
            yield _disk_speed(settings.store.directory(), layout, rate)


def _disk_speed(directory: Path, layout: KVLayout, rate: float) -> Finding:
    from rekindle.cli import disk_probes

    measured = several(lambda: disk_probes.measure_disk(directory, disk_probes.record_bytes(layout)))
    speeds = sorted((speed for speed in measured if speed is not None), key=lambda speed: speed.read)
    if len(speeds) < len(measured):
        return disk_probes.judge_speed(None, layout, rate)
    finding = disk_probes.judge_speed(speeds[len(speeds) // 2], layout, rate)
    return judged(finding, max(spread(speed.read for speed in speeds), spread(speed.written for speed in speeds)))
