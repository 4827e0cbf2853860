"""Pushes the messages of one subscription to its receiver.

A runner is a consumer like any other: it leases from its courier, so that ordering, filters, delays, attempts
and backoff are the subscription's. It leases no more than may be sent at once (kernel/push.py decides), and
nothing while the receiver is to be left alone. What it leased and cannot send goes back without a counted
attempt; so does what met no receiver at all while the breaker tried, and what went to one that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.push import bodies, signing
from sparrow.broker.push.sender import Reply, Sender, Target, make_target
from sparrow.broker.subscription import BrokerSubscription
from sparrow.broker.subscriptions import Subscriptions
from sparrow.kernel.breaker import State
from sparrow.kernel.exchange import Refusal
from sparrow.kernel.lease import AckNames, name_offsets
from sparrow.kernel.push import Answer, Endpoint
from sparrow.model.errors import SparrowError, SubscriptionNotFound
from sparrow.model.message import Delivered
from sparrow.model.push import PushPolicy, PushSettings, PushState, PushStatus
from sparrow.model.subscription import Subscription

_PULL_S = 60.0
_TROUBLE_S = 5.0
"""Pause after the broker itself could not do its part."""
_ASK_S_MIN, _ASK_S_MAX = 5.0, 300.0
_BYTES_MAX = 32 * 1024 * 1024
"""Data of messages under way at once, or one message of whatever size."""
_UNCOUNTED = frozenset({Answer.GONE, Answer.FAULT})
"""Answers that are no fault of the message."""


class Gate:
    """How many requests may be under way, over all receivers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: set[Callable[[], None]] = set()

    def room(self, wake: Callable[[], None]) -> int:
        """How many more may start; whoever finds none is woken when there is room."""
        room = self._limit - self._taken
        if room <= 0:
            self._waiting.add(wake)
        return room

    def take(self, count: int) -> None:
        self._taken += count

    def give(self) -> None:
        self._taken -= 1
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            for wake in waiting:
                wake()


class Services(NamedTuple):
    """What runners share."""

    subscriptions: Subscriptions
    sender: Sender
    settings: PushSettings
    clock: Clock
    jitter: Callable[[], float]
    gate: Gate
    disable: Callable[[int, str], None]
    """Called with the subscription's id and why, when its receiver is gone."""


class Runner:
    """One push subscription at work."""

    def __init__(
        self,
        subscription: Subscription,
        policy: PushPolicy,
        secrets: Sequence[signing.Secret],
        handle: BrokerSubscription,
        services: Services,
    ) -> None:
        self.id = subscription.id
        self.name = subscription.name
        self.policy = policy
        self._handle = handle
        self._services = services
        self._clock = services.clock
        settings = services.settings
        self.endpoint = Endpoint(
            policy.max_concurrency,
            policy.rate_per_s,
            self._clock.now_us(),
            wait_us=round(settings.breaker_wait_s * 1_000_000),
            wait_us_max=round(settings.breaker_wait_max_s * 1_000_000),
        )
        self._target: Target = make_target(policy)
        self._is_agreed = not policy.verify
        self._agreement = ""
        self._secrets: Sequence[signing.Secret] = ()
        self._keys: list[bytes] = []
        self._keys_until_us = 0
        self.set_secrets(secrets)
        self._task: asyncio.Task[None] | None = None
        self._at_work: set[asyncio.Task[None]] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._acked: list[Delivered] = []
        self._returned: list[Delivered] = []
        self._failed: dict[str, list[Delivered]] = {}
        self._is_settle_due = False
        self._waiting: asyncio.Future[None] | None = None
        self._bytes = 0
        self._not_before_s = 0.0
        self._last_status: int | None = None
        self._last_error = ""
        self._last_error_at_us: int | None = None
        self._log = logs.get("push").bind(subscription=self.name)

    # Its life.

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, drain_s: float) -> None:
        """Takes no more; what is under way gets some time, and goes back after that."""
        if self._task is not None:
            self._task.cancel()
            await _end({self._task})
        # At least to their first step: a task that is cancelled before it cannot say what it leaves.
        await asyncio.sleep(0)
        await _end(self._at_work, drain_s)
        for task in list(self._at_work):
            task.cancel()
        await _end(self._at_work)
        self._settle_soon()
        await asyncio.sleep(0)
        await _end(self._settling)

    def change(self, policy: PushPolicy) -> None:
        """The subscription's push options are others now."""
        before, self.policy = self.policy, policy
        self._target = make_target(policy)
        now_us = self._clock.now_us()
        self.endpoint.change(policy.max_concurrency, policy.rate_per_s, now_us)
        if (policy.url, policy.verify) != (before.url, before.verify):
            self._is_agreed = not policy.verify
        self.revive()

    def revive(self) -> None:
        """The receiver is to be tried again, whatever was known of it."""
        self.endpoint.revive(self._clock.now_us())
        self._not_before_s = 0.0
        self.wake()

    def set_secrets(self, secrets: Sequence[signing.Secret]) -> None:
        """From now on webhooks are signed with these."""
        self._secrets, self._keys_until_us = secrets, 0

    def _keys_now(self, now_us: int) -> list[bytes]:
        if now_us >= self._keys_until_us:
            held = signing.in_force(self._secrets, now_us)
            ends = [secret.expires_at_us for secret in held if secret.expires_at_us is not None]
            self._keys = [secret.key for secret in held]
            self._keys_until_us = min(ends, default=now_us + 3_600_000_000)
        return self._keys

    # Taking.

    async def _run(self) -> None:
        while True:
            try:
                if not await self._take():
                    return
            except SparrowError as error:
                self._trouble(error)
            except Exception as error:  # noqa: BLE001 - the root of a task: it must outlive any surprise
                self._log.error("push-failed", str(error), exc_info=True)
                self._trouble(error)

    async def _take(self) -> bool:
        """Leases what may be sent and starts to send it; False when the subscription is gone."""
        now_us = self._clock.now_us()
        pause_s = self._not_before_s - self._clock.monotonic_s()
        room = 0 if pause_s > 0 or self._bytes >= _BYTES_MAX else self.endpoint.allowance(now_us)
        if room > 0:
            room = min(room, self._services.gate.room(self.wake))
        if room <= 0:
            wakeup_us = self.endpoint.next_wakeup_us(now_us)
            wait_s = pause_s if pause_s > 0 or wakeup_us is None else (wakeup_us - now_us) / 1_000_000
            await self._wait(wait_s if wait_s > 0 else None)
            return True
        if not self._is_agreed and not await self._agree():
            return True
        try:
            courier = self._services.subscriptions.get(self.name)
        except SubscriptionNotFound:
            return False
        if courier.is_stopped or courier.subscription.id != self.id:
            return False
        found = await courier.pull(
            self._handle.consumer, room, _PULL_S, self._handle, max_bytes=_BYTES_MAX - self._bytes
        )
        if found:
            self._start(found)
        return True

    def _start(self, found: list[Delivered]) -> None:
        """Much may have happened since the allowance was asked for; what may not be sent now goes back."""
        now_us = self._clock.now_us()
        room = max(0, min(self.endpoint.allowance(now_us), self._services.gate.room(self.wake)))
        if room < len(found):
            self._handle.return_names(_names(found[room:]))
            found = found[:room]
        if not found:
            return
        round = self.endpoint.started(len(found), now_us)
        self._services.gate.take(len(found))
        loop = asyncio.get_running_loop()
        for message in found:
            self._bytes += len(message.data or b"")
            task = loop.create_task(self._send(message, round, now_us))
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)

    async def _agree(self) -> bool:
        """Asks the receiver whether it wants webhooks; not often."""
        self._is_agreed, self._agreement = await self._services.sender.ask(self._target)
        if not self._is_agreed:
            wait_s = max(_ASK_S_MIN, self._services.settings.breaker_wait_s)
            self._not_before_s = self._clock.monotonic_s() + min(wait_s, _ASK_S_MAX)
            self._note_error(self._agreement, None)
        return self._is_agreed

    def _trouble(self, error: BaseException) -> None:
        """The broker could not do its part: the disk is full, say. Sending on would only repeat itself."""
        self._not_before_s = self._clock.monotonic_s() + _TROUBLE_S
        self._note_error(f"{type(error).__name__}: {error}", None)
        self._log.warning("push-held-up", str(error))

    # Sending.

    async def _send(self, message: Delivered, round: int, started_at_us: int) -> None:
        try:
            reply = await self._post(message, started_at_us)
        except asyncio.CancelledError:
            self.endpoint.never_sent(1, round)
            self._returned.append(message)
            raise
        except Exception as error:  # noqa: BLE001 - the root of a task: a lease must not be left to run out
            self._log.error("webhook-not-made", str(error), exc_info=True, message_id=message.id)
            reply = Reply(Answer.REJECTED, f"the webhook could not be made: {type(error).__name__}: {error}")
        finally:
            self._bytes -= len(message.data or b"")
            self._services.gate.give()
        self._sort(message, reply, self.endpoint.is_probe(round))
        self._judge(message, reply, round, started_at_us)
        self._settle_soon()
        self.wake()

    async def _post(self, message: Delivered, now_us: int) -> Reply:
        body = bodies.make(message, self.policy.format, self.name)
        proof = signing.headers(
            self._keys_now(now_us), message.id, message.attempt, now_us // 1_000_000, body.content
        )
        return await self._services.sender.send(self._target, body.content, {**body.headers, **proof}, now_us)

    def _judge(self, message: Delivered, reply: Reply, round: int, started_at_us: int) -> None:
        endpoint = self.endpoint
        before, was_gone = endpoint.state, endpoint.is_gone
        now_us = self._clock.now_us()
        endpoint.finished(
            reply.answer,
            message.id,
            round=round,
            started_at_us=started_at_us,
            now_us=now_us,
            jitter=self._services.jitter(),
            retry_after_s=reply.retry_after_s,
        )
        if reply.answer is not Answer.ACCEPTED:
            self._note_error(reply.reason, reply.status)
        elif self._last_status is not None or self._last_error:
            self._last_status = reply.status
        if endpoint.state is not before:
            log = self._log.info if endpoint.state is State.CLOSED else self._log.warning
            log("push-breaker", reply.reason, state=endpoint.state.value)
        if endpoint.is_gone and not was_gone:
            self._services.disable(self.id, f"the receiver is gone: {reply.reason}")

    def _note_error(self, reason: str, status: int | None) -> None:
        self._last_error, self._last_status = reason, status
        self._last_error_at_us = self._clock.now_us()

    # Settling, by the batch.

    def _sort(self, message: Delivered, reply: Reply, is_probe: bool) -> None:
        if reply.answer is Answer.ACCEPTED:
            self._acked.append(message)
        elif reply.answer in _UNCOUNTED or (is_probe and reply.answer is Answer.UNREACHABLE):
            self._returned.append(message)
        else:
            self._failed.setdefault(reply.reason, []).append(message)

    def _settle_soon(self) -> None:
        if not self._is_settle_due:
            self._is_settle_due = True
            task = asyncio.get_running_loop().create_task(self._settle())
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self) -> None:
        self._is_settle_due = False
        acked, returned, failed = self._acked, self._returned, self._failed
        self._acked, self._returned, self._failed = [], [], {}
        try:
            if returned:
                self._handle.return_names(_names(returned))
            work: list[Coroutine[Any, Any, list[Refusal]]] = [
                self._handle.nack_names(_names(some), reason=why, wait=True) for why, some in failed.items()
            ]
            if acked:
                work.append(self._handle.ack_names(_names(acked), wait=True))
            if len(work) == 1:
                outcomes: list[list[Refusal] | BaseException] = [await work[0]]
            else:
                outcomes = await asyncio.gather(*work, return_exceptions=True)
        except SparrowError as error:
            outcomes = [error]
        for outcome in outcomes:
            if isinstance(outcome, SubscriptionNotFound):
                continue  # It was deleted meanwhile, and with it everything that could be settled.
            if isinstance(outcome, BaseException):
                self._trouble(outcome)
            elif outcome:
                self._log.debug("webhook-settled-late", "", refused=len(outcome))

    # Waiting and looking.

    def wake(self) -> None:
        """More may be allowed than before."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _wait(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = waiting = loop.create_future()
        alarm = None if seconds is None else loop.call_later(seconds, self.wake)
        try:
            await waiting
        finally:
            self._waiting = None
            if alarm is not None:
                alarm.cancel()

    def state(self, *, is_paused: bool, disabled: str) -> PushState:
        """How it goes."""
        endpoint, now_us = self.endpoint, self._clock.now_us()
        status, why = _status(endpoint), ""
        if status is PushStatus.DISABLED:
            why = disabled or self._last_error
        elif is_paused:
            status, why = PushStatus.PAUSED, "the subscription is paused"
        elif not self._is_agreed:
            why = self._agreement or "the receiver has not been asked yet"
        elif status is not PushStatus.ACTIVE:
            why = self._last_error
        latency_us = endpoint.latency_us
        return PushState(
            state=status,
            why=why,
            url=self.policy.url,
            concurrency=endpoint.concurrency,
            in_flight=endpoint.in_flight,
            delivered=endpoint.accepted,
            failed=endpoint.failed,
            delivered_per_s=round(endpoint.accepted_per_s(now_us), 3),
            latency_s=None if latency_us is None else latency_us / 1_000_000,
            retry_at_us=endpoint.next_wakeup_us(now_us),
            last_status=self._last_status,
            last_error=self._last_error,
            last_error_at_us=self._last_error_at_us,
            secrets=len(signing.in_force(self._secrets, now_us)),
        )


async def _end(tasks: set[asyncio.Task[None]], timeout_s: float | None = None) -> None:
    """Waits until they have ended, or for so long."""
    if tasks:
        await asyncio.wait(set(tasks), timeout=timeout_s)


def _status(endpoint: Endpoint) -> PushStatus:
    if endpoint.is_gone:
        return PushStatus.DISABLED
    if endpoint.state is State.OPEN:
        return PushStatus.OPEN
    return PushStatus.HALF_OPEN if endpoint.state is State.HALF_OPEN else PushStatus.ACTIVE


def _names(messages: Sequence[Delivered]) -> AckNames:
    held: dict[str, list[int]] = {}
    for message in messages:
        held.setdefault(message.lease, []).append(message.offset)
    return name_offsets(held)
