"""Delivery: every decision about one subscription.

The shell reads the log and offers what it read; consumers lease; what they settle, or fail to settle
in time, becomes facts. A decision returns facts and changes only volatile state: the messages it is
about are *settling*, neither redelivered nor expired. ``apply(fact)`` changes durable state, the same
way live and in replay, and lets the messages go on; ``abandon(facts)`` puts them back when the
journal failed. A crash forgets everything volatile: leases are gone, what was not acked is read
again from the cursor's floor, and no attempt is counted.

Costs. A plain subscription is served by ranges: offering, leasing and acking cost per batch, not per
message. What the filter passes over has no fact of its own: it joins the next ack's fact, where it
closes the gaps between the acked offsets, and is found again by reading after a crash
(``flush_passed`` makes it durable when nothing is acked for long). Holes in the log are treated alike.

Refuses to know: payloads, filters, sockets, clocks, files, group membership. ``consumer`` is a name;
``streams`` narrows a lease to what a group member owns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from pyroaring import BitMap64

from sparrow.kernel import deadletter, facts as fact_kinds, poison
from sparrow.kernel.backoff import wait_us
from sparrow.kernel.breaker import Breaker, State
from sparrow.kernel.cursor import Attempt, Cursor
from sparrow.kernel.exchange import (
    Arrival,
    DeadLetterDue,
    HandOver,
    Lag,
    Refusal,
    Run,
    Settled,
    Wish,
)
from sparrow.kernel.facts import Fact, FailureKind
from sparrow.kernel.lease import head_of, parse_ack_ids
from sparrow.kernel.offsets import OFFSET_MAX, first_missing, is_run, pack, span, to_list
from sparrow.kernel.pool import Pool
from sparrow.kernel.ready import Taken
from sparrow.kernel.schedule import NEVER_US
from sparrow.kernel.settlement import Claim, Clerk
from sparrow.kernel.trace import MessageState, Trace
from sparrow.kernel.track import Track
from sparrow.model.errors import (
    DataDirectoryNewer,
    InvalidArgument,
    OffsetOutOfRange,
    PreconditionFailed,
    StaleAckId,
)
from sparrow.model.message import MessageId, StreamId
from sparrow.model.subscription import Expired, Guarantee, Ordering, SubscriptionPolicy
