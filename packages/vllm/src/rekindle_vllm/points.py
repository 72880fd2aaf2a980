"""Resume points: after which tokens an engine can go on from what is stored, and which of them are worth keeping.

With full attention alone that is after every record. A group with windows or states needs more there: the parts that
end, which are stored for some points only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rekindle.store.values import StoredBlock
from rekindle_vllm.groups import Groups
from rekindle_vllm.requests import Scheduled, Tracked


class ResumePoints:
    """The points of an engine with these groups."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def last(self, first: int, found: Sequence[StoredBlock], computed: int) -> int:
        """The last point that the records `found`, from number `first` on, give; `computed` tokens if none is after
        these."""
        size = self._groups.record_tokens
        for count in range(len(found), 0, -1):
            point = (first + count) * size
            if point <= computed:
                break
            if point % self._groups.resume_tokens == 0 and self._is_whole(point, first, found):
                return point
        return computed

    def earliest(self, found: Sequence[StoredBlock]) -> int | None:
        """The first point that the records `found`, from the first one on, give."""
        if not self._groups.ending_parts:
            return None
        step = self._groups.resume_tokens
        points = range(step, len(found) * self._groups.record_tokens + 1, step)
        return next((point for point in points if self._is_whole(point, 0, found)), None)

    def _is_whole(self, point: int, first: int, found: Sequence[StoredBlock]) -> bool:
        """Whether all parts that a point needs are stored, or in the engine's memory, as all before `first` are."""
        needs = self._groups.needs(point)
        return all(part in found[record - first].parts for part, record in needs if record >= first)

    def reached(self, tracked: Tracked, each: Scheduled, known: int) -> list[int]:
        """The points after which a step may leave all that an engine needs, of the request's `known` tokens.

        Windows: the last point. States: those after which the engine itself keeps them; the first one, which others
        that begin alike may share; and in a reply all, as nobody knows where it will end. A state is where a step ends.
        """
        step, since = self._groups.resume_tokens, tracked.since
        if not self._groups.ending_parts:
            return []
        if not self._groups.state_groups:
            last = known // step * step
            return [last] if last > since else []
        points = {point for _, _, point in each.states}
        if known in (each.computed, each.computed + each.tokens) and (
            not tracked.points or known > tracked.prompt_tokens
        ):
            points.add(known)
        return sorted(point for point in points if since < point <= known and point % step == 0)

    def worth_keeping(self, points: Collection[int], prompt_tokens: int) -> set[int]:
        """Of a branch's points: the first two, which others that begin alike share, the last of its prompt, and its
        last."""
        ordered = sorted(set(points))
        in_prompt = [point for point in ordered if point <= prompt_tokens]
        return {*ordered[:2], *in_prompt[-1:], *ordered[-1:]}
