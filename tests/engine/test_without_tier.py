"""The packages of the object tier are an extra: an engine without a tier does not import them."""

from __future__ import annotations

import subprocess
import sys

IMPORTS = """
import sys
import rekindle.engine.api, rekindle_backends.assembly, rekindle.server.app
assert not {"obstore", "cryptography"} & sys.modules.keys()
"""


def test_an_engine_needs_no_package_of_the_tier() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
