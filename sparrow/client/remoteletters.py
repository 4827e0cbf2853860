"""The dead letters of a subscription of a broker elsewhere."""

from __future__ import annotations

import builtins
from typing import Any

from sparrow.client import verbs
from sparrow.client.session import Session
from sparrow.kernel.deadletter import Statistics
from sparrow.kernel.replay import ReplayJob, ReplayPlan
from sparrow.model.deadletter import DeadLetter


class RemoteDeadLetters:
    """See ``sparrow.broker.subscription.DeadLetterBox``."""

    def __init__(self, name: str, session: Session) -> None:
        self._name = name
        self._session = session

    def __repr__(self) -> str:
        return f"<Dead letters of {self._name!r}>"

    async def _call(self, verb: str, result: Any = None, /, **arguments: Any) -> Any:
        return await verbs.call(
            self._session, f"dead_letters.{verb}", result, subscription=self._name, **arguments
        )

    async def list(self, *, limit: int = 100, **selection: Any) -> builtins.list[DeadLetter]:
        """Dead letters, oldest first. Selection: ids, start_at_us, end_at_us, reason, filter."""
        return [verbs.to_letter(one) for one in await self._call("list", Any, limit=limit, **selection)]

    async def get(self, message_id: str) -> DeadLetter:
        """One dead letter by the id of its message."""
        return verbs.to_letter(await self._call("get", Any, message_id=message_id))

    async def replay(
        self,
        *,
        rate_per_s: float = 100.0,
        dry_run: bool = False,
        destination: str | None = None,
        **selection: Any,
    ) -> Any:
        """Delivers them again under their ids, in the background, here or to another subscription; returns
        the job. A dry run only counts."""
        result = ReplayPlan if dry_run else ReplayJob
        if destination is not None:  # Brokers that do not know it are asked as ever.
            selection["destination"] = destination
        return await self._call("replay", result, rate_per_s=rate_per_s, dry_run=dry_run, **selection)

    async def replays(self) -> builtins.list[ReplayJob]:
        """The replay jobs of this subscription."""
        found: builtins.list[ReplayJob] = await self._call("replays", builtins.list[ReplayJob])
        return found

    async def wait(self, replay_id: str) -> ReplayJob:
        """Returns the job when it has ended."""
        found: ReplayJob = await self._call("wait", ReplayJob, replay_id=replay_id)
        return found

    async def abort(self, replay_id: str) -> Any:
        return await self._call("abort", ReplayJob | None, replay_id=replay_id)

    async def purge(self, *, dry_run: bool = False, **selection: Any) -> int:
        """Gives them up for good; how many."""
        return int(await self._call("purge", int, dry_run=dry_run, **selection))

    async def statistics(self) -> Statistics:
        """Counts by topic and reason, oldest and newest."""
        found: Statistics = await self._call("statistics", Statistics)
        return found
