"""Write a model directory, or the bundled model, as a GGUF file, so that a llama.cpp server can replay the same day.

python tools/peer_gguf.py write pocket.gguf [--type bf16|f16|f32|q8_0] [--model DIR]   # needs numpy
python tools/peer_gguf.py check http://127.0.0.1:8080   # needs rekindle[serve]; the peer serves the bundled model

Weights are copied (rows of Q and K reordered for llama.cpp's rotary embedding), the tokenizer becomes "gpt2" BPE with
the pre-tokenizer "qwen2" (the bundled expression is Qwen 2's), the chat template is embedded. `check` counts the texts
whose tokens equal ours on the peer, and the prompts whose greedy replies do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "pocket" / "src" / "rekindle_pocket" / "model"
NUM_TALKS, NUM_WORDS, MAX_TOKENS = 40, 250, 32


def write(path: Path, directory: Path, kind: Any) -> None:
    """Write the file with matrices of a type of GGUF and print its size."""
    from rekindle_lab.bench.engine.gguf_model import write_gguf

    write_gguf(directory, path, kind)
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, matrices in {kind}")


def check(url: str) -> None:
    """Print how many texts have the same tokens on the peer, and how many greedy replies are the same."""
    import random

    from tokenizers import Tokenizer

    from rekindle import Engine
    from rekindle.config import Settings
    from rekindle.harness.http import connect
    from rekindle_pocket.conversations import conversation

    peer = connect(url, timeout_s=120)

    def post(path: str, body: dict[str, Any]) -> Any:
        return peer.post(path, json=body).raise_for_status().json()

    ours = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    chooser = random.Random(5)
    talks = [conversation(chooser, NUM_WORDS)["messages"] for _ in range(NUM_TALKS)]
    texts = [message["content"] for talk in talks for message in talk if message["content"]]
    texts += ["Größe, naïve café, 数字 🙂", "a  b\n\n c\t12345 don't", "x" * 300]
    same = sum(
        post("/extras/tokenize", {"input": text})["tokens"] == ours.encode(text, add_special_tokens=False).ids
        for text in texts
    )
    print(f"tokens: {same} of {len(texts)} texts the same")
    plain = [talk for talk in talks if not any(message.get("tool_calls") for message in talk)]
    equal = 0
    with Engine(Settings.load({"store": "off", "kv": "bf16", "threads": 2})) as engine:
        for talk in plain:
            prompt = talk[:-1]
            mine = engine.chat(None, prompt, temperature=0.0, max_tokens=MAX_TOKENS)
            body = {"messages": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
            theirs = post("/v1/chat/completions", body)
            assert theirs["usage"]["prompt_tokens"] == mine.report.prompt_tokens, "the prompts differ"
            equal += theirs["choices"][0]["message"]["content"] == mine.text
    print(f"greedy replies: {equal} of {len(plain)} the same (bf16 on both sides)")


def main() -> None:
    """Parse the command line and run the command."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "packages" / "lab" / "src")]  # the peer's environment has no rekindle
    from rekindle_lab.bench.engine.gguf_file import TENSOR_TYPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--type", choices=sorted(TENSOR_TYPES), default="bf16")
    writing.add_argument("--model", type=Path, default=MODEL, help="a llama, qwen2 or qwen3 model [the bundled one]")
    checking = commands.add_parser("check")
    checking.add_argument("url")
    given = parser.parse_args()
    if given.command == "write":
        write(given.path, given.model, given.type)
    else:
        check(given.url)


if __name__ == "__main__":
    main()
