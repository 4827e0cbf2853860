"""How the broker is: turns what the store and the background tasks say into a health report."""

from __future__ import annotations

from sparrow.kernel.degradation import GIVEN_UP, ServiceLevel
from sparrow.model.health import Check, Health, Status, overall
from sparrow.store.ports import StoreState


def report(
    state: StoreState, maintenance_complaint: str | None, level: ServiceLevel = ServiceLevel.NORMAL
) -> Health:
    """The health of this moment."""
    checks = (_journal(state), _data(state), _maintenance(maintenance_complaint), *_service(level))
    advice = (*_advice(state, maintenance_complaint), *_service_advice(level))
    return Health(overall(checks), checks, advice)


def _journal(state: StoreState) -> Check:
    if not state.is_writable:
        return Check("journal", Status.CRITICAL, f"publishes are refused: {state.complaint}")
    text = f"{state.journal_files} files, {state.pending_bytes} bytes pending"
    return Check("journal", Status.HEALTHY, text)


def _data(state: StoreState) -> Check:
    if state.damages:
        first = state.damages[0]
        text = f"{len(state.damages)} damaged places; the first: {first.file}: {first.what}"
        return Check("data", Status.DEGRADED, text)
    return Check("data", Status.HEALTHY, f"{state.segments} segments, no damage known")


def _maintenance(complaint: str | None) -> Check:
    if complaint:
        return Check("maintenance", Status.DEGRADED, complaint)
    return Check("maintenance", Status.HEALTHY)


def _service(level: ServiceLevel) -> tuple[Check, ...]:
    """A level below normal; one at which the broker still takes or delivers what it should is no reason to
    send work elsewhere."""
    if level is ServiceLevel.NORMAL:
        return ()
    is_hard = level in (ServiceLevel.READ_ONLY, ServiceLevel.EMERGENCY)
    text = f"{level.value}: refuses {' and '.join(GIVEN_UP[level])}"
    return (Check("service", Status.CRITICAL if is_hard else Status.DEGRADED, text),)


def _service_advice(level: ServiceLevel) -> tuple[str, ...]:
    advice = {
        ServiceLevel.THROTTLED: "Free memory or disk space, or shorten retention.",
        ServiceLevel.READ_ONLY: "Free disk space or shorten retention; publishing resumes by itself.",
        ServiceLevel.EMERGENCY: "Give the broker more memory, or fewer connections and subscriptions.",
        ServiceLevel.MAINTENANCE: "End the maintenance with DELETE /api/v1/admin/maintenance.",
    }
    return (advice[level],) if level in advice else ()


def _advice(state: StoreState, complaint: str | None) -> list[str]:
    found = []
    if not state.is_writable:
        found.append("Check the disk, then restart the broker; receipted messages are safe.")
    if state.damages:
        found.append("Run `sparrow log verify` on the stopped data directory to see what is damaged.")
    if complaint:
        found.append("Look at the log lines with event_type maintenance-failed.")
    return found
