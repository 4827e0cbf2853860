"""The dead letters of a subscription over HTTP: list, replay, follow a replay, give up."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from sparrow.kernel.deadletter import PREFIX
from sparrow.kernel.replay import ReplayJob, ReplayPlan
from sparrow.model.access import Action
from sparrow.model.deadletter import DeadLetter
from sparrow.model.errors import InvalidArgument, ReplayNotFound
from sparrow.model.message import to_us
from sparrow.server.api.envelope import describe
from sparrow.server.api.family import Answer, Api, Req, answer, body, query, timestamp
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, post
from sparrow.server.api.subscriptions import ONE, held

TAG = "dead letters"
LETTERS_MAX = 1000

Moment = datetime | float


class LetterQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which dead letters to show, oldest first."""

    limit: int = 100
    reason: str = ""
    filter: str = ""


class LetterView(msgspec.Struct, kw_only=True):
    """A message that could not be delivered."""

    message: dict[str, Any]
    attempts: int
    reason: str
    last_error: str
    moved_at: str | None
    is_loop: bool


class LetterList(msgspec.Struct):
    """Dead letters, oldest first."""

    dead_letters: list[LetterView]


class Replay(msgspec.Struct, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """Which dead letters to deliver again: those moved from one time to before another, or by id, reason or
    filter. Whatever is given must hold. They go to their own subscription or to the destination."""

    start: Moment | None = None
    end: Moment | None = None
    destination_subscription_id: str | None = None
    ids: list[str] | None = None
    reason: str = ""
    filter: str = ""
    rate_per_s: float = 100.0
    dry_run: bool = False

    def to_selection(self) -> dict[str, Any]:
        """The selection of the broker."""
        return {
            "ids": tuple(self.ids or ()),
            "start_at_us": None if self.start is None else to_us(self.start),
            "end_at_us": None if self.end is None else to_us(self.end),
            "reason": self.reason,
            "filter": self.filter,
        }


class ReplayView(msgspec.Struct, kw_only=True):
    """A replay as it stands; a dry run has no id and only counts."""

    replay_id: str = ""
    message_count: int
    status: str
    replayed: int = 0
    failed: int = 0
    error: str = ""
    started_at: str | None = None
    updated_at: str | None = None
    destination_subscription_id: str


class ReplayList(msgspec.Struct):
    """The replays of a subscription."""

    replays: list[ReplayView]


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    """Which dead letters to give up for good."""

    reason: str = ""
    filter: str = ""
    dry_run: bool = False


class Purged(msgspec.Struct):
    """How many were given up."""

    purged: int


def routes(api: Api) -> list[Any]:
    """The handlers."""

    @get(
        f"{ONE}/dlq",
        opt=described(
            "List dead letters", tag=TAG, query=LetterQuery, answers={200: LetterList}, errors=(404, 409)
        ),
    )
    async def list_dead_letters(request: Req, subscription: str) -> Answer:
        wanted = query(request, LetterQuery)
        if not 1 <= wanted.limit <= LETTERS_MAX:
            raise InvalidArgument(f"limit must be from 1 to {LETTERS_MAX}, not {wanted.limit}")
        handle = await held(api, request, subscription, Action.READ)
        found = await handle.dead_letters.list(limit=wanted.limit, reason=wanted.reason, filter=wanted.filter)
        return answer(LetterList([_letter(each) for each in found]))

    @post(
        f"{ONE}/dlq/replay",
        opt=described(
            "Deliver dead letters again, under their ids",
            tag=TAG,
            description="With `destination_subscription_id` another subscription gets them and nobody else:"
            " each is stored again in its topic, with the attributes `replay_for`, `replay_from` and"
            " `replay_round`. The destination must read that topic, its filter must let the messages pass,"
            " and the caller must be allowed to subscribe to what it reads.",
            body=Replay,
            is_body_optional=True,
            body_example={"from": "2026-01-01T00:00:00Z", "to": "2026-02-01T00:00:00Z"},
            answers={202: ReplayView},
            errors=(404, 409),
        ),
    )
    async def replay_dead_letters(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Replay, is_optional=True)
        async with api.audited(request, "dead_letters.replay", subscription):
            handle = await held(api, request, subscription)
            destination = wanted.destination_subscription_id
            if destination is not None:
                await held(api, request, destination)
            job = await handle.dead_letters.replay(
                rate_per_s=wanted.rate_per_s,
                dry_run=wanted.dry_run,
                destination=destination,
                **wanted.to_selection(),
            )
        return answer(_replay(job, subscription, destination), 202)

    @get(
        f"{ONE}/dlq/replays",
        opt=described("List replays", tag=TAG, answers={200: ReplayList}, errors=(404, 409)),
    )
    async def list_replays(request: Req, subscription: str) -> Answer:
        handle = await held(api, request, subscription, Action.READ)
        jobs = await handle.dead_letters.replays()
        return answer(ReplayList([_replay(job, subscription) for job in jobs]))

    @get(
        f"{ONE}/dlq/replays/{{replay:str}}",
        opt=described("Look at a replay", tag=TAG, answers={200: ReplayView}, errors=(404, 409)),
    )
    async def get_replay(request: Req, subscription: str, replay: str) -> Answer:
        handle = await held(api, request, subscription, Action.READ)
        for job in await handle.dead_letters.replays():
            if job.replay_id == replay:
                return answer(_replay(job, subscription))
        raise ReplayNotFound(f"{subscription!r} has no replay {replay!r}")

    @delete(
        f"{ONE}/dlq/replays/{{replay:str}}",
        status_code=200,
        opt=described("Stop a replay", tag=TAG, answers={200: ReplayView}, errors=(404, 409)),
    )
    async def abort_replay(request: Req, subscription: str, replay: str) -> Answer:
        async with api.audited(request, "dead_letters.abort", subscription):
            handle = await held(api, request, subscription)
            job = await handle.dead_letters.abort(replay)
        return answer(_replay(job, subscription))

    @post(
        f"{ONE}/dlq/purge",
        status_code=200,
        opt=described(
            "Give dead letters up for good",
            tag=TAG,
            body=Purge,
            is_body_optional=True,
            body_example={"reason": "rejected", "dry_run": True},
            answers={200: Purged},
            errors=(404, 409),
        ),
    )
    async def purge_dead_letters(request: Req, subscription: str) -> Answer:
        wanted = await body(request, Purge, is_optional=True)
        async with api.audited(request, "dead_letters.purge", subscription):
            handle = await held(api, request, subscription)
            count = await handle.dead_letters.purge(
                dry_run=wanted.dry_run, reason=wanted.reason, filter=wanted.filter
            )
        return answer(Purged(count))

    return [
        list_dead_letters,
        replay_dead_letters,
        list_replays,
        get_replay,
        abort_replay,
        purge_dead_letters,
    ]


def _letter(letter: DeadLetter) -> LetterView:
    return LetterView(
        message=_as_it_was(letter),
        attempts=letter.attempts,
        reason=letter.reason,
        last_error=letter.last_error,
        moved_at=timestamp(letter.dead_at_us),
        is_loop=letter.is_loop,
    )


def _as_it_was(letter: DeadLetter) -> dict[str, Any]:
    shown = describe(letter.message) | {"message_id": letter.message_id, "topic": letter.topic}
    own = {name: value for name, value in shown["attributes"].items() if not name.startswith(PREFIX)}
    kept = {
        name: value for name, value in shown.items() if name not in ("partition", "offset", "publish_time")
    }
    return kept | {"attributes": own}


def _replay(job: ReplayJob | ReplayPlan, subscription: str, destination: str | None = None) -> ReplayView:
    if isinstance(job, ReplayPlan):
        return ReplayView(
            message_count=job.total,
            status="dry_run",
            destination_subscription_id=destination or subscription,
        )
    return ReplayView(
        replay_id=job.replay_id,
        message_count=job.total,
        status=job.status.value,
        replayed=job.replayed,
        failed=job.failed,
        error=job.error,
        started_at=timestamp(job.started_at_us),
        updated_at=timestamp(job.updated_at_us or None),
        destination_subscription_id=job.destination or subscription,
    )
