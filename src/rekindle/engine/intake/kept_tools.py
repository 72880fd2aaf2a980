"""Tools of an agent whose next prompt comes without them, as clients send that let the model summarise its history.

Many templates write tools before all messages, so such a prompt would be computed from its beginning, just when it is
longest. The agent's last tools stay in the prompt if it continues stored text with them and not without; calls
are not read in the reply, as nobody offered tools. Belongs to the intake thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.engine.types import GenerationRequest

KIND = "compaction"
MOST_AGENTS = 1024  # whose tools are remembered
LEAST_GAIN = 256  # bytes of stored text; less is not worth another prompt than was sent
Tools = Sequence[Mapping[str, Any]]


class KeptTools:
    """The last tools of each agent, those of the most recently used ones."""

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[str, str], Tools] = OrderedDict()

    def note(self, request: GenerationRequest) -> None:
        """Remember the tools of a request that names its agent."""
        if request.agent is None or not request.tools:
            return
        key = request.namespace, request.agent
        self._last[key] = request.tools
        self._last.move_to_end(key)
        while len(self._last) > MOST_AGENTS:
            self._last.popitem(last=False)

    def of(self, request: GenerationRequest) -> Tools | None:
        """Return the tools that the agent of a request without tools had in an earlier one; None if there are none."""
        wants = request.task == "generate" and request.reuse != "off" and bool(request.messages) and not request.tools
        return self._last.get((request.namespace, request.agent)) if wants and request.agent is not None else None


def names_of(tools: Tools) -> str:
    """Return the names of tools, for reports."""
    functions = (tool.get("function", tool) for tool in tools)
    return ", ".join(str(each.get("name", "")) for each in functions if isinstance(each, Mapping))
