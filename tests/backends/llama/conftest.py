"""What needs a real llama-server is collected where there is one: named by `LLAMA_SERVER`, or on the path."""

from __future__ import annotations

from tests.backends.llama.real_server import executable

collect_ignore = [] if executable() else ["test_real_slots.py", "test_real_states.py", "test_scripted_llama.py"]
