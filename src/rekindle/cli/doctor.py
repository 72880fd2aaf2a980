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

from rekindle.cli.findings import Finding, judged, several, spread
from rekindle.cli.settings import with_settings
from rekindle.config import ModelSettings, Settings

if TYPE_CHECKING:
    from rekindle.compute.devices import Chosen
    from rekindle.spec import KVLayout
import contextlib
import errno
import importlib
import importlib.metadata
import platform
import re
import socket

from rekindle.cli.console import show_duration
from rekindle.cli.remote import Remote
from rekindle.config import ServerSettings
from rekindle.errors import RekindleError

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
BUILT_AFTER = 1735689600  # 2025-01-01: an earlier clock was never set
CLOCK_SLACK_S = 5.0
ANSWER_S = 5.0  # our server answers a health check at once
OURS = "our server runs on"
IMPORTED_AS = {"pyyaml": "yaml"}  # packages whose module has another name
MISSING, BROKEN = "is missing", "cannot be imported"


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
    from rekindle.cli import device_probes

    yield from device_probes.probe_devices()
    finding, chosen = device_probes.probe_choice(settings.model)
    yield finding
    if chosen is not None:
        yield from _kernels(settings.model, chosen)
        yield device_probes.probe_memory(settings.cache, chosen.memory)
    port = probe_port(settings.server)
    yield port
    yield probe_clock(newest_change(settings.store.directory()) if settings.store.enabled else None, time.time())
    if settings.store.enabled:
        yield from _store(settings)
    else:
        yield Finding("store", "warn", "off", "nothing survives a restart: give a directory by --store")
    if chosen is not None:
        yield from _model(settings, chosen, is_served=port.said.startswith(OURS))


def _kernels(settings: ModelSettings, chosen: Chosen) -> Iterator[Finding]:
    from rekindle.cli import device_probes, model_probes

    yield device_probes.probe_kernel_library(chosen)
    if chosen.kernels.library is not None:
        yield model_probes.probe_kernel_speed(chosen.kernels.library, settings.threads)


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


def _model(settings: Settings, chosen: Chosen, *, is_served: bool) -> Iterator[Finding]:
    from rekindle.cli import disk_probes, model_probes

    findings, loaded = model_probes.probe_model(settings)
    yield from findings
    layers = model_probes.USUAL_LAYERS if loaded is None else loaded.spec.layout.layers
    dtype = model_probes.USUAL_DTYPE if loaded is None else loaded.dtype
    place = model_probes.Place(chosen.device, chosen.compute)
    if loaded is not None:
        place = model_probes.Place(loaded.device, loaded.compute)
    yield from model_probes.probe_kernels(layers, dtype, place, settings.cache.block_tokens)
    if loaded is not None:
        rates, steps = model_probes.measure_steps(loaded)
        rate = median(rates)
        said = f"{rate:,.0f} tokens a second in a prompt of {model_probes.PREFILL_TOKENS[1]}"
        yield judged(Finding("prefill", "ok", said), spread(rates))
        said = f"{1e3 * median(steps):,.1f} ms for a token after it, on {place}"
        yield judged(Finding("step", "ok", said), spread(steps))
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


# Probes for this machine: versions, the clock, the port.
#
# Every probe reports failures as findings instead of raising. Nothing here loads a model or touches the store.


def probe_versions() -> Iterator[Finding]:
    """Check Python and every package that serving needs against the ranges in our metadata."""
    try:
        ours = importlib.metadata.metadata("rekindle")
    except importlib.metadata.PackageNotFoundError:
        said = "unknown: rekindle runs from its sources, without the metadata that says what it needs"
        yield Finding("versions", "warn", said, "pip install '.[serve]' in the checkout has the rest checked, too")
        return
    found = [in_range("python", platform.python_version(), ours["Requires-Python"] or "")]
    for requirement in ours.get_all("Requires-Dist") or ():
        needed, _, condition = requirement.partition(";")
        if condition and "serve" not in condition:
            continue
        match = re.fullmatch(r"([\w.-]+)\s*(.*)", needed.strip())
        assert match is not None, f"our metadata requires {requirement!r}"
        found.append(package(match[1], match[2]))
    good = [f"{finding.topic} {finding.said}" for finding in found if finding.verdict == "ok"]
    if good:
        yield Finding("versions", "ok", ", ".join(good))
    yield from (finding for finding in found if finding.verdict != "ok")


def is_missing(finding: Finding) -> bool:
    """Whether a finding of `probe_versions` says that a package cannot be used at all."""
    return finding.said.startswith((MISSING, BROKEN))


def package(name: str, wanted: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(IMPORTED_AS.get(name, name.replace("-", "_")))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "fail", f"{MISSING}: {wanted} is needed", "pip install 'rekindle[serve]'")
    except (ImportError, OSError) as error:
        return Finding(name, "fail", f"{BROKEN}: {error}", f"pip install --force-reinstall {name}")
    return in_range(name, version, wanted)


def in_range(name: str, version: str, wanted: str) -> Finding:
    """`wanted` is comma-separated bounds of the forms >=X and <X, the only ones our metadata has."""
    for bound in filter(None, wanted.split(",")):
        sign, number = re.findall(r"(>=|<)\s*([\d.]+)", bound)[0]
        newer = _release(version) >= _release(number)
        if newer != (sign == ">="):
            what = "too new" if newer else "too old"
            advice = f"install Python {wanted}" if name == "python" else f"pip install '{name}{wanted}'"
            return Finding(name, "fail", f"{version} is {what}: {wanted} is needed", advice)
    return Finding(name, "ok", version)


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: 2.13.0+cpu -> (2, 13)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def probe_clock(newest: float | None, now: float) -> Finding:
    """Check whether wall time is sane; `newest` is the time of the latest write to the store."""
    if now < BUILT_AFTER:
        return Finding("clock", "fail", f"says {time.strftime('%Y-%m-%d', time.gmtime(now))}", "set the clock")
    if newest is not None and newest > now + CLOCK_SLACK_S:
        lag = show_duration(newest - now)
        return Finding("clock", "warn", f"is {lag} before the last use in the store", "set it: last uses count as now")
    return Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def newest_change(directory: Path) -> float | None:
    """The time of the latest write to a file below the directory; None if there is no file."""
    times = [path.lstat().st_mtime for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    return max(times, default=None)


def probe_port(settings: ServerSettings) -> Finding:
    """Check whether the port is free, or who uses it."""
    address = f"{settings.host}:{settings.port}"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.create_server((settings.host, settings.port), family=family):
            return Finding("port", "ok", f"{address} is free")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            advice = "choose another with --host or --port"
            return Finding("port", "fail", f"{address} cannot be listened on: {error.strerror or error}", advice)
    return _who_listens(settings, address)


def _who_listens(settings: ServerSettings, address: str) -> Finding:
    """Check whether our server has the port, and its health."""
    answer = None
    with contextlib.suppress(RekindleError):
        answer = Remote.of(settings, timeout_s=ANSWER_S).ask("GET", "/health/ready")
    if not isinstance(answer, dict) or not {"status", "problems"} <= set(answer):
        return Finding("port", "fail", f"{address} belongs to another program", "stop it, or choose another --port")
    busy = f", with {answer['running']} requests" if "running" in answer else ""  # only with its key
    text = f"{OURS} {address}{busy}"
    if answer["status"] == "ok":
        return Finding("port", "ok", text)
    problems = "; ".join(answer.get("problems", ())) or "look at its log"
    return Finding("port", "warn", f"{text}, but it is {answer['status']}", problems)
