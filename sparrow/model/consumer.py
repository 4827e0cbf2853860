"""What every hold on a subscription offers on top of pulling and settling: checks, iteration, callbacks.

How an embedded subscription and one over a network pull and settle differs; what is here does not.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from sparrow.model.errors import InvalidAckId, InvalidArgument, PreconditionFailed
from sparrow.model.group import GroupMode
from sparrow.model.message import Delivered
from sparrow.model.subscription import Delivery, SubscriptionPolicy

PULL_MAX = 100_000
Target = Iterable[Delivered | str] | Delivered
"""Messages in hand, or ack ids."""


class Consumer(ABC):
    """A hold on a subscription."""

    name: str

    @property
    @abstractmethod
    def policy(self) -> SubscriptionPolicy: ...

    @abstractmethod
    async def pull(
        self, max_messages: int = 100, timeout_s: float = 0.0, *, max_bytes: int | None = None
    ) -> list[Delivered]: ...

    @abstractmethod
    async def ack(self, messages: Target, *, wait: bool = False) -> None: ...

    @abstractmethod
    async def nack(
        self,
        messages: Target,
        *,
        delay_s: float | None = None,
        reason: str = "",
        retry: bool = True,
        wait: bool = False,
    ) -> None: ...

    @abstractmethod
    async def flush(self) -> None: ...

    def _check_pull(self, max_messages: object, timeout_s: object, max_bytes: object) -> None:
        if not isinstance(max_messages, int) or not 1 <= max_messages <= PULL_MAX:
            raise InvalidArgument(f"max_messages must be from 1 to {PULL_MAX}, not {max_messages!r}")
        if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
            raise InvalidArgument(f"timeout_s must be a number of seconds from 0, not {timeout_s!r}")
        if max_bytes is not None and (not isinstance(max_bytes, int) or max_bytes < 1):
            raise InvalidArgument(f"max_bytes must be a whole number from 1, not {max_bytes!r}")
        if self.policy.push is not None:
            raise PreconditionFailed(
                f"{self.name!r} pushes its messages to a receiver; they cannot be pulled",
                hint="Make another subscription to pull from, or end the pushing with update(push=None).",
            )
        if self.policy.delivery is Delivery.PIPELINE:
            raise PreconditionFailed(
                f"{self.name!r} is read by a Spark pipeline; its messages cannot be pulled",
                hint="Make another subscription to pull from.",
            )
        self._check_seat()

    def _check_seat(self) -> None:
        """Raises when it may not pull: a member of a group has a say of its own."""
        if self.policy.group.mode is GroupMode.PARTITIONED:
            raise PreconditionFailed(
                f"{self.name!r} is shared by partitions; only its members get messages",
                hint="Call join first and pull with the member that it returns.",
            )

    async def __aiter__(self) -> AsyncIterator[Delivered]:
        """Messages for ever; settle each of them."""
        while True:
            for message in await self.pull(timeout_s=1.0):
                yield message

    async def run(self, callback: Callable[[Delivered], Any], *, max_in_flight: int = 100) -> None:
        """Calls ``callback`` for every message until cancelled: returning acks, raising nacks. Up to
        ``max_in_flight`` calls run at once when the callback is async."""
        if not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise InvalidArgument(f"max_in_flight must be at least 1, not {max_in_flight!r}")
        at_work: set[asyncio.Task[None]] = set()
        try:
            while True:
                if len(at_work) >= max_in_flight:
                    await asyncio.wait(at_work, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for message in await self.pull(max_in_flight - len(at_work), timeout_s=1.0):
                    task = asyncio.get_running_loop().create_task(self._handle(callback, message))
                    at_work.add(task)
                    task.add_done_callback(at_work.discard)
        finally:
            if at_work:
                await asyncio.wait(at_work)
            await self.flush()

    async def _handle(self, callback: Callable[[Delivered], Any], message: Delivered) -> None:
        try:
            outcome = callback(message)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is a failed attempt
            await self.nack([message], reason=f"{type(error).__name__}: {error}")
        else:
            await self.ack([message])


class Named(NamedTuple):
    """What is to be settled: offsets of messages in hand by their lease, and ack ids."""

    held: dict[str, list[int]]
    texts: list[str]


def sort_target(messages: Target) -> Named:
    """Messages in hand by their lease, and texts apart."""
    if isinstance(messages, str | Delivered):
        messages = [messages]
    if not isinstance(messages, Iterable):
        raise InvalidAckId(f"messages or their ack ids are settled, not {messages!r}")
    texts: list[str] = []
    held: dict[str, list[int]] = {}
    for message in messages:
        if isinstance(message, Delivered):
            lease = message._lot.lease
            if lease in held:
                held[lease].append(message.offset)
            else:
                held[lease] = [message.offset]
        elif isinstance(message, str):
            texts.append(message)
        else:
            raise InvalidAckId(f"messages or their ack ids are settled, not {message!r}")
    return Named(held, texts)


def check_number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgument(f"{name} must be a number, not {value!r}")
