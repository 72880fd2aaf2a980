"""What a block pool refuses, it refuses under `python -O` too, and nothing has happened then."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISUSES = """
from rekindle.cache import BlockPool, BlockTable, block_hash, root_hash
import numpy as np

ROOT = root_hash(fingerprint=b"", namespace="", cache_salt="", secret=b"")
pool = BlockPool(num_blocks=3, block_tokens=2)
free, named, private = (pool.allocate() for _ in range(3))
pool.register(named, block_hash(ROOT, [1, 2]), ROOT, [1, 2])
pool.release(free)
table = BlockTable(pool)
by_block = [getattr(pool, each) for each in "refs name parent ids is_private share release demote evict".split()]
calls = [(operation, block) for operation in by_block for block in (-1, 3, 1.0, "1", None)]
calls += [(pool.copy_on_write, block, 1) for block in (-1, 3, free, None)]
calls += [(pool.register, block, b"n" * 32, ROOT, [3, 4]) for block in (-1, 3, free, named, None)]
calls += [(pool.register_tail, block, ROOT, [3]) for block in (-1, 3, free, named, None)]
calls += [(pool.register, private, name, ROOT, [3, 4]) for name in (b"n", "n" * 32, 7, None)]
calls += [(pool.register, private, b"n" * 32, name, [3, 4]) for name in (b"n", "n" * 32, 7, None)]
calls += [(look, name, [1, 2]) for look in (pool.find, pool.peek) for name in (b"n", "n" * 32, 7, None)]
bad_ids = ([-1, 2], [1, 2**32], [1.0, 2.0], np.zeros((1, 2), np.uint32), np.zeros(2), "ab", b"ab", 5, None)
looks = pool.find, pool.peek, pool.find_child, pool.try_reuse_prefix
calls += [(look, b"n" * 32, ids) for look in looks for ids in bad_ids]
calls += [(pool.register, private, b"n" * 32, ROOT, ids) for ids in (*bad_ids, [1], [1, 2, 3])]
calls += [(pool.register_tail, private, ROOT, ids) for ids in (*bad_ids, [], [1, 2])]
calls += [(pool.allocate_many, count) for count in (-1, 1.0, "1", None)]
calls += [(pool.copy_on_write, named, num) for num in (-1, 3, 1.0)]
calls += [(BlockPool, *sizes) for sizes in ((0, 2), (2, 0), (2.0, 2), (2, "2"), (None, 2))]
calls += [(pool.release, free), (pool.share, free)]
calls += [(pool.set_quota, root, 1) for root in (b"n", "n" * 32, None)]
calls += [(pool.set_quota, ROOT, most) for most in (-1, 1.0, "1")]
calls += [(pool.try_reuse_prefix, root, [1, 2]) for root in (b"n", "n" * 32, None)]
calls += [(table.publish, [1], ROOT), (table.seal, [1], ROOT), (table.truncate, 1), (table.truncate, -1)]
for number, (operation, *arguments) in enumerate(calls):
    try:
        operation(*arguments)
    except ValueError:
        pool.check()
        if (pool.num_free, pool.num_held, pool.refs(named), pool.refs(private)) == (1, 2, 1, 1):
            continue
    raise SystemExit(f"{operation}{arguments}: not refused, or something happened")
print("refused", len(calls))
"""


@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["plain", "optimised"])
def test_misuse_is_a_value_error_and_nothing_happens(flags: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, *flags, "-c", MISUSES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("refused ")) > 100
