"""What one seed wants: topics, subscriptions, how the lives of the broker end, what goes wrong.

Everything is drawn from the seed before or while the run goes on, each part from dice of its own, so that
a change in one part leaves the others as they were.
"""

from __future__ import annotations

from random import Random
from typing import Any

from sparrow.model.group import STRATEGIES, GroupMode, RebalanceProtocol
from sparrow.model.subscription import Guarantee, Ordering
from sparrow.testing.simmodel import FILTERS

TOPICS = ("t.a", "t.b", "t.c")
PATTERNS = ("t.a", "t.b", "t.*", "t.#")
DEAD = "dead"
KEYS = ("k1", "k2", "k3", None)
ENDS = ("kill", "kill", "power", "power", "disk", "disk", "close")


class Plan:
    """The choices of one seed."""

    def __init__(self, seed: int, steps: int | None = None) -> None:
        self.seed = seed
        dice = self.dice("plan")
        self.lives = dice.choice((1, 1, 2, 2, 3))
        self.is_cut = steps is not None
        self.operations = dice.choice((15, 30, 45, 60)) if steps is None else steps
        """Roughly, in one life."""
        self.file_bytes = dice.choice((16, 32, 64, 256)) * 1024
        self.rotate_after_s = dice.choice((5.0, 30.0, 900.0, 900.0))
        self.has_faults = dice.random() < 0.4
        self.has_jumps = dice.random() < 0.25
        self.has_resets = dice.random() < 0.4
        """Seeks, snapshots, replays: they leave the model less to know, so most seeds do without."""
        self.has_changes = dice.random() < 0.4
        self.topics = [self._topic(dice, name) for name in TOPICS[: dice.choice((1, 1, 2, 3))]]
        self.subscriptions = [self._subscription(dice, n) for n in range(dice.choice((1, 2, 3)))]
        self.publishers = dice.choice((1, 2, 3))
        self.consumers = dice.choice((1, 1, 2, 3))
        """Of each subscription."""
        self.dead_partitions = dice.choice((1, 2))
        self.members = 0
        """Of each group; none when no subscription is one."""
        self._gather(self.dice("groups"))

    def dice(self, what: str) -> Random:
        """Dice of one part; the seed is text, so that it does not depend on how Python hashes."""
        return Random(f"{self.seed}/{what}")

    def _topic(self, dice: Random, name: str) -> dict[str, Any]:
        options: dict[str, Any] = {"name": name, "partitions": dice.choice((1, 1, 2, 3))}
        options["durability"] = "written" if dice.random() < 0.12 else "durable"
        options["codec"] = dice.choice(("none", "none", "lz4"))
        options["dedupe_window_s"] = 86_400.0
        options["retention_s"] = None
        if dice.random() < 0.25:
            options |= dice.choice(({"retention_messages": 10}, {"retention_s": 8.0}))
            options["retain_until_acked"] = dice.random() < 0.6
        return options

    def _subscription(self, dice: Random, number: int) -> dict[str, Any]:
        return {
            "name": f"s{number}",
            "pattern": dice.choice(PATTERNS),
            "start": dice.choice(("earliest", "latest")),
            **self.policy(dice),
        }

    def policy(self, dice: Random) -> dict[str, Any]:
        """A policy; every ordering meets every guarantee."""
        options: dict[str, Any] = {
            "ordering": dice.choice(list(Ordering)).value,
            "guarantee": dice.choice((*Guarantee, Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE)).value,
            "ack_deadline_s": dice.choice((1.0, 3.0, 10.0)),
            "filter": dice.choice(("", "", *FILTERS)),
            "max_in_flight": dice.choice((2, 10, 100_000)),
            "read_ahead": dice.choice((3, 20, 50_000)),
        }
        retry: dict[str, Any] = {
            "min_backoff_s": dice.choice((0.1, 1.0)),
            "max_backoff_s": dice.choice((1.0, 4.0)),
            "immediate_retries": dice.choice((0, 1, 2)),
        }
        if options["ordering"] != "none" and dice.random() < 0.25:
            options["key_window"] = dice.choice((2, 5))
        if dice.random() < 0.5:
            options["dead_letter_topic"] = f"{dice.choice(('x', 'y'))}.{DEAD}"
            retry["max_attempts"] = dice.choice((1, 2, 3))
            options["expired"] = dice.choice(("drop", "dead_letter"))
            options["poison_rules"] = dice.random() < 0.15
        options["retry"] = retry
        return options

    def _gather(self, dice: Random) -> None:
        """Makes groups of subscriptions, in some seeds."""
        if dice.random() >= 0.33:
            return
        self.members = dice.choice((2, 2, 3, 4))
        if not self.is_cut:
            self.operations += 15  # It takes a while until members are missed.
        for topic in self.topics:
            topic["partitions"] = max(topic["partitions"], dice.choice((1, 2, 3, 4)))
        for number, subscription in enumerate(self.subscriptions):
            if number == 0 or dice.random() < 0.5:
                subscription["group"] = self._group(dice)
                spans = subscription["ordering"] in (Ordering.PUBLISHER, Ordering.TOTAL)
                if spans and subscription["group"]["mode"] == "partitioned":
                    subscription["ordering"] = Ordering.KEY.value

    def _group(self, dice: Random) -> dict[str, Any]:
        """A group whose members are missed soon."""
        mode = dice.choice((GroupMode.SHARED, GroupMode.PARTITIONED, GroupMode.PARTITIONED))
        session_timeout_s = dice.choice((0.8, 1.5, 3.0))
        return {
            "mode": mode.value,
            "strategy": dice.choice(STRATEGIES[mode]).value,
            "rebalance": dice.choice(list(RebalanceProtocol)).value,
            "heartbeat_s": session_timeout_s / 2,
            "session_timeout_s": session_timeout_s,
            "stabilisation_s": dice.choice((0.0, 0.05, 0.2)),
            "rebalance_timeout_s": dice.choice((0.5, 2.0)),
            "drain_timeout_s": dice.choice((0.3, 1.0, 4.0)),
            "backoff_min_s": 0.05,
            "backoff_max_s": dice.choice((0.1, 1.0)),
        }

    def message_options(self, dice: Random) -> dict[str, Any]:
        """The rarer wishes of one message; times are relative here."""
        chosen: dict[str, Any] = {}
        if dice.random() < 0.06:
            chosen["ttl_s"] = dice.choice((0.5, 3.0, 20.0))
        if dice.random() < 0.06:
            chosen["deliver_in_s"] = dice.choice((0.5, 3.0, 8.0))
        if dice.random() < 0.08:
            chosen["priority"] = dice.choice((-5, 5))
        return chosen
