"""A replica of the bundled model in a process of its own: claims a slot, lets an agent speak, and waits to be killed.

python -m tests.engine.replica_process MODEL STORE
"""

from __future__ import annotations

import json
import sys
import time

from rekindle import Engine

MESSAGE = {"role": "user", "content": "Remember that the copper key is in the attic."}


def main(store: str) -> None:
    settings = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "anticipate": "off"}
    engine = Engine.from_pretrained(store=store, slot="auto", **settings)
    reply = engine.chat("ada", [MESSAGE], temperature=0, max_tokens=20)
    assert engine.flush()
    print(json.dumps([engine.settings.store.slot, reply.text, reply.report.prompt_tokens]), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
