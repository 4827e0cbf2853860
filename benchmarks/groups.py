"""Group promises: what a rebalance of 100 members over 1,000 partitions costs, and how little moves.

    python -m benchmarks.groups [--quick]

Assignment: the time of one sticky assignment from scratch and after one member came or went, and the
partitions that changed hands against a fair share and one. Rebalance: a whole one in virtual time, with
members that answer at their next heartbeat and let go of what moves a second later; a partition is
paused while nobody may lease it. Eager is shown beside cooperative. Sharing: one question of how many
messages a member may take.

Kernel alone: no journal, no sockets. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from benchmarks import measure
from sparrow.kernel.assignment import assign, count_moved
from sparrow.kernel.membership import Group
from sparrow.kernel.rebalance import State
from sparrow.kernel.sharing import Sharing
from sparrow.model.group import GroupStrategy, RebalanceProtocol, parse_group_policy
from sparrow.model.message import StreamId

MEMBERS = 100
PARTITIONS = 1_000
ASSIGN_MS_MAX = 20.0
KEPT_PAUSE_S_MAX = 0.0
REBALANCE_S_MAX = 5.0
"""Members that answer make a rebalance as fast as this (queue.md §4.10)."""
SHARE_US_MAX = 1_000.0
HEARTBEAT_S = 1.0
LET_GO_S = 1.0
STEP_US = 10_000
SECOND_US = 1_000_000
STREAMS = [StreamId(1, partition) for partition in range(PARTITIONS)]
NAMES = [f"member-{number:03}" for number in range(MEMBERS)]


def run(options: measure.Options, report: measure.Report) -> None:
    rounds = 5 if options.quick else 50
    report.set_out(members=MEMBERS, partitions=PARTITIONS, rounds=rounds)
    assignments(rounds, report)
    rebalances(report)
    for strategy in (GroupStrategy.ROUND_ROBIN, GroupStrategy.LEAST_LOADED):
        cost_us = share_us(strategy, 20 * rounds)
        report.check(f"one share of a shared group, {strategy.value}", cost_us, SHARE_US_MAX, "us")


def assignments(rounds: int, report: measure.Report) -> None:
    fresh = assign(GroupStrategy.STICKY, NAMES, STREAMS, {})
    more = [*NAMES, "member-new"]
    joined = assign(GroupStrategy.STICKY, more, STREAMS, fresh)
    left = assign(GroupStrategy.STICKY, NAMES[1:], STREAMS, fresh)
    for strategy in (GroupStrategy.RANGE, GroupStrategy.ROUND_ROBIN):
        cost_ms = timed_ms(lambda s=strategy: assign(s, NAMES, STREAMS, {}), rounds)  # type: ignore[misc]
        report.figure(f"{strategy.value} assignment", cost_ms, "ms")
    from_scratch = timed_ms(lambda: assign(GroupStrategy.STICKY, NAMES, STREAMS, {}), rounds)
    report.check("sticky assignment", from_scratch, ASSIGN_MS_MAX, "ms")
    again = timed_ms(lambda: assign(GroupStrategy.STICKY, more, STREAMS, fresh), rounds)
    report.check("sticky assignment, one joined", again, ASSIGN_MS_MAX, "ms")
    report.check("moved when one joins", count_moved(fresh, joined), fair(MEMBERS + 1) + 1, "partitions")
    report.check("moved when one leaves", count_moved(fresh, left), fair(MEMBERS) + 1, "partitions")


def fair(members: int) -> int:
    return -(-PARTITIONS // members)


def timed_ms(work: Callable[[], object], rounds: int) -> float:
    """The median of some rounds."""
    times = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return statistics.median(times) * 1e3


class Pauses(NamedTuple):
    """Of one rebalance, in virtual seconds: its length, and how long the partitions paused."""

    length_s: float
    kept_s: float
    moved_s: float
    work_ms: float
    """What the kernel itself took, in real time, all ticks and answers together."""


def rebalances(report: measure.Report) -> None:
    calm = rebalance(RebalanceProtocol.COOPERATIVE)
    harsh = rebalance(RebalanceProtocol.EAGER)
    report.check("pause of partitions that stay, cooperative", calm.kept_s, KEPT_PAUSE_S_MAX, "s")
    report.check("a rebalance, cooperative", calm.length_s, REBALANCE_S_MAX, "s")
    report.figure("pause of partitions that move, cooperative", calm.moved_s, "s")
    report.figure("pause of partitions that stay, eager", harsh.kept_s, "s")
    report.figure("a rebalance, eager", harsh.length_s, "s")
    report.figure("kernel time of a rebalance", calm.work_ms, "ms", f"eager {harsh.work_ms:.1f}")


class Crowd:
    """A group of members that answer at their next heartbeat, spread evenly over its interval."""

    def __init__(self, protocol: RebalanceProtocol) -> None:
        self.group = Group(1, parse_group_policy({"mode": "partitioned", "rebalance": protocol.value}), 0)
        self.group.set_streams(STREAMS, 0)
        self.incarnations: dict[str, int] = {}
        self.began_at_us = 0

    def join(self, name: str, now_us: int) -> None:
        self.incarnations[name] = self.group.join(name, now_us).incarnation

    def step(self, now_us: int) -> None:
        """What happens in ten milliseconds: a tick, its fact, the answers that are due, drains."""
        for fact in self.group.tick(now_us).facts:
            self.group.apply(fact)
            self.began_at_us = now_us
        beats = round(HEARTBEAT_S * SECOND_US / STEP_US)
        for index, (name, incarnation) in enumerate(self.incarnations.items()):
            if index % beats == now_us // STEP_US % beats:
                self.answer(name, incarnation, now_us)
        if now_us >= self.began_at_us + LET_GO_S * SECOND_US:
            for stream, name in self.group.drains.items():
                self.group.released(name, stream, now_us)

    def answer(self, name: str, incarnation: int, now_us: int) -> None:
        generation = self.group.member(name).since
        reply = self.group.heartbeat(name, incarnation, generation, now_us)
        if reply.must_accept:
            self.group.accept(name, incarnation, reply.generation, now_us)

    def leasable(self) -> dict[StreamId, str]:
        return {s: name for name in self.incarnations for s in self.group.owned(name)}

    def until_stable(self, now_us: int) -> int:
        while self.group.state is not State.STABLE:
            self.step(now_us)
            now_us += STEP_US
        return now_us


def rebalance(protocol: RebalanceProtocol) -> Pauses:
    """One member more, after a calm; who may lease what is looked at every ten milliseconds."""
    crowd = Crowd(protocol)
    for name in NAMES:
        crowd.join(name, 0)
    now_us = crowd.until_stable(0)
    for _ in range(100 * 60):
        now_us += STEP_US
        crowd.step(now_us)
    before = crowd.leasable()
    crowd.join("member-new", now_us)
    paused = dict.fromkeys(STREAMS, 0)
    work_s, started_us = 0.0, now_us
    while crowd.group.state is not State.STABLE:
        began = perf_counter()
        crowd.step(now_us)
        work_s += perf_counter() - began
        now_us += STEP_US
        leasable = crowd.leasable()
        for stream in STREAMS:
            paused[stream] += stream not in leasable
    after = crowd.leasable()
    kept = [paused[stream] for stream in STREAMS if before[stream] == after[stream]]
    gone = [paused[stream] for stream in STREAMS if before[stream] != after[stream]]
    step_s = STEP_US / SECOND_US
    return Pauses((now_us - started_us) / SECOND_US, max(kept) * step_s, max(gone) * step_s, work_s * 1e3)


def share_us(strategy: GroupStrategy, rounds: int) -> float:
    """One question and its answer, of 100 members that all pull and share what is too little."""
    held = dict.fromkeys(NAMES, 0)
    sharing = Sharing(strategy, held.__getitem__)
    for name in NAMES:
        sharing.add(name, 10_000, 0)
        sharing.pull_began(name, 1_000, 0)
    began = perf_counter()
    for turn in range(rounds):
        name = NAMES[turn % MEMBERS]
        count = sharing.allowance(name, 1_000, 5_000, turn)
        sharing.served(name, count, turn)
        held[name] = count
    return (perf_counter() - began) / rounds * 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    return measure.main("groups", __doc__, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
