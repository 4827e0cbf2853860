"""Runs a whole broker through a seed's worth of trouble, and repeats a seed on demand.

    python -m sparrow.testing.simulate --seed 123 --trace
    python -m sparrow.testing.simulate --seeds 0:1000

A run is a few lives of a broker. In each, publishers, consumers and an operator do what a seed tells them,
until the life ends; then the next one starts from the directory that was left. In the last life nothing
fails any more: everything is delivered and acked, and every message must be accounted for. docs/guides/
simulation.md tells more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from sparrow.broker.broker import Broker
from sparrow.model.errors import SparrowError
from sparrow.testing import simaudit, simmember
from sparrow.testing.simclock import seeded_chance
from sparrow.testing.simconsumer import Consumer
from sparrow.testing.simgroup import GroupModel
from sparrow.testing.simloop import Crashed
from sparrow.testing.simmachine import Machine, shared_statements
from sparrow.testing.simmember import Member
from sparrow.testing.simmodel import Broken, SubscriptionModel, World
from sparrow.testing.simoperator import Operator
from sparrow.testing.simplan import ENDS, Plan
from sparrow.testing.simpublisher import Publisher

_QUIET_S = 60.0
"""Longer than any deadline, backoff, delay or patience of a seed."""
_LOOK_S = 0.1
_SETTLE_S = 1.0
"""Longer than the disk takes for what it was asked before."""
_MEMORY = Path("/dev/shm")


class Outcome(NamedTuple):
    """What came of a seed."""

    seed: int
    complaint: str
    """Empty when every promise was kept."""
    operations: int
    messages: int
    lives: int
    steps: int
    trace: list[str]

    @property
    def command(self) -> str:
        """How to see it again."""
        return f"python -m sparrow.testing.simulate --seed {self.seed} --trace"


class Simulation:
    """One seed. ``prepare`` may put a broken part into the machine, to see that it is noticed."""

    def __init__(self, plan: Plan, directory: Path, prepare: Callable[[Machine], None] | None = None) -> None:
        self.plan = plan
        self._dice: Random = plan.dice("simulation")
        self.machine = Machine(
            directory, plan.dice("machine"), rotate_after_s=plan.rotate_after_s, file_bytes=plan.file_bytes
        )
        if prepare is not None:
            prepare(self.machine)
        self.world = World(self.machine.clock)
        self._operator = Operator(self.machine, self.world, plan)
        self._publishers = [Publisher(number, self.world, plan) for number in range(plan.publishers)]
        self._is_power_lost = False

    def run(self) -> None:
        """All lives, then the reckoning."""
        with seeded_chance(self.plan.dice("chance")), shared_statements():
            try:
                for _ in range(self.plan.lives):
                    self._live()
                self.machine.run(self._drain())
                self._check_heard()
            finally:
                self.machine.end()

    # A life.

    def _live(self) -> None:
        end = self._dice.choice(ENDS)
        if self._dice.random() < 0.1:
            self.machine.disk.stop_at(self._dice.randint(1, 12))  # while the directory is being opened
        with suppress(Crashed):
            self.machine.run(self._life(end))
        self._check_heard()
        self.world.note("the life ends:", end)
        self._is_power_lost = end in ("power", "disk")
        if self._is_power_lost:
            self.machine.lose_power()
        else:
            self.machine.kill()
        self.world.end_life()

    def _check_heard(self) -> None:
        unheard = self.machine.loop.unheard()
        if unheard:
            raise Broken(unheard[0])

    async def _life(self, end: str) -> None:
        broker = await self._open()
        clients = self._start(broker)
        await self._watch(clients)
        if end == "close":
            await _stop(clients)
            with suppress(SparrowError):  # A close that fails leaves what a kill would leave.
                await self.machine.close()
            return
        if end == "disk":
            self.machine.disk.stop_at(self._dice.randint(1, 12))
        else:
            self.machine.loop.crash_at = self.machine.loop.steps + self._dice.randint(1, 80)
        await asyncio.wait(clients, timeout=10.0, return_when=asyncio.FIRST_EXCEPTION)
        _raise_failure(clients)
        raise Crashed("nothing was written for long")

    async def _open(self) -> Broker:
        broker = await self.machine.open()
        self.world.start_of = lambda stream: broker._store.bounds(stream).start_offset
        self.world.is_safe = lambda place: simaudit.is_synced(broker, place)
        await simaudit.audit(broker, self.world, is_power_lost=self._is_power_lost)
        await self._operator.prepare(broker)
        return broker

    def _start(self, broker: Broker) -> list[asyncio.Task[None]]:
        people: list[Any] = [self._operator, *self._publishers]
        for model in self.world.subscriptions.values():
            if isinstance(model, GroupModel):
                people += [Member(n, model, self.world, self.plan) for n in range(self.plan.members)]
            else:
                people += [Consumer(n, model, self.world, self.plan) for n in range(self.plan.consumers)]
        loop = asyncio.get_running_loop()
        return [loop.create_task(each.run(broker)) for each in people]

    async def _watch(self, clients: list[asyncio.Task[None]]) -> None:
        """Until enough has happened."""
        target = self.world.operations + self.plan.operations
        self._operator.is_restart_wanted = False
        last, quiet_s = self.world.operations, 0.0
        while self.world.operations < target and not self._operator.is_restart_wanted:
            await asyncio.wait(clients, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
            _raise_failure(clients)
            quiet_s = quiet_s + _LOOK_S if self.world.operations == last else 0.0
            last = self.world.operations
            if quiet_s > _QUIET_S:
                raise Broken(f"all clients have been waiting for {_QUIET_S:.0f} s")

    # The reckoning.

    async def _drain(self) -> None:
        """Without faults: all is delivered, all is acked, and everything is accounted for."""
        broker = await self._open()
        if self._dice.random() < 0.5:
            broker = await self._leave_off(broker)
        await self._drain_all(broker)
        letters = await simaudit.audit(broker, self.world, is_power_lost=False)
        for model in self.world.subscriptions.values():
            simaudit.check_drained(broker, model, letters)
        await self._replay_all(broker, letters)
        await self.machine.close()
        if self._dice.random() < 0.5:
            return
        self.world.end_life()
        broker = await self._open()
        await self._drain_all(broker)  # Nothing comes, but what a filter passes over is read again.
        await self.machine.close()

    async def _leave_off(self, broker: Broker) -> Broker:
        """One more stretch of trouble; then all clients go, and leave what they hold."""
        clients = self._start(broker)
        await self._watch(clients)
        await _stop(clients)
        self.machine.disk.heal()
        await asyncio.sleep(_SETTLE_S)
        await broker._settling.flush()
        if not broker.state().is_writable:
            with suppress(SparrowError):
                await self.machine.close()
            self.world.end_life()
            return await self._open()
        await simaudit.audit(broker, self.world, is_power_lost=False)
        return broker

    async def _drain_all(self, broker: Broker) -> None:
        models = list(self.world.subscriptions.values())
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._drain_one(broker, model)) for model in models]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _raise_failure(tasks)

    async def _drain_one(self, broker: Broker, model: SubscriptionModel) -> None:
        subscription = await broker.subscription(model.name)
        await subscription.resume()
        if isinstance(model, GroupModel):
            await simmember.drain(broker, model, self.world, self.plan)
            await _check_lag(broker, model)
            return
        idle = 0
        while idle < 2:
            began = self.world.next_tick()
            messages = await subscription.pull(50, timeout_s=_QUIET_S)
            items = [model.delivered(message, f"{model.name}/drain", began) for message in messages]
            if items:
                self.world.note(model.name, "drains", *items)
                for item in items:
                    model.ack_asked(item, item.handed[-1])
                await subscription.ack(messages, wait=True)
                for item in items:
                    model.ack_confirmed(item, item.acked_at)
            idle = 0 if messages else idle + 1
        await _check_lag(broker, model)

    async def _replay_all(self, broker: Broker, letters: list[simaudit.Letter]) -> None:
        """Every open letter comes back under its id, is delivered and acked."""
        returning = []
        for model in self.world.subscriptions.values():
            opened = [x for x in letters if x.subscription == model.name and simaudit.is_open(broker, x)]
            if not opened or any(policy.poison_rules for policy in model.policies):
                continue
            model.replay_asked()
            box = (await broker.subscription(model.name)).dead_letters
            job = await box.wait((await box.replay(rate_per_s=1000.0)).replay_id)
            self.world.note(model.name, "replays", job.replayed, "of", len(opened))
            for letter in opened:
                item = model.items[letter.source]
                is_due = model.is_meant(item.record, item.place) and not model.may_have_expired(item)
                if is_due and not simaudit.is_open(broker, letter):
                    item.is_acked = item.is_done = False
                    returning.append((model, item, len(item.handed)))
        await self._drain_all(broker)
        for model, item, before in returning:
            is_there = item.place.offset >= broker._store.bounds(item.place.stream).start_offset
            if len(item.handed) == before and is_there:
                raise Broken(f"{model.name}: {item} was replayed and did not come")


async def _check_lag(broker: Broker, model: SubscriptionModel) -> None:
    lag = await (await broker.subscription(model.name)).lag()
    if lag:
        raise Broken(f"{model.name} has a lag of {lag} when everything is done")


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            task.result()


# Seeds.


def simulate(
    seed: int,
    steps: int | None = None,
    *,
    is_traced: bool = False,
    prepare: Callable[[Machine], None] | None = None,
) -> Outcome:
    """Runs one seed; never raises for a broken promise."""
    directory = Path(tempfile.mkdtemp(prefix="sparrow-sim-", dir=_MEMORY if _MEMORY.is_dir() else None))
    run = Simulation(Plan(seed, steps), directory, prepare)
    run.world.trace = [] if is_traced else None
    complaint = ""
    try:
        with _quiet():
            run.run()
    except Broken as broken:
        complaint = str(broken)
    except Exception as error:  # noqa: BLE001 - whatever fails in a simulation is its finding
        complaint = f"{error!r}\n{''.join(traceback.format_exception(error)[-12:])}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    world = run.world
    return Outcome(
        seed,
        complaint,
        world.operations,
        len(world.records),
        world.life + 1,
        run.machine.loop.steps,
        world.trace or [],
    )


def simulate_many(seeds: range, processes: int = 2) -> Iterator[Outcome]:
    """Runs many seeds, over several processes, and yields their outcomes as they come."""
    if processes <= 1:
        yield from map(simulate, seeds)
        return
    with ProcessPoolExecutor(processes, initializer=_settle_memory) as pool:
        yield from pool.map(simulate, seeds, chunksize=8)


def _settle_memory() -> None:
    """What is loaded stays; looking through it for garbage again and again would cost a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def _quiet() -> Iterator[None]:
    """A broker in trouble has much to say."""
    log = logging.getLogger("sparrow")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sparrow.testing.simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed")
    parser.add_argument("--seeds", help="run a range of seeds, as 0:1000")
    parser.add_argument("--steps", type=int, help="operations in one life, instead of the seed's own number")
    parser.add_argument("--trace", action="store_true", help="print everything that the clients did")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args(arguments)
    if chosen.seeds:
        start, _, end = chosen.seeds.partition(":")
        return _run_many(range(int(start), int(end)), chosen.processes)
    outcome = simulate(chosen.seed or 0, chosen.steps, is_traced=chosen.trace)
    for line in outcome.trace:
        _print(line)
    _print(_summary(outcome))
    return 1 if outcome.complaint else 0


def _run_many(seeds: range, processes: int) -> int:
    failed = 0
    for outcome in simulate_many(seeds, processes):
        if outcome.complaint:
            failed += 1
            _print(_summary(outcome))
    _print(f"{len(seeds)} seeds, {failed} failed")
    return 1 if failed else 0


def _summary(outcome: Outcome) -> str:
    what = outcome.complaint or "every promise was kept"
    return (
        f"seed {outcome.seed}: {what}\n"
        f"  {outcome.lives} lives, {outcome.operations} operations, {outcome.messages} messages, "
        f"{outcome.steps} steps in the last life\n  repeat with: {outcome.command}"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
