"""The health family of the HTTP API: two probes, for whoever restarts and whoever routes.

``/health/live`` says that the process answers, and nothing else: a supervisor restarts on it, and a
full disk is not cured by a restart. ``/health/ready`` says whether work should be sent here; it is
503 with a reason when the broker's own report is critical or unknown.
"""

from __future__ import annotations

from importlib import metadata

import msgspec
from litestar import Response, Router, get

from sparrow.broker.clock import Clock
from sparrow.model.health import Check, Health, HealthSource, Status


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of both probes."""

    status: Status
    checks: tuple[Check, ...]
    uptime_s: float
    version: str
    reason: str | None = None
    recommendations: tuple[str, ...] = ()


def routes(source: HealthSource, clock: Clock) -> Router:
    """The probes of one broker; its uptime counts from this call."""
    started_at_s = clock.monotonic_s()
    version = metadata.version("sparrow-broker")

    def report(health: Health, reason: str | None = None) -> Report:
        return Report(
            status=health.status,
            checks=health.checks,
            uptime_s=round(clock.monotonic_s() - started_at_s, 3),
            version=version,
            reason=reason,
            recommendations=health.recommendations,
        )

    @get("/live", sync_to_thread=False)
    def live() -> Report:
        """Say that the process answers."""
        return report(Health(Status.HEALTHY))

    @get("/ready", sync_to_thread=False)
    def ready() -> Response[Report]:
        """Say whether work should be sent here, and why not."""
        health = source.health()
        if health.is_ready:
            return Response(report(health))
        return Response(report(health, reason=_reason(health)), status_code=503)

    return Router(path="/health", route_handlers=[live, ready])


def _reason(health: Health) -> str:
    """The checks that keep the broker from being ready, in words."""
    blocking = (Status.CRITICAL, Status.UNKNOWN)
    found = [check for check in health.checks if check.status in blocking]
    named = [f"{check.name}: {check.message or check.status}" for check in found]
    return "; ".join(named) or f"the broker is {health.status}"
