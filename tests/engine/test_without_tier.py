"""The object tier is an extra: an engine without one does not import its packages, and one with it names what lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.errors import ConfigError

IMPORTS = """
import sys
import rekindle.engine.api, rekindle_backends.assembly, rekindle.server.app
assert not {"obstore", "cryptography", "rekindle_tier"} & sys.modules.keys()
"""


def test_an_engine_needs_no_package_of_the_tier() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_a_tier_without_its_package_is_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.extensions.entry_points", lambda group: ())
    engine = Engine(model=str(tmp_path / "none"), store=tmp_path / "store", tier=str(tmp_path / "tier"))
    with pytest.raises(ConfigError, match=r"tier needs packages .* pip install 'rekindle\[tier\]'"):
        engine.start()
