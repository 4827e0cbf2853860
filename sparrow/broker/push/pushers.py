"""The push subscriptions of a broker: a runner for each, its secrets, and whether its receiver is gone.

What has to outlast the broker is one small document a subscription, apart from its policy: policies are
shown, secrets never are. Nothing of HTTP is imported before the first push subscription exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from sparrow.broker import logs
from sparrow.broker.clock import Clock
from sparrow.broker.push import signing
from sparrow.broker.subscriptions import Subscriptions
from sparrow.model.errors import InvalidArgument, PreconditionFailed, SparrowError
from sparrow.model.push import PushPolicy, PushSettings, PushState
from sparrow.model.subscription import Subscription
from sparrow.store.ports import Store

if TYPE_CHECKING:
    from sparrow.broker.push.runner import Runner, Services

DOCUMENTS = "push"
OVERLAP_S_MAX = 30 * 86_400.0


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a push subscription."""

    secrets: list[signing.Secret] = []
    disabled: str = ""
    """Why nothing is sent any more; empty while something is."""


class Pushers:
    """All runners."""

    def __init__(
        self,
        store: Store,
        subscriptions: Subscriptions,
        settings: PushSettings,
        clock: Clock,
        jitter: Callable[[], float],
        randomness: Callable[[], bytes],
        hold: Callable[[str, str], Any],
    ) -> None:
        self._store = store
        self._subscriptions = subscriptions
        self._settings = settings
        self._clock = clock
        self._jitter = jitter
        self._randomness = randomness
        self._hold = hold
        """Takes hold of a subscription, by its name and the consumer's."""
        self._services: Services | None = None
        self._runners: dict[int, Runner] = {}
        self._kept: dict[int, Kept] = {}
        self._unshown: dict[int, str] = {}
        """Secrets that nobody was told yet."""
        self._changing = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._log = logs.get("push")

    # The broker's life.

    async def start(self) -> None:
        """Takes up what there is after recovery."""
        found = [c.subscription for c in self._subscriptions if c.subscription.policy.push is not None]
        if not found:
            return
        for key, value in (await self._store.documents(DOCUMENTS)).items():
            if self._subscriptions.find(int(key)) is None:
                # The broker stopped between the end of a subscription and the end of its secrets.
                await self._store.delete_document(DOCUMENTS, key)
            else:
                self._kept[int(key)] = msgspec.json.decode(value, type=Kept)
        for subscription in found:
            await self._follow(subscription)

    async def stop(self) -> None:
        runners = list(self._runners.values())
        if runners:
            await asyncio.gather(*(runner.stop(self._settings.drain_s) for runner in runners))
        if self._background:
            await asyncio.wait(set(self._background))
        self._runners = {}
        if self._services is not None:
            await self._services.sender.close()
            self._services = None

    # The subscriptions' lives.

    def check(self, policy: PushPolicy | None) -> None:
        """Refuses a receiver that may not be reached, as far as its URL shows that."""
        if policy is not None:
            self._opened().sender.guard.check_url(policy.url)

    async def changed(self, subscription: Subscription) -> None:
        """A subscription was created, changed, paused or resumed."""
        if subscription.policy.push is not None or subscription.id in self._runners:
            await self._follow(subscription)

    async def resumed(self, subscription: Subscription) -> None:
        """A subscription was resumed: a receiver that was gone is tried again."""
        if subscription.policy.push is not None:
            async with self._changing:
                await self._enable(subscription.id)
            await self._follow(subscription)

    async def removed(self, subscription_id: int) -> None:
        """A subscription was deleted, and its secrets go with it."""
        runner = self._runners.pop(subscription_id, None)
        if runner is not None:
            await runner.stop(0.0)
        self._unshown.pop(subscription_id, None)
        if self._kept.pop(subscription_id, None) is not None:
            await self._store.delete_document(DOCUMENTS, str(subscription_id))

    async def _follow(self, subscription: Subscription) -> None:
        """Makes what runs be what the policy says."""
        async with self._changing:
            policy, runner = subscription.policy.push, self._runners.get(subscription.id)
            if policy is None:
                if runner is not None:
                    del self._runners[subscription.id]
                    await runner.stop(self._settings.drain_s)
                return
            kept = await self._provided(subscription.id)
            if runner is not None:
                if runner.policy != policy:
                    await self._enable(subscription.id)
                    runner.change(policy)
                return
            from sparrow.broker.push.runner import Runner

            handle = self._hold(subscription.name, f"push-{subscription.id}")
            runner = Runner(subscription, policy, kept.secrets, handle, self._opened())
            runner.endpoint.is_gone = bool(kept.disabled)
            self._runners[subscription.id] = runner
            runner.start()

    async def _provided(self, subscription_id: int) -> Kept:
        """What is stored; a secret is made when there is none."""
        kept = self._kept.get(subscription_id, Kept())
        if not kept.secrets:
            text = signing.new_secret(self._randomness())
            secret = signing.Secret(text=text, created_at_us=self._clock.now_us())
            kept = msgspec.structs.replace(kept, secrets=[secret])
            await self._keep(subscription_id, kept)
            self._unshown[subscription_id] = text
        return kept

    async def _keep(self, subscription_id: int, kept: Kept) -> None:
        await self._store.put_document(DOCUMENTS, str(subscription_id), msgspec.json.encode(kept))
        self._kept[subscription_id] = kept

    def _opened(self) -> Services:
        if self._services is None:
            from sparrow.broker.push.guard import Guard
            from sparrow.broker.push.runner import Gate, Services
            from sparrow.broker.push.sender import Sender

            self._services = Services(
                subscriptions=self._subscriptions,
                sender=Sender(Guard(self._settings)),
                settings=self._settings,
                clock=self._clock,
                jitter=self._jitter,
                gate=Gate(self._settings.requests_max),
                disable=self._disable,
            )
        return self._services

    # Receivers that are gone.

    def _disable(self, subscription_id: int, why: str) -> None:
        self._log.warning("push-disabled", why, subscription_id=subscription_id)
        task = asyncio.get_running_loop().create_task(self._store_disabled(subscription_id, why))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _store_disabled(self, subscription_id: int, why: str) -> None:
        async with self._changing:
            runner, kept = self._runners.get(subscription_id), self._kept.get(subscription_id)
            if runner is not None and kept is not None and runner.endpoint.is_gone:
                # Should it be lost, the receiver says once more that it is gone.
                with contextlib.suppress(SparrowError):
                    await self._keep(subscription_id, msgspec.structs.replace(kept, disabled=why))

    async def _enable(self, subscription_id: int) -> None:
        kept = self._kept.get(subscription_id)
        if kept is not None and kept.disabled:
            await self._keep(subscription_id, msgspec.structs.replace(kept, disabled=""))
        runner = self._runners.get(subscription_id)
        if runner is not None:
            runner.revive()

    # What a program asks.

    def state(self, subscription: Subscription) -> PushState:
        """How pushing goes."""
        runner = self._runner(subscription)
        disabled = self._kept.get(subscription.id, Kept()).disabled
        return runner.state(is_paused=subscription.is_paused, disabled=disabled)

    def secrets(self, subscription: Subscription) -> list[str]:
        """The secret that nobody was told yet, once."""
        self._runner(subscription)
        found = self._unshown.pop(subscription.id, None)
        if found is None:
            raise PreconditionFailed(
                f"the secret of {subscription.name!r} was told when it was made, and is not told again",
                hint="Make another one with rotate_secret; the old one stays in force for a while.",
            )
        return [found]

    async def rotate(self, subscription: Subscription, overlap_s: float, secret: str | None) -> str:
        """A new secret; the one before stays in force for the overlap."""
        runner = self._runner(subscription)
        is_number = isinstance(overlap_s, int | float) and not isinstance(overlap_s, bool)
        if not is_number or not 0 <= overlap_s <= OVERLAP_S_MAX:
            raise InvalidArgument(f"overlap_s must be from 0 to {OVERLAP_S_MAX:g}, not {overlap_s!r}")
        text = signing.new_secret(self._randomness()) if secret is None else secret
        async with self._changing:
            kept = self._kept[subscription.id]
            overlap_us = round(overlap_s * 1_000_000)
            held = signing.rotated(kept.secrets, text, self._clock.now_us(), overlap_us)
            await self._keep(subscription.id, msgspec.structs.replace(kept, secrets=held))
            self._unshown.pop(subscription.id, None)
            runner.set_secrets(held)
        self._log.info("push-secret-rotated", "", subscription=subscription.name)
        return text

    def _runner(self, subscription: Subscription) -> Runner:
        runner = self._runners.get(subscription.id)
        if runner is None:
            raise PreconditionFailed(
                f"the subscription {subscription.name!r} does not push",
                hint='Give it a receiver: update(push={"url": "https://…"}).',
            )
        return runner
