"""Consumers of a simulated broker: they pull and settle, and fail in every way that consumers do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from random import Random
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.model.errors import InvalidAckId, SparrowError, StaleAckId, StaleGeneration
from sparrow.model.message import Delivered
from sparrow.model.subscription import Guarantee
from sparrow.testing.simloop import ask, is_stopping
from sparrow.testing.simmodel import Broken, Handed, Item, SubscriptionModel, World
from sparrow.testing.simplan import Plan

Held = tuple[Item, Handed]


class _Ask:
    """An ack that was asked for."""

    def __init__(self, item: Item, was_acked: bool) -> None:
        self.item = item
        self.asked_at = item.acked_at
        self.was_acked = was_acked
        self.was_done = item.is_done


class Consumer:
    """One consumer of one subscription. It dies with its broker; the next life has a new one."""

    def __init__(self, number: int, model: SubscriptionModel, world: World, plan: Plan) -> None:
        self.name = f"{model.name}/c{number}"
        self._model = model
        self._world = world
        self._dice: Random = plan.dice(f"consumer {self.name} {world.life}")
        self._unconfirmed: list[_Ask] = []
        self._subscription: Any = None

    async def run(self, broker: Broker) -> None:
        self._subscription = await broker.subscription(self._model.name)
        while True:
            await asyncio.sleep(self._dice.uniform(0.0, 0.5))
            try:
                await self._turn(broker)
            except SparrowError as error:
                self._world.note(self.name, "refused", type(error).__name__)
                await asyncio.sleep(self._dice.uniform(0.0, 1.0))

    async def _turn(self, broker: Broker) -> None:
        held = await self._pull()
        if held and self._dice.random() < 0.08:
            self._world.note(self.name, "loses the reply with", *(item for item, _ in held))
            return
        while held:
            some, held = held[: self._dice.choice((1, 2, 5))], held[self._dice.choice((1, 2, 5)) :]
            await asyncio.sleep(self._dice.choice((0.0, 0.0, 0.1, 0.5)))
            await self._settle(some)
        if self._dice.random() < 0.06:
            await self._leave(broker)
        if self._dice.random() < 0.1:
            await self._ack_again()

    async def _ack_again(self) -> None:
        """With an id of any time, maybe of an earlier broker."""
        past = [(item, handed) for item in self._model.items.values() for handed in item.handed]
        if past:
            await self._ack([self._dice.choice(past)])

    # Receiving.

    async def _pull(self) -> list[Held]:
        dice, asks, began = self._dice, list(self._unconfirmed), self._world.next_tick()
        count, timeout_s = dice.choice((1, 2, 5, 20)), dice.choice((0.0, 0.2, 2.0))
        task = ask(self._subscription.pull(count, timeout_s), dice)
        self._model.pulls += 1
        try:
            messages: list[Delivered] = await task
        except BaseException as error:
            self._model.reply_lost()
            self._forget(asks)
            if not isinstance(error, asyncio.CancelledError) or is_stopping():
                raise
            self._world.note(self.name, "gives up a pull")
            return []
        finally:
            self._model.pulls -= 1
        self._confirm(asks)
        return self._take(messages, began)

    def _take(self, messages: Sequence[Delivered], began: int) -> list[Held]:
        held: list[Held] = []
        for message in messages:
            item = self._model.delivered(message, self.name, began)
            held.append((item, item.handed[-1]))
        if held:
            self._world.note(self.name, "gets", *(f"{item.record}#{h.attempt}" for item, h in held))
        return held

    # Settling.

    async def _settle(self, held: list[Held]) -> None:
        choice = self._dice.random()
        if choice < 0.62:
            await self._ack(held)
        elif choice < 0.8:
            await self._nack(held)
        elif choice < 0.88:
            await self._extend(held)
            await asyncio.sleep(self._dice.uniform(0.0, 3.0))
            await self._ack(held)
        elif choice < 0.94:
            self._world.note(self.name, "stalls with", *(item for item, _ in held))
            await asyncio.sleep(self._dice.choice((2.0, 6.0, 12.0)))
            await self._ack(held)
        else:
            self._world.note(self.name, "forgets", *(item for item, _ in held))

    async def _ack(self, held: list[Held]) -> None:
        model, is_sure = self._model, self._dice.random() < 0.5
        is_exact = model.policy.guarantee is Guarantee.EXACTLY_ONCE
        self._world.note(self.name, "acks", *(item for item, _ in held), "surely" if is_sure else "")
        if model.is_at_most_once:
            await self._carefully(self._subscription.ack(_ids(held)), held)  # Acked when it was handed over.
            return
        asks = []
        life = self._world.life
        stale = {h.ack_id for _, h in held if (h.is_over and not h.is_doubtful) or h.life != life}
        before = _states(handed for _, handed in held)
        for item, handed in held:
            was_acked = item.is_acked
            model.ack_asked(item, handed)
            asks.append(_Ask(item, was_acked))
        refused = await self._carefully(self._subscription.ack(_ids(held), wait=is_sure), held, before)
        if refused is None:
            return
        if is_exact and stale - refused:
            raise Broken(f"{self.name}: the ack of an ended lease was taken: {held}")
        taken = []
        for (_, handed), asked in zip(held, asks, strict=True):
            if handed.ack_id in refused:
                model.ack_refused(asked.item, asked.asked_at, asked.was_acked)
            elif asked.was_done and asked.item.is_done:
                raise Broken(f"{self.name}: {asked.item} was acked again after its ack was confirmed")
            else:
                taken.append(asked)
        if is_exact or is_sure:
            self._confirm(taken)
        else:
            self._unconfirmed += taken

    async def _nack(self, held: list[Held]) -> None:
        dice, model = self._dice, self._model
        if model.is_at_most_once:
            return
        retry = model.policy.dead_letter_topic is None or dice.random() < 0.7
        delay_s = dice.choice((None, None, 0.0, 2.0))
        self._world.note(self.name, "nacks", *(item for item, _ in held), "" if retry else "for good")
        before = _states(handed for _, handed in held)
        for _, handed in held:
            handed.is_nacked = handed.is_over = True
            handed.is_rejected = handed.is_rejected or not retry
        refused = await self._carefully(
            self._subscription.nack(_ids(held), delay_s=delay_s, reason="no", retry=retry, wait=True),
            held,
            before,
        )
        for item, handed in held:
            if refused is not None and handed.ack_id not in refused:
                model.nack_confirmed(item, handed)

    async def _extend(self, held: list[Held]) -> None:
        if self._model.is_at_most_once:
            return
        seconds = self._dice.choice((0.0, 1.0, 5.0))
        deadline_us = self._world.clock.now_us() + round(seconds * 1_000_000)
        self._world.note(self.name, "extends", *(item for item, _ in held), "by", seconds)
        for _, handed in held:
            handed.deadline_us = min(handed.deadline_us, deadline_us)
        refused = await self._carefully(self._subscription.extend(_ids(held), seconds), held)
        for _, handed in held:
            if refused is not None and handed.ack_id not in refused:
                handed.deadline_us = deadline_us

    async def _leave(self, broker: Broker) -> None:
        """Says goodbye; what it holds is free at once."""
        self._world.note(self.name, "leaves")
        for item in self._model.items.values():
            for handed in item.handed:
                if handed.consumer == self.name:
                    handed.is_over = True
        before, asks = self._subscription, list(self._unconfirmed)
        self._subscription = await broker.subscription(self._model.name)
        try:
            await before.close()
        except BaseException:
            self._forget(asks)
            raise
        self._confirm(asks)

    async def _carefully(
        self, work: Coroutine[Any, Any, Any], held: list[Held], before: _States = ()
    ) -> set[str] | None:
        """The ids that were refused; None when nobody knows what became of the request. Of a request that
        was refused whole, everything is again as it was ``before``."""
        task = ask(work, self._dice)
        try:
            await task
        except asyncio.CancelledError:
            if is_stopping():
                raise
            self._world.note(self.name, "never hears of it")
            return None
        except StaleGeneration as error:
            self._world.note(self.name, "is told:", error.message)
            _restore(before)
            self._told_to_rejoin(error)
            return set(_ids(held))
        except (StaleAckId, InvalidAckId) as error:
            self._world.note(self.name, "is refused", error.message)
            if isinstance(error, InvalidAckId):
                if all(self._is_own(handed) for _, handed in held):
                    raise Broken(f"{self.name}: an id that was given is refused as none: {error}") from error
                _restore(before)
            return set(error.details["refused"])
        return set()

    def _is_own(self, handed: Handed) -> bool:
        """Whether its id must be known to whom this consumer asks."""
        return True

    def _told_to_rejoin(self, error: StaleGeneration) -> None:
        raise Broken(f"{self.name} is in no group and is told to join it again: {error}") from error

    def _confirm(self, asks: list[_Ask]) -> None:
        for asked in asks:
            self._model.ack_confirmed(asked.item, asked.asked_at)
        self._forget(asks)

    def _forget(self, asks: list[_Ask]) -> None:
        self._unconfirmed = [asked for asked in self._unconfirmed if asked not in asks]


_States = Iterable[tuple[Handed, bool, bool, bool]]


def _states(handed: Iterable[Handed]) -> _States:
    return [(each, each.is_over, each.is_nacked, each.is_rejected) for each in handed]


def _restore(states: _States) -> None:
    for handed, *before in states:
        handed.is_over, handed.is_nacked, handed.is_rejected = before


def _ids(held: list[Held]) -> list[str]:
    return [handed.ack_id for _, handed in held]
