"""What a type checker says of code that uses the library: nothing of the examples, the place of each wrong keyword."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRONG = """
from rekindle import Engine
from rekindle.cache import CacheManager

told = [{"role": "user", "content": "Hi"}]
engine = Engine(model="pocket", store="off", hot_bytes="1GiB")
engine.chat("ada", told, temperature=0, stop="x", tools=None, namespace="team")
Engine(hot_byte=1)  # wrong
Engine.from_pretrained("pocket", kv="int8")  # wrong
engine.chat("ada", told, temperatur=0)  # wrong
engine.stream(None, told, max_tokens="3")  # wrong
engine.generate("Hi", tools=[])  # wrong
engine.prefill("ada", told, open_ends=True)  # wrong
CacheManager[str](max_entrys=3)  # wrong
"""


def test_mypy_finds_wrong_keywords_and_nothing_in_the_examples(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", "--no-pretty"]
    done = subprocess.run([*command, "examples", str(wrong)], cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"^(.*):(\d+): error: .*\[(?:call-arg|arg-type)\]$", done.stdout, re.MULTILINE)
    marked = [number for number, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(int(line) for _, line in found) == marked, done.stdout + done.stderr
    assert {Path(path).name for path, _ in found} == {"wrong.py"} and done.stdout.count("error:") == len(marked)
