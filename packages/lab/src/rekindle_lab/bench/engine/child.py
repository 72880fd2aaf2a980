"""The process of one arm: `python -m rekindle_lab.bench.engine.child JOB`, JOB as JSON; see `job`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

from rekindle_lab.bench.engine import arms, llama_cpp_arm, openvino_arm, peer_arm, reuse_arm, transformers_arm
from rekindle_lab.bench.engine.job import MARK, Job
from rekindle_lab.record import Measurement

ARMS: dict[str, Callable[[Job], Iterator[Measurement]]] = {
    "hot": arms.hot,
    "warm": arms.warm,
    "memory": arms.memory,
    "reuse": reuse_arm.cost,
    "capacity": reuse_arm.capacity,
    "transformers": transformers_arm.speed,
    "transformers memory": transformers_arm.memory,
    "transformers first tokens": transformers_arm.first_tokens,
    "openvino": partial(peer_arm.speed, load=openvino_arm.load),
    "openvino memory": partial(peer_arm.memory, load=openvino_arm.load),
    "llama.cpp": partial(peer_arm.speed, load=llama_cpp_arm.load),
    "llama.cpp memory": partial(peer_arm.memory, load=llama_cpp_arm.load),
}


def main() -> None:
    """Run the job and print each measurement as it is taken."""
    job = Job(**json.loads(sys.argv[1]))
    for found in ARMS[job.arm](job):
        print(MARK + json.dumps(found.as_dict()), flush=True)


if __name__ == "__main__":
    main()
