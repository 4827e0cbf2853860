"""The support bundle: what somebody needs who is asked why a broker behaves as it does, in one zip.

It holds settings with secrets masked, health, figures, what recovery found, topics, subscriptions, groups,
connections and the last lines of the log. It holds no message: no data, no keys, no attributes.
"""

from __future__ import annotations

import io
import platform
import sys
import zipfile
from importlib import metadata
from typing import Any

import msgspec

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.checkup import Checkup
from sparrow.broker.clock import Clock
from sparrow.model.settings import masked
from sparrow.server import exposition

PACKAGES = (
    "sparrow-broker",
    "pyarrow",
    "pyroaring",
    "msgspec",
    "uvicorn",
    "uvloop",
    "sqlalchemy",
)
_DAY_S = 86_400


async def build(broker: Broker, clock: Clock) -> bytes:
    """The zip."""
    checkup, telemetry = Checkup(broker, clock), broker.telemetry
    deep, health = await checkup.deep(), await checkup.report()
    seen = await telemetry.look()
    points = {
        f"{metric}{{{name}}}" if name else metric: telemetry.points((metric, name), _DAY_S)
        for metric, name in telemetry.series.names()
    }
    parts: dict[str, Any] = {
        "about.json": _about(),
        "settings.json": masked(broker.settings),
        "health.json": {"broker": health, "deep": deep, "probes": broker.health()},
        "store.json": broker.state(),
        "recovery.json": broker.recovery,
        "topics.json": [
            {
                "topic": topic,
                "figures": {each.name: each._asdict() for each in seen.figures.topics}.get(topic.name),
            }
            for topic in await broker.topics()
        ],
        "subscriptions.json": await broker.subscriptions(),
        "groups.json": [each._asdict() for each in seen.figures.subscriptions],
        "consumers.json": broker.inventory.consumers(),
        "lag.json": await broker.lag(),
        "connections.json": [each for door in telemetry.doors for each in door.describe()],
        "series.json": points,
    }
    texts = {name: msgspec.json.format(msgspec.json.encode(part), indent=2) for name, part in parts.items()}
    texts["metrics.txt"] = await exposition.render(telemetry)
    texts["log.jsonl"] = "\n".join(logs.recent()).encode()
    return _zip(texts)


def _about() -> dict[str, Any]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return {"python": sys.version, "platform": platform.platform(), "packages": found}


def _zip(texts: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(f"sparrow/{name}", text)
    return target.getvalue()
