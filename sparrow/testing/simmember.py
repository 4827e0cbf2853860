"""Members of a simulated group: they join, pull, settle, commit, and go wrong in every way that members do.

They leave, crash, fall silent and come back to settle what is no longer theirs, lie about their generation,
and take the names of others. ``drain`` is the end of a group: with members that behave, all comes and is
done, the group is stable soon, and when they have left nothing of them is kept.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.model.errors import OffsetOutOfRange, SparrowError, StaleGeneration
from sparrow.model.message import StreamId
from sparrow.testing import simaudit
from sparrow.testing.simconsumer import Consumer, Held
from sparrow.testing.simgroup import GroupModel, Note, Seat
from sparrow.testing.simloop import ask, is_stopping
from sparrow.testing.simmodel import Broken, Handed, World
from sparrow.testing.simplan import Plan

_STABLE_S = 20.0
"""Within this a group is stable: two sessions, rebalances, drains and backoffs of a seed."""
_JUMPS_S = 60.0
"""As much longer may it take when the clock was set back."""
_QUIET_S = 60.0
"""Longer than any wait of a seed; a third is, when no clock was set."""
_LOOK_S = 0.25


class Member(Consumer):
    """One process that is a member most of the time. It dies with its broker, as any consumer."""

    _model: GroupModel

    def __init__(self, number: int, model: GroupModel, world: World, plan: Plan) -> None:
        super().__init__(number, model, world, plan)
        self._own_name = f"m{number}"
        self._names = [f"m{n}" for n in range(plan.members)]
        self._seat: Seat | None = None
        self._is_lying = False

    async def run(self, broker: Broker) -> None:
        try:
            while True:
                await asyncio.sleep(self._dice.uniform(0.0, 0.5))
                await self._try_turn(broker)
                simaudit.check_owners(broker, self._model)
        finally:
            self._drop()

    async def _try_turn(self, broker: Broker) -> None:
        try:
            if self._seat is None:
                await self._join(broker)
            await self._member_turn(broker)
        except StaleGeneration as error:
            self._world.note(self.name, "must join again:", error.message)
            self._told_to_rejoin(error)
            self._drop()
        except SparrowError as error:
            self._world.note(self.name, "refused", type(error).__name__)
            await asyncio.sleep(self._dice.uniform(0.0, 1.0))

    @property
    def _sits(self) -> Seat:
        assert self._seat is not None
        return self._seat

    # Coming and going.

    async def _join(self, broker: Broker) -> None:
        dice, model = self._dice, self._model
        name = dice.choice(self._names) if dice.random() < 0.25 else self._own_name
        is_automatic = dice.random() < 0.5
        subscription = await broker.subscription(model.name)
        model.joins(name)
        member = self._subscription = await subscription.join(
            name,
            max_in_flight=dice.choice((1, 3, 20, None)),
            is_static=dice.random() < 0.3,
            heartbeat="automatic" if is_automatic else "manual",
        )
        self._seat = model.joined(name, is_automatic=is_automatic)
        self.name = self._seat.label
        self._unconfirmed = []
        self._world.note(self.name, "joins", "" if is_automatic else "by hand", member.generation)
        model.saw_generation(member.generation, is_served=False)

    async def _leave(self, broker: Broker) -> None:
        """Says goodbye; what it holds is free at once."""
        seat, asks = self._sits, list(self._unconfirmed)
        self._world.note(self.name, "leaves")
        was_gone = self._model.may_be_gone(seat)
        self._model.leaves(seat)
        try:
            await self._subscription.leave()
        except SparrowError as error:
            self._forget(asks)
            self._world.note(self.name, "hears while it leaves:", error.message)
            if isinstance(error, StaleGeneration) and not was_gone:
                raise Broken(f"{seat} leaves, and is told that it had gone before: {error}") from error
        else:
            self._confirm(asks)
        finally:
            self._drop()

    def _crash(self) -> None:
        """The process is gone and told nobody."""
        self._world.note(self.name, "crashes")
        self._drop()

    def _drop(self) -> None:
        if self._seat is not None:
            _vanish(self._subscription, self._seat, self._model)
        self._seat = None

    # A turn.

    async def _member_turn(self, broker: Broker) -> None:
        choice = self._dice.random()
        if choice < 0.06:
            self._crash()
        elif choice < 0.14:
            await self._stall()
        elif choice < 0.2:
            await self._lie()
        elif choice < 0.32:
            await self._commit()
        elif choice < 0.36:
            await self._leave(broker)
        elif choice < 0.42:
            await self._beat()
        elif choice < 0.46:
            await self._look(broker)
        elif choice < 0.7:
            await self._work_slowly()
        else:
            await self._turn(broker)

    async def _stall(self) -> None:
        """Silent for longer than a session lasts; then it wants to go on as if nothing had been."""
        held = await self._pull()
        self._world.note(self.name, "falls silent with", *(item for item, _ in held))
        await asyncio.sleep(self._model.session_timeout_s * self._dice.choice((0.5, 1.2, 2.0)) + 0.3)
        what = self._dice.random()
        if held and what < 0.6:
            await self._settle(held)
        elif what < 0.8:
            await self._commit()
        else:
            await self._beat()

    async def _work_slowly(self) -> None:
        """Holds what it has for a while and says that it lives; others come and go meanwhile."""
        held = await self._pull()
        self._world.note(self.name, "works on", *(item for item, _ in held))
        for _ in range(self._dice.choice((1, 2, 4))):
            await asyncio.sleep(self._dice.uniform(0.1, 0.4))
            await self._beat()
        if held:
            await self._settle(held)

    async def _lie(self) -> None:
        """In the name of a generation that is not its own."""
        held = await self._pull()
        member, seat = self._subscription, self._sits
        truth = member.generation
        lie = truth + self._dice.choice((-5, -1, 1, 1000))
        self._world.note(self.name, "lies, it is in", lie)
        seat.is_unsure = seat.is_unsure or seat.is_automatic  # Signs of life may end with it.
        self._is_lying, member.generation = True, lie
        try:
            if held and self._dice.random() < 0.7:
                await self._settle(held)
            else:
                await self._commit()
        finally:
            self._is_lying = False
            if member.generation == lie:
                member.generation = truth

    async def _beat(self) -> None:
        model, seat = self._model, self._sits
        must_refuse, at_us = self._try()
        await self._subscription.heartbeat("busy")
        self._check_refused(must_refuse)
        model.heard(seat, at_us)
        model.saw_generation(self._subscription.generation, is_served=False)

    async def _look(self, broker: Broker) -> None:
        """What everybody may see is as it is."""
        subscription = await broker.subscription(self._model.name)
        members, group = await subscription.members(), await subscription.group()
        if group.members != len(members) or sorted(m.name for m in members) != [m.name for m in members]:
            raise Broken(f"{self._model.name} says it has {group.members} members: {members}")
        if group.state == "stable" and (group.draining or (group.unassigned and members)):
            raise Broken(f"{self._model.name} says it is stable: {group}")
        self._model.saw_generation(group.generation, is_served=False)

    def _try(self) -> tuple[bool, int]:
        """A sign of life is about to be given: whether it must be refused, and when it was given."""
        must_refuse, now_us = self._model.is_surely_gone(self._sits), self._world.clock.now_us()
        if not must_refuse:
            self._sits.tried_at_us = max(self._sits.tried_at_us, now_us)
        return must_refuse, now_us

    def _check_refused(self, must_refuse: bool) -> None:
        if must_refuse:
            raise Broken(f"{self.name} is no member any more, and yet it was heard")

    # Receiving and settling.

    async def _pull(self) -> list[Held]:
        must_refuse, at_us = self._try()
        held = await super()._pull()
        if self._dice.random() < 0.2:
            await asyncio.sleep(0)
        self._check_refused(must_refuse and bool(held))
        if held:
            self._model.heard(self._sits, at_us)
            self._model.saw_generation(self._subscription.generation, is_served=True)
        return held

    async def _ack_again(self) -> None:
        if self._seat is not None:
            await super()._ack_again()

    async def _carefully(self, work: Any, held: list[Held], before: Any = ()) -> set[str] | None:
        must_refuse = self._model.is_surely_gone(self._sits) or self._is_far_off()
        refused = await super()._carefully(work, held, before)
        if must_refuse and refused is not None and len(refused) < len({h.ack_id for _, h in held}):
            raise Broken(f"{self.name} is no member any more, and yet it settled {held}")
        return refused

    def _is_far_off(self) -> bool:
        return self._is_lying and self._subscription.generation > self._model.generation + 500

    def _is_own(self, handed: Handed) -> bool:
        return handed.consumer == self.name

    def _told_to_rejoin(self, error: StaleGeneration) -> None:
        """Whoever surely sits is not told so; but of a partition that moved it may be."""
        seat = self._seat
        if seat is None or self._is_lying or self._model.may_be_gone(seat):
            return
        if not self._model.is_partitioned or "does not own" not in error.message:
            raise Broken(f"{seat} is a member, and yet is told: {error}") from error

    # Committing.

    async def _commit(self) -> None:
        """A cumulative ack of a partition, as far as anybody knows of it; now and then of another's."""
        dice, model, world = self._dice, self._model, self._world
        member = self._subscription
        places = [(each.topic, each.partition) for each in member.assignment]
        if dice.random() < 0.25:
            ids = {topic.id: topic.name for topic in world.topics.values()}
            places = [(ids[stream.topic_id], stream.partition) for stream in model.starts]
        if not places or model.is_changing:
            return
        topic, partition = dice.choice(places)
        stream = StreamId(world.topics[topic].id, partition)
        known = [item.place.offset + 1 for item in model.items.values() if item.place.stream == stream]
        offset = dice.choice(known) if known else 0
        must_refuse = model.is_surely_gone(self._sits) or self._is_far_off()
        text, resets = f"{self.name} {world.operations}", model.resets
        world.note(self.name, "commits", topic, partition, offset)
        note = model.note_asked(stream, offset, text)
        if not must_refuse:
            model.commit_asked(stream, offset)
        before = await self._stand(topic, partition)
        is_taken = await self._ask_to_commit(
            member.commit(topic, partition, offset, metadata=text), stream, note
        )
        if not is_taken:
            return
        if must_refuse:
            raise Broken(f"{self.name} is no member any more, and yet it committed {note}")
        if before[1] and before == await self._stand(topic, partition):
            raise Broken(f"{self.name} does not own {topic}/{partition}, and yet it committed {note}")
        model.note_confirmed(stream, note, resets)

    async def _ask_to_commit(self, work: Any, stream: StreamId, note: Note) -> bool:
        """Whether the commit was confirmed."""
        try:
            await ask(work, self._dice)
        except asyncio.CancelledError:
            if is_stopping():
                raise
            self._world.note(self.name, "never hears of it")
            return False
        except (StaleGeneration, OffsetOutOfRange) as error:
            self._world.note(self.name, "may not commit:", error.message)
            self._model.note_refused(stream, note)
            if isinstance(error, StaleGeneration):
                self._told_to_rejoin(error)
            return False
        return True

    async def _stand(self, topic: str, partition: int) -> tuple[int, bool]:
        """The generation of the group, and whether it gives the member nothing to say about a partition."""
        member = self._subscription
        info = await member.group()
        named = [(each.topic, each.partition) for each in (*member.assignment, *info.draining)]
        return info.generation, (topic, partition) not in named


# The end.


async def drain(broker: Broker, model: GroupModel, world: World, plan: Plan) -> None:
    """Members that behave get everything and ack it; then they leave."""
    quiet_s = _QUIET_S if plan.has_jumps else _QUIET_S / 3
    dice = plan.dice(f"drain {model.name} {world.life} {world.operations}")
    subscription = await broker.subscription(model.name)
    names = [dice.choice(("m", "d")) + str(number) for number in range(dice.choice((1, 2, 2, 3)))]
    members = []
    for name in names:
        model.joins(name)
        member = await subscription.join(name)
        members.append((member, model.joined(name, is_automatic=True)))
    await _await_stable(subscription, model, set(names), plan)
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(_drain_share(model, world, member, seat, quiet_s)) for member, seat in members]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()
    simaudit.check_owners(broker, model)
    model.check_notes(simaudit.commits(broker, model), is_final=True)
    for member, seat in members:
        await _part(member, seat, model, dice)
    await _await_empty(subscription, model)
    simaudit.check_left(broker, model)


async def _drain_share(model: GroupModel, world: World, member: Any, seat: Seat, quiet_s: float) -> None:
    while True:
        began = world.next_tick()
        messages = await member.pull(50, timeout_s=quiet_s)
        model.saw_generation(member.generation, is_served=bool(messages))
        if not messages:
            return
        items = [model.delivered(message, seat.label, began) for message in messages]
        world.note(seat, "drains", *items)
        for item in items:
            model.ack_asked(item, item.handed[-1])
        await member.ack(messages, wait=True)
        for item in items:
            model.ack_confirmed(item, item.acked_at)


async def _await_stable(subscription: Any, model: GroupModel, names: set[str], plan: Plan) -> None:
    """Soon the group is theirs alone; earlier members that are silent have gone."""
    limit_s = _STABLE_S + (_JUMPS_S if plan.has_jumps else 0.0)
    for _ in range(round(limit_s / _LOOK_S)):
        info = await subscription.group()
        there = {member.name for member in await subscription.members()}
        if info.state == "stable" and there == names:
            if info.draining or info.unassigned:
                raise Broken(f"{model.name} says it is stable: {info}")
            return
        await asyncio.sleep(_LOOK_S)
    raise Broken(f"{model.name} is not stable after {limit_s:.0f} s: {info}, {there} for {names}")


async def _part(member: Any, seat: Seat, model: GroupModel, dice: Random) -> None:
    """In order, or by silence."""
    if dice.random() < 0.7:
        model.leaves(seat)
        await member.leave()
    else:
        _vanish(member, seat, model)


def _vanish(member: Any, seat: Seat, model: GroupModel) -> None:
    """As when the process ends, or drops its handle: nobody is told."""
    model.crashes(seat)
    member._stop()


async def _await_empty(subscription: Any, model: GroupModel) -> None:
    await asyncio.sleep(model.session_timeout_s + 0.2)
    info = await subscription.group()
    if info.state != "empty" or info.members:
        raise Broken(f"{model.name} is not empty when everybody has gone: {info}")
