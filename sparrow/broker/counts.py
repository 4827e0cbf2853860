"""What became of a subscription's messages since the broker opened, counted by the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparrow.kernel.exchange import Settled
from sparrow.kernel.facts import AttemptsFailed, Fact, FailureKind, MessagesExpired


class Counted(NamedTuple):
    """The counts of one moment."""

    delivered: int = 0
    redelivered: int = 0
    """Of those delivered, how many had been handed over before."""
    acked: int = 0
    nacked: int = 0
    timed_out: int = 0
    """Leases that ran out, in messages."""
    expired: int = 0
    """Their time to live passed before they were acked."""
    dead_lettered: int = 0


class Counts:
    """The same while they grow."""

    __slots__ = ("acked", "dead_lettered", "delivered", "expired", "nacked", "redelivered", "timed_out")

    def __init__(self) -> None:
        self.delivered = 0
        self.redelivered = 0
        self.acked = 0
        self.nacked = 0
        self.timed_out = 0
        self.expired = 0
        self.dead_lettered = 0

    def settled(self, decided: Settled) -> None:
        """Consumers settled messages; late and cumulative acks have no outcomes."""
        if not decided.facts:
            return  # What is delivered at most once counted as acked with that.
        failed = sum(outcome.size for outcome in decided.outcomes if not outcome.is_success)
        self.nacked += failed
        self.acked += decided.accepted - failed

    def ended(self, found: Sequence[Fact]) -> None:
        """The time of leases or of messages ran out."""
        for fact in found:
            if isinstance(fact, AttemptsFailed) and fact.kind is FailureKind.TIMED_OUT:
                self.timed_out += len(fact.offsets)
            elif isinstance(fact, MessagesExpired):
                self.expired += len(fact.offsets)

    def read(self) -> Counted:
        """As of now."""
        return Counted(
            self.delivered,
            self.redelivered,
            self.acked,
            self.nacked,
            self.timed_out,
            self.expired,
            self.dead_lettered,
        )


NOTHING = Counted()
