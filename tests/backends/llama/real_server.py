"""A llama-server of one's own, where there is one, by token ids and slots."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

STARTS_WITHIN_S = 120.0


def executable() -> str | None:
    """The llama-server that `LLAMA_SERVER` names, or the one on the path; None where there is none."""
    return shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))


class LlamaServer:
    """A process with slots whose files are in `folder`; ended when it is left."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = executable()
        assert found, "there is no llama-server"
        self.folder = folder
        own = ("--host", "127.0.0.1", "--port", str(port), "--slot-save-path", f"{folder}/", "-t", "1", "-np", "3")
        command = [found, "-m", str(model), *own, "--cache-ram", "0", *flags]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=300)

    def __enter__(self) -> LlamaServer:
        end = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < end:
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            try:
                if self._client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self.__exit__(None, None, None)
        raise TimeoutError(f"llama-server does not answer within {STARTS_WITHIN_S:.0f} s")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self._client.close()
        self._log.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.post(path, json=body).raise_for_status().json()
        return answer

    def tokenize(self, text: str) -> list[int]:
        return list(self._post("/tokenize", {"content": text, "add_special": True})["tokens"])

    def complete(self, ids: Sequence[int], num_tokens: int, slot: int) -> tuple[list[int], int]:
        """The likeliest tokens that follow, and how many tokens of the prompt were reused."""
        answer = self._completed(ids, num_tokens, slot, top_k=1, return_tokens=True)
        return answer["tokens"], answer["timings"]["cache_n"]

    def go_back(self, ids: Sequence[int], slot: int) -> int:
        """Have a slot go back to these tokens of its text; how many of them were reused."""
        return int(self._completed(ids, 0, slot)["timings"]["cache_n"])

    def scored(self, ids: Sequence[int], num_tokens: int, slot: int) -> tuple[list[tuple[int, float]], int]:
        """As `complete`, each token with its log probability."""
        answer = self._completed(ids, num_tokens, slot, n_probs=1)
        found = [(each["id"], each["logprob"]) for each in answer["completion_probabilities"]]
        return found, answer["timings"]["cache_n"]

    def _completed(self, ids: Sequence[int], num_tokens: int, slot: int, **more: Any) -> dict[str, Any]:
        body = {"prompt": [int(each) for each in ids], "n_predict": num_tokens, "id_slot": slot, "temperature": 0}
        return self._post("/completion", {**body, "ignore_eos": True, **more})

    def save(self, slot: int, name: str) -> Path:
        self._post(f"/slots/{slot}?action=save", {"filename": name})
        return self.folder / name

    def restore(self, slot: int, path: Path) -> int:
        """Restore a file in the server's folder; return its tokens."""
        return int(self._post(f"/slots/{slot}?action=restore", {"filename": path.name})["n_restored"])

    def erase(self, slot: int) -> None:
        self._post(f"/slots/{slot}?action=erase", {})
