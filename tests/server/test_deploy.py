"""examples/deploy and docs/operating.md: figures, settings, flags and files that they name are there."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rekindle.config import ENV_PREFIX, SETTINGS, Settings
from rekindle.server.observers.gauges import STORE, TIER
from tests.needs import ROOT
from tests.programs import program
from tests.server.conftest import Served

DEPLOY = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "operating.md").read_text()
OF_PROMETHEUS = {"up": {"job", "instance"}}
OF_SCRAPES = {"instance", "job", "le"}
OF_CADDY = {"REKINDLE_NAME", "REKINDLE_UPSTREAM"}
Known = Mapping[str, set[str]]


@pytest.fixture(scope="module")
def known(served: Served) -> Known:
    """The labels of each figure: those of a scrape, and those that need an object tier or a limit."""
    served.chat("Say where the spare lamp is.", agent="an-observed-agent")
    refused = served.send("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "lamp " * 9999}]})
    assert refused.status == 400
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for family in text_string_to_metric_families(served.send("GET", "/metrics").body.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set(OF_SCRAPES)).update(sample.labels)
    for figure in (*STORE, *TIER):
        name = f"rekindle_{figure.name}{'_total' if figure.kind == 'counter' else ''}"
        found.setdefault(name, set(OF_SCRAPES)).update(() if figure.label is None else figure.label[:1])
    found["rekindle_tokens_per_day"] = {*OF_SCRAPES, "namespace", "kind"}  # with a limit
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "dashboard.json").read_text())["panels"])


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m").replace("$instance", ".*")


def unknown(expression: str, known: Known) -> list[str]:
    """Figures and labels of an expression that no scrape has; ValueError if it is not PromQL."""
    found: list[str] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            labels = known.get(node.name or "")
            asked = [matcher.name for matcher in node.matchers.matchers]
            found.extend([str(node.name)] if labels is None else [name for name in asked if name not in labels])
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.extend(name for name in node.modifier.labels if not any(name in labels for labels in known.values()))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def test_expressions_ask_for_figures_and_labels_that_there_are(known: Known) -> None:
    asked = list(expressions())
    assert len(asked) > 40
    assert {expression: names for expression in asked if (names := unknown(expression, known))} == {}


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("rekindle_dead_thread > 0", ["rekindle_dead_thread"]),
        ('rate(rekindle_requests_total{code="503"}[5m])', ["code"]),
        ("sum by (stat) (rekindle_pool_blocks)", ["stat"]),
    ],
)
def test_what_no_scrape_has_is_found(expression: str, names: list[str], known: Known) -> None:
    assert unknown(expression, known) == names


def test_figures_of_the_page_are_there(known: Known) -> None:
    figures = set(re.findall(r"`(rekindle_\w+)`", PAGE))
    assert figures and {name for name in figures if name not in known and f"{name}_count" not in known} == set()


def test_the_page_has_every_alert() -> None:
    assert re.findall(r"^\| `(Rekindle\w+)` \|", PAGE, re.MULTILINE) == [rule["alert"] for rule in rules()]
    assert {rule["labels"]["severity"] for rule in rules()} == {"page", "warn", "info"}
    assert set(re.findall(r"`(Rekindle[A-Z]\w+)`", PAGE)) <= {rule["alert"] for rule in rules()}


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(REKINDLE_\w+)=(.*)$", text, re.MULTILINE))


def test_settings_and_keys_are_taken() -> None:
    keys = variables((DEPLOY / "keys.env.example").read_text())
    settings = Settings.load(env=keys, config_path=DEPLOY / "rekindle.toml")
    assert set(settings.server.api_keys) == {"team", "other"} and settings.server.admin_key
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    given = {name: str(value) for name, value in services["rekindle"]["environment"].items()}
    given |= {"REKINDLE_PUBLIC_HOST": "llm.example"}  # Compose puts the name there
    assert Settings.load(env=keys | given, config_path=DEPLOY / "rekindle.toml").server.host == "0.0.0.0"


def test_flags_and_variables_exist() -> None:
    text = "".join(path.read_text() for path in DEPLOY.iterdir() if path.is_file()) + PAGE
    names = {f"{ENV_PREFIX}{name.upper()}" for name in SETTINGS} | OF_CADDY
    assert set(re.findall(r"REKINDLE_[A-Z_]+\b", text)) <= names
    flags = {known.flag for known in SETTINGS.values()} | {"--config"}
    commands = re.findall(r"rekindle serve(.*)|^CMD \[(\"serve\".*)\]", text, re.MULTILINE)
    used = {flag for found in commands for flag in re.findall(r"--[a-z-]+", "".join(found))}
    assert used and used <= flags
    assert set(re.findall(r"`--([a-z-]+)", PAGE)) - {"profile", "admin"} <= {str(flag)[2:] for flag in flags}


class Unit(configparser.RawConfigParser):
    """A systemd unit, whose keys are case-sensitive."""

    def optionxform(self, optionstr: str) -> str:
        """Return the key as it is written."""
        return optionstr


def test_the_unit_writes_where_the_settings_say() -> None:
    unit = Unit(strict=False, interpolation=None)
    unit.read(DEPLOY / "rekindle.service")
    service = unit["Service"]
    settings = Settings.load(
        env=variables((DEPLOY / "keys.env.example").read_text()), config_path=DEPLOY / "rekindle.toml"
    )
    assert settings.store.dir == Path("/var/lib") / service["StateDirectory"] / "store"
    assert float(service["TimeoutStopSec"]) > max(settings.server.stop_s, settings.server.drain_s)
    assert (service["Type"], service["ExecReload"]) == ("notify", "/bin/kill -USR2 $MAINPID")
    port = Unit(strict=False, interpolation=None)
    port.read(DEPLOY / "rekindle.socket")
    assert port["Socket"]["ListenStream"] == f"127.0.0.1:{settings.server.port}"
    assert "MemoryDenyWriteExecute" not in service


def test_files_that_others_mount_or_copy_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = {volume.split(":")[0] for each in services.values() for volume in each["volumes"] if volume[0] == "."}
    assert {name for name in mounted if not (DEPLOY / name).exists()} == {"./admin.key"}  # made by the operator
    docker = (DEPLOY / "Dockerfile").read_text()
    paths = [*re.findall(r"(\./\S+)", docker), "constraints.txt", services["rekindle"]["build"]["dockerfile"]]
    sources = (DEPLOY / "Dockerfile.dockerignore").read_text()
    paths += re.findall(r"^!(\S+)$", sources, re.MULTILINE)
    assert len(paths) > 10 and all((ROOT / path).exists() for path in paths)
    listed = set(re.findall(r"`([\w.]+)`", PAGE[: PAGE.index("## Size")]))
    hidden = {"Dockerfile.dockerignore"}
    assert {path.name for path in DEPLOY.iterdir() if path.is_file()} - hidden <= listed


def test_caddy_takes_the_file(tmp_path: Path) -> None:
    command = [program("caddy"), "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "Caddyfile")]
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(tmp_path))
    named = {"REKINDLE_NAME": "llm.example", "REKINDLE_UPSTREAM": "rekindle:7354"}
    done = subprocess.run(command, env=os.environ | homes | named, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
