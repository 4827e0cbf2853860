"""A receiver process in the hands of a test, and settings by which a broker may reach it."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from sparrow.model.push import PushSettings

SCRIPT = Path(__file__).parent / "receiver.py"
LIMIT_S = 30.0


class Received(NamedTuple):
    """One request as the receiver saw it."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float
    status: int

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        return int(self.headers["X-PubSub-Attempt"])

    @property
    def data(self) -> Any:
        return json.loads(self.body)["data"]


class ReceiverProcess:
    """The receiver; it can be killed and started again on the same port."""

    def __init__(self) -> None:
        self._log: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def start(self) -> None:
        """Starts it unless it runs."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.port)], stdout=subprocess.PIPE, text=True
            )
            assert self._process.stdout is not None
            self.port = int(self._process.stdout.readline())
            if self._log is not None:
                self._tell("log", str(self._log))

    def begin(self, log: Path) -> None:
        """A new story: nothing was received yet."""
        self.start()
        self._log = log
        self._tell("log", str(log))

    def _tell(self, what: str, text: str) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{what}", data=text.encode()).close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    async def mode(self, **mode: Any) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"http://127.0.0.1:{self.port}/mode", json=mode) as response:
                assert response.status == 200

    async def most_at_once(self) -> int:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{self.port}/most") as response:
                return int(await response.json())

    def seen(self) -> list[Received]:
        lines = self._log.read_text().splitlines() if self._log is not None and self._log.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return [Received(**{**entry, "body": base64.b64decode(entry["body"])}) for entry in entries]

    def count(self) -> int:
        """How many requests there were; quick."""
        return 0 if self._log is None or not self._log.exists() else self._log.read_bytes().count(b"\n")

    def accepted(self) -> list[Received]:
        return [each for each in self.seen() if 200 <= each.status < 300]


def push_settings(**changed: Any) -> PushSettings:
    values = {
        "allow_networks": "127.0.0.0/8",
        "breaker_wait_s": 0.2,
        "breaker_wait_max_s": 0.5,
        "drain_s": 1.0,
    }
    return PushSettings(**{**values, **changed})


async def until(condition: Callable[[], Any | Awaitable[Any]], what: str = "") -> Any:
    """Waits for a condition, and says what was waited for when it does not come."""
    end = asyncio.get_running_loop().time() + LIMIT_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert asyncio.get_running_loop().time() < end, f"waited {LIMIT_S} s in vain: {what or condition}"
        await asyncio.sleep(0.02)
