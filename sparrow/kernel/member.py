"""A member of a group, and the values that pass between a group and its shell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sparrow.kernel.facts import Fact
from sparrow.kernel.ownership import NOTHING, Streams
from sparrow.model.message import StreamId


@dataclass(slots=True)
class Member:
    """A consumer that belongs to the group; to be read, not to be changed."""

    member_id: str
    incarnation: int
    max_in_flight: int
    joined_at_us: int
    heard_at_us: int
    since: int
    """The generation it joined in; it cannot speak for an earlier one."""
    is_static: bool = False
    """Whether its seat is kept when its connection breaks."""
    instance: str = ""
    """What the process calls itself: host, version."""
    status: str = ""
    """What it last said about itself."""
    accepted: int = 0
    """The newest generation that it accepted."""


class Joined(NamedTuple):
    """The answer to a join."""

    member_id: str
    incarnation: int
    generation: int
    is_returning: bool
    """A process of that name was a member: the shell releases what that one leased."""
    assignment: Streams
    """What it has in this generation; a new member has nothing before the next one."""


class Reply(NamedTuple):
    """The answer to a heartbeat."""

    generation: int
    must_rejoin: bool = False
    """The group does not know it, or not any more."""
    is_fenced: bool = False
    """Another process has joined under its name."""
    must_accept: bool = False
    """A generation has begun: take up ``assignment`` and accept it."""
    assignment: Streams = NOTHING


@dataclass(slots=True)
class Tick:
    """What time has brought: facts for the journal, and what the shell takes from whom."""

    facts: list[Fact] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    """Members that are no more: release all that they leased."""
    expelled: list[tuple[str, StreamId]] = field(default_factory=list)
    """Live members that did not let go in time: release what they leased of the stream."""
