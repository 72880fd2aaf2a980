"""Freed chunks that lie between others go back to the system when they are asked for."""

from __future__ import annotations

import subprocess
import sys

CHUNK, COUNT = 64 << 10, 2000  # below what is mapped apart
HELD = """
import ctypes
from rekindle import allocator

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) << 10

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resident()
chunks = [libc.malloc({chunk}) for _ in range({count})]
for chunk in chunks:
    ctypes.memset(chunk, 1, {chunk})
for number, chunk in enumerate(chunks):
    if number % 10:
        libc.free(chunk)
freed = resident() - before
allocator.trim()
print(freed, resident() - before)
"""


def test_free_memory_goes_back_to_the_system() -> None:
    code = HELD.format(chunk=CHUNK, count=COUNT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    freed, trimmed = map(int, done.stdout.split())
    assert freed > 0.9 * CHUNK * COUNT > 0.3 * CHUNK * COUNT > trimmed
