"""How many unsettled messages one hold on a subscription may have: its pulls wait until it settles some."""

from __future__ import annotations

from collections.abc import Callable, Collection

from sparrow.model.message import StreamId


class Allowance:
    """A seat without a group: every stream, up to so many messages at once."""

    __slots__ = ("_held", "_messages_max")

    def __init__(self, messages_max: int, held: Callable[[], int]) -> None:
        self._messages_max = messages_max
        self._held = held

    def grant(self, wanted: int) -> tuple[int, Collection[StreamId] | None]:
        return self.room(wanted), None

    def room(self, wanted: int) -> int:
        return max(0, min(wanted, self._messages_max - self._held()))

    def served(self, count: int) -> None:
        """What is held is asked each time."""
