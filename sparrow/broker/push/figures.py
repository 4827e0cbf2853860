"""Webhooks in figures, for ``/metrics``: receivers by the state of their breakers, requests by their outcome.

They are summed up over all receivers, so their number of samples is the same for one and for ten thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sparrow.broker.push.pushers import Pushers
from sparrow.broker.subscriptions import Subscriptions
from sparrow.broker.telemetry import Extra
from sparrow.model.errors import SparrowError
from sparrow.model.push import PushStatus


class PushFigures:
    """See the module's text."""

    def __init__(self, pushers: Pushers, subscriptions: Subscriptions) -> None:
        self._pushers = pushers
        self._subscriptions = subscriptions

    def __call__(self) -> Iterable[Extra]:
        states: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        pushing = [c.subscription for c in self._subscriptions if c.subscription.policy.push is not None]
        for subscription in pushing:
            try:
                state = self._pushers.state(subscription)
            except SparrowError:
                continue  # It was made or removed this instant.
            states[state.state.value] += 1
            sums["delivered"] += state.delivered
            sums["failed"] += state.failed
            sums["in_flight"] += state.in_flight
        if not pushing:
            return []
        receivers = [({"state": each.value}, float(states[each.value])) for each in PushStatus]
        results = [({"result": result}, float(sums[result])) for result in ("delivered", "failed")]
        return [
            Extra("sparrow_push_receivers", "Receivers of webhooks by state.", "gauge", receivers),
            Extra("sparrow_push_requests_total", "Webhooks sent by result.", "counter", results),
            Extra("sparrow_push_in_flight", "Webhooks under way.", "gauge", [({}, float(sums["in_flight"]))]),
        ]
