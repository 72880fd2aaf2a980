"""Probes of `rekindle doctor` for this machine: versions, devices, memory, the clock, the port.

Every probe reports failures as findings instead of raising. Nothing here loads a model or touches the store.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rekindle.cli.findings import Finding
from rekindle.cli.remote import Remote
from rekindle.cli.units import show_duration
from rekindle.config import CacheSettings, ServerSettings, show_bytes
from rekindle.errors import RekindleError

SMALL_HOT_BYTES = 256 << 20
BUILT_AFTER = 1735689600  # 2025-01-01: an earlier clock was never set
CLOCK_SLACK_S = 5.0
ANSWER_S = 5.0  # our server answers a health check at once
OURS = "our server runs on"
IMPORTED_AS = {"pyyaml": "yaml"}  # packages whose module has another name
MISSING, BROKEN = "is missing", "cannot be imported"


def probe_versions() -> Iterator[Finding]:
    """Check Python and every package that serving needs against the ranges in our metadata."""
    python = importlib.metadata.metadata("rekindle")["Requires-Python"] or ""
    found = [in_range("python", platform.python_version(), python)]
    for requirement in importlib.metadata.requires("rekindle") or ():
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


def probe_devices(chosen: str) -> Iterator[Finding]:
    """Report the processor and every accelerator torch finds; the chosen one must be usable."""
    import torch

    from rekindle.errors import ConfigError
    from rekindle.model.device import check_device

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("cpu", "ok", f"{cores} cores, {capability}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(f"cuda:{index}", "ok", f"{name}, {show_bytes(free)} of {show_bytes(total)} free")
    if torch.backends.mps.is_available():
        yield Finding("mps", "ok", "found; an experiment, trust it when the self-test below passes")
    try:
        check_device(chosen)
    except ConfigError as error:
        yield Finding("device", "fail", str(error), "choose another with --device, or repair the driver")
    else:
        yield Finding("device", "ok", f"{chosen} is used")


def probe_memory(settings: CacheSettings, device: str) -> Finding:
    """Check whether there is memory for hot KV."""
    from rekindle.engine.capacity import free_bytes, hot_budget

    free, wanted = free_bytes(device), hot_budget(settings, device)
    text = f"hot KV takes {show_bytes(wanted)} of {show_bytes(free)} free"
    if wanted > free:
        return Finding("memory", "fail", text, f"give less: --hot-bytes {free // 2 >> 20}MiB")
    if settings.hot_bytes is None and wanted < SMALL_HOT_BYTES:
        return Finding("memory", "warn", text, "few agents stay hot: free memory, or set --hot-bytes")
    if wanted > 0.8 * free:
        return Finding("memory", "warn", text, "little is left for the weights and the rest: lower --hot-bytes")
    return Finding("memory", "ok", text)


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
