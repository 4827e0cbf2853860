"""The gate of a connection of the binary protocol: who is behind it, and what each command needs.

A table says what a verb of CALL needs; a verb that is not in it needs everything. Lists show what the
principal may see. What administrators do is written into the audit log, refused or done.

A token that was revoked or has ended makes the gate dead, and its connection is closed within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrow.broker.broker import Broker
from sparrow.kernel.access import TOKEN_PREFIX
from sparrow.model.access import ANONYMOUS, Action, Principal
from sparrow.model.errors import InvalidArgument, SparrowError, Unauthenticated
from sparrow.model.flow import Sender
from sparrow.model.message import parse_message_id
from sparrow.server import calls

_ON_TOPIC: dict[str, tuple[Action, str]] = {
    "create_topic": (Action.ADMIN, "name"),
    "update_topic": (Action.ADMIN, "name"),
    "delete_topic": (Action.ADMIN, "name"),
    "set_topic_schema": (Action.ADMIN, "topic"),
    "delete_topic_schema": (Action.ADMIN, "topic"),
    "subscribe": (Action.SUBSCRIBE, "pattern"),
    "segments": (Action.READ, "topic"),
    "measure": (Action.READ, "topic"),
    "places": (Action.READ, "topic"),
    "plan_rewrite": (Action.ADMIN, "topic"),
    "swap_segments": (Action.ADMIN, "topic"),
}
_ABOUT_TOPIC = {
    "topic": "name",
    "topic_schema": "topic",
    "bounds": "topic",
    "offset_at": "topic",
    "next_sequence": "topic",
    "flow": "topic",
    "topic_lag": "topic",
}
"""Figures and settings of a topic: for everybody who has anything to do with it."""
_ABOUT_SUBSCRIPTION = frozenset(
    [
        "lag", "partition_lags", "lag_report", "consumer_lag", "sample_share", "in_flight", "members",
        "group", "committed", "push_state", "list", "get", "replays", "statistics", "wait",
    ]
)  # fmt: skip
"""Verbs of a subscription and of its dead letters that change nothing."""
_FOR_PUBLISHERS = frozenset({"producer", "commit_staged", "abort_staged", "stages", "committed_batch"})
"""What is staged was staged by somebody who may publish it."""
_FOR_READERS = frozenset({"state", "recovery", "pipelines", "pipeline", "pipeline_log"})
_LISTS = frozenset({"topics", "subscriptions", "lag", "snapshots", "extents"})
_FOR_ALL = frozenset({"health"})
_AUDITED = frozenset(
    [
        "create_topic", "update_topic", "delete_topic", "set_topic_schema", "delete_topic_schema",
        "delete_snapshot", "seal", "apply_retention",
        "swap_segments",
        "set_publisher_limits", "set_token_limits", "create_token", "tokens", "revoke_token", "audit_log",
        "subscription.update", "subscription.unsubscribe", "subscription.pause", "subscription.resume",
        "subscription.push_secrets", "subscription.rotate_secret",
        "apply_pipeline", "start_pipeline", "stop_pipeline", "seek_pipeline", "delete_pipeline",
        "subscription.seek", "dead_letters.replay", "dead_letters.abort", "dead_letters.purge",
    ]
)  # fmt: skip
_NAMES = ("name", "topic", "subscription", "publisher", "token")
"""Arguments that say what a verb was about; a token is one by its name."""
_WHAT_LENGTH_MAX = 255


class Gate:
    """See the module's text."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._access = broker.access
        self.principal: Principal = ANONYMOUS

    def enter(self, token: str) -> str | None:
        """Lets the holder of a token in; the token's name, or none where no token is wanted."""
        self.principal = self._access.authenticate(token or None)
        return None if self.principal.is_anonymous else self.principal.name

    def check_alive(self) -> None:
        """Refuses who came without a token where one is wanted, or with one that is no longer good."""
        try:
            self._access.check_alive(self.principal)
        except Unauthenticated as error:
            if self.principal.is_anonymous:
                raise Unauthenticated(error.message, hint="Say HELLO with a token first.") from None
            raise

    @property
    def is_alive(self) -> bool:
        try:
            self.check_alive()
        except Unauthenticated:
            return False
        return True

    def check_publish(self, topic: str) -> None:
        self._access.require(self.principal, Action.PUBLISH, topic)

    def check_subscribe(self, pattern: str) -> None:
        self._access.require(self.principal, Action.SUBSCRIBE, pattern)

    def check_read(self, topic: str) -> None:
        self._access.require(self.principal, Action.READ, topic)

    async def call(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Does what a verb says, if this connection may; the result is fit for MessagePack."""
        outcome = "done"
        try:
            await self._check(verb, arguments)
            found = await calls.perform(self._broker, verb, arguments)
            return calls.to_wire(await self._visible(verb, found))
        except SparrowError as error:
            outcome = error.code
            raise
        finally:
            if verb in _AUDITED:
                await self._access.audit(self.principal, verb, _about(arguments), outcome)

    async def stage(self, arguments: dict[str, Any], body: memoryview, sender: Sender) -> Any:
        """Adds a batch to a part, for whoever may publish to its topic."""
        self.check_publish(_text("stage", arguments, "topic"))
        return calls.to_wire(await calls.stage(self._broker, arguments, body, sender))

    async def _check(self, verb: str, arguments: dict[str, Any]) -> None:
        access, principal = self._access, self.principal
        noun, _, name = verb.rpartition(".")
        if verb in _ON_TOPIC:
            action, argument = _ON_TOPIC[verb]
            access.require(principal, action, _text(verb, arguments, argument))
            self._check_dead_letters(arguments)
        elif verb in _ABOUT_TOPIC:
            access.require_any(principal, _text(verb, arguments, _ABOUT_TOPIC[verb]))
        elif verb == "subscription":
            access.require(principal, Action.READ, await self._pattern(_text(verb, arguments, "name")))
        elif noun in ("subscription", "dead_letters"):
            action = Action.READ if name in _ABOUT_SUBSCRIPTION else Action.SUBSCRIBE
            access.require(principal, action, await self._pattern(_text(verb, arguments, "subscription")))
            self._check_dead_letters(arguments)
            if isinstance(destination := arguments.get("destination"), str):
                await self.check_subscription(destination)
        elif verb == "delete_snapshot":
            await self._check_snapshot(_text(verb, arguments, "name"))
        elif verb == "trace":
            await self._check_trace(_text(verb, arguments, "message_id"))
        elif verb in _FOR_PUBLISHERS:
            access.require_some(principal, Action.PUBLISH)
        elif verb in _FOR_READERS:
            access.require_some(principal, Action.READ)
        elif verb in _LISTS or verb in _FOR_ALL:
            self.check_alive()
        else:
            access.require(principal, Action.ADMIN)

    def _check_dead_letters(self, arguments: dict[str, Any]) -> None:
        """Whoever sends dead letters to a topic publishes there."""
        topic = arguments.get("dead_letter_topic")
        if isinstance(topic, str):
            self._access.require(self.principal, Action.PUBLISH, topic)

    async def _pattern(self, subscription: str) -> str:
        return (await self._broker.subscription(subscription)).pattern

    async def check_subscription(self, name: str) -> None:
        """Refuses who may not consume this subscription."""
        self.check_subscribe(await self._pattern(name))

    async def _check_snapshot(self, name: str) -> None:
        owners = [
            snapshot.subscription_id for snapshot in await self._broker.snapshots() if snapshot.name == name
        ]
        patterns = {each.id: each.pattern for each in await self._broker.subscriptions()}
        self._access.require(self.principal, Action.SUBSCRIBE, patterns.get(owners[0]) if owners else None)

    async def _check_trace(self, message_id: str) -> None:
        topic_id = parse_message_id(message_id).topic_id
        names = [topic.name for topic in await self._broker.topics() if topic.id == topic_id]
        self._access.require(self.principal, Action.READ, names[0] if names else None)

    async def _visible(self, verb: str, found: Any) -> Any:
        """The entries of a list that the principal may see."""
        if verb not in _LISTS or self._access.may(self.principal, Action.READ):
            return found
        may = self._may_read
        if verb == "topics":
            return [topic for topic in found if self._access.may_any(self.principal, topic.name)]
        if verb == "extents":
            return [extent for extent in found if may(extent.topic)]
        if verb == "subscriptions":
            return [each for each in found if may(each.pattern)]
        seen = [each for each in await self._broker.subscriptions() if may(each.pattern)]
        if verb == "lag":
            return {each.name: found[each.name] for each in seen if each.name in found}
        ids = {each.id for each in seen}
        return [snapshot for snapshot in found if snapshot.subscription_id in ids]

    @property
    def _may_read(self) -> Callable[[str], bool]:
        return lambda pattern: self._access.may(self.principal, Action.READ, pattern)


def _text(verb: str, arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{verb} needs the argument `{name}`, a text")
    return value


def _about(arguments: dict[str, Any]) -> str:
    named = [arguments[name] for name in _NAMES if isinstance(arguments.get(name), str)]
    what = named[0] if named else ""
    # Somebody may give the token itself where its name belongs.
    return f"{TOKEN_PREFIX}…" if what.startswith(TOKEN_PREFIX) else what[:_WHAT_LENGTH_MAX]
