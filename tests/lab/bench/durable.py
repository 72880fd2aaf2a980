"""Waiting until a server has saved what was said: what a kill right behind it must find on disk."""

from __future__ import annotations

import time

from rekindle.harness.client import Client


def until_durable(client: Client) -> None:
    """Wait until all tokens of every agent are saved."""
    while any(each["saved_tokens"] < each["num_tokens"] for each in client.json("GET", "/v1/agents")["data"]):
        time.sleep(0.01)
