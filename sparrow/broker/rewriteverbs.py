"""The broker's verbs for jobs that rewrite the lake; the rules are in rewriting.py."""

from __future__ import annotations

from collections.abc import Sequence

from sparrow.broker.rewriting import Rewriting
from sparrow.model.rewrite import RewritePlan, Swap


class RewriteVerbs:
    """A part of the broker."""

    _rewriting: Rewriting

    def _check_open(self) -> None:
        raise NotImplementedError

    async def plan_rewrite(self, topic: str, *, hold_s: float = 0.0) -> RewritePlan:
        """What a job that compacts or merges the segments of a topic goes by. For ``hold_s`` the files stay
        where they are whatever becomes of their segments."""
        self._check_open()
        return self._rewriting.plan(topic, hold_s)

    async def swap_segments(
        self, topic: str, partition: int, remove: Sequence[str], drafts: Sequence[str], *, kind: str
    ) -> Swap:
        """Puts drafts, files that a job wrote beside the segments, in the place of neighbouring segments,
        after each row of them has been checked. ``kind`` is "compact" or "merge"; names are those of files
        in the partition's directory."""
        self._check_open()
        return await self._rewriting.swap(topic, partition, remove, drafts, kind)
