"""What holds for all tests: their settings, their environment, how hard Hypothesis looks, which of them run.

In CI a skipped test is a failed one: what is not run is not known to work. Variables of the person who runs the tests
reach neither them nor the processes they start. `HYPOTHESIS_PROFILE=torture` runs every state machine for long.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.killers import has_killers, is_killer
from tests.needs import needs_of
from tests.programs import missing
from tests.proofs import share

TORTURE = 40  # times as many examples of a machine, each twice as long
QUICK = 5  # so many times fewer of them with --quick

# Speed is no part of what tests say: no deadlines.
settings.register_profile("default", deadline=None)
# What lands must not depend on the luck of a seed; whoever works on it and `make torture` look further.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("torture", deadline=None, max_examples=2_000, suppress_health_check=list(HealthCheck))
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)

for name in [name for name in os.environ if name.startswith("REKINDLE_")]:
    del os.environ[name]

# On Intel's processors a row of a product depends on how many rows there are, in fp32 (MKL) and in bf16 (AMX), unless
# the libraries are told otherwise before they are loaded. Others do without, and the words would send them another way.
CPUINFO = Path("/proc/cpuinfo")
if CPUINFO.exists() and "GenuineIntel" in CPUINFO.read_text():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Kernels for cards are interpreted: Triton asks when it is imported, by other libraries, too. `make gpu` compiles them.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that run beside each other share the cores. Two teams of threads on the same two wait for each other at every
# operation, so each worker computes with one thread, as do the servers it starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# Folders of tests are in memory where there is plenty: stores sync thousands of times, each time 5 ms on a disk.
NUMBERS = itertools.count()
MEMORY, PLENTY = Path("/dev/shm"), 8 << 30
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= PLENTY:
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(MEMORY)

share()


def tortured(usual: settings) -> settings:
    """A machine's own settings, made to look much longer."""
    return settings(
        usual,
        max_examples=TORTURE * usual.max_examples,
        stateful_step_count=2 * usual.stateful_step_count,
        suppress_health_check=list(HealthCheck),
    )


def hastened(usual: settings) -> settings:
    """A machine's own settings with fewer examples."""
    return settings(usual, max_examples=max(usual.max_examples // QUICK, 5))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for one test, gone after it unless it failed.

    No other test has its name, so that nothing which is cached by a path is of another test.
    """
    failed = request.session.testsfailed
    path = tmp_path_factory.mktemp(
        f"{next(NUMBERS)}-{re.sub(r'[^a-zA-Z0-9]', '_', request.node.name)[:30]}", numbered=False
    )
    yield path
    if request.session.testsfailed == failed:
        shutil.rmtree(path, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without what needs torch, a process, a browser or minutes")
    parser.addoption("--gate", action="store_true", help="the quick tests, and all that fail on a mutant")
    parser.addoption("--long", action="store_true", help="the tests marked as long too, which `make long` runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("--gate") and has_killers(collection_path)
    is_short = config.getoption("--quick") or config.getoption("--gate")
    return (is_short and not chosen and bool(needs_of(collection_path))) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set[pytest.Item]()
    if config.getoption("--gate"):
        left_out = {item for item in items if needs_of(item.path) and not is_killer(item.nodeid)}
    if not config.getoption("--long"):
        left_out |= {item for item in items if item.get_closest_marker("long")}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items if config.option.markexpr else ():
        for need in needs_of(item.path):
            item.add_marker(need)
    is_short = config.getoption("--quick") or config.getoption("--gate")
    machines = {item.cls: item for item in items if isinstance(item, pytest.Function) and item.cls is not None}
    for machine, item in machines.items():
        usual = getattr(machine, "settings", None)
        if not isinstance(usual, settings):
            continue
        if PROFILE == "torture":
            machine.settings = tortured(usual)
        elif is_short and not (config.getoption("--gate") and is_killer(item.nodeid)):
            machine.settings = hastened(usual)


def pytest_collection_finish() -> None:
    gc.freeze()  # the tests stay, so they are not searched for garbage again and again


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # a model that a test loads may have set more


def pytest_report_header() -> str:
    lacking = missing()
    return f"without {', '.join(lacking)}: tests of it are skipped" if lacking else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped and os.environ.get("CI"):
        terminalreporter.section("skipped tests fail in CI", red=True, bold=True)
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr[-1] if report.longrepr else ''}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
