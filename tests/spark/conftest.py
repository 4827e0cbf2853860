"""Spark and a broker for tests: one JVM a process, one broker a test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sparrow
from sparrow.client.blocking import BlockingClient
from sparrow.model.settings import MIB, JournalSettings, Settings, parse_address
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one session of the process, made as the helper makes it."""
    import sparrow.spark

    home = tmp_path_factory.mktemp("spark")
    found = sparrow.spark.session(
        "tests",
        master="local[2]",
        config={"spark.driver.memory": "768m", "spark.sql.warehouse.dir": str(home)},
    )
    found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


class Served:
    """A broker that listens on a port of its own, in a thread of its own."""

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.directory = directory
        self._settings = settings or Settings(journal=JournalSettings(file_bytes=4 * MIB))
        self._ready = threading.Event()
        self._loop: Any = None
        self._over: Any = None
        self.address = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)
        self.client: BlockingClient = sparrow.connect(f"sparrow://{self.address}")

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with sparrow.aopen(self.directory, settings=self._settings) as broker:
            with bind(parse_address("127.0.0.1:0")) as bound:
                server = await TcpServer.start(broker, bound)
                self.address = str(server.address)
                self._ready.set()
                await self._over.wait()
                await server.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.client.close()
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts brokers, and stops them at the end."""
    started: list[Served] = []

    def start(name: str = "data", settings: Settings | None = None) -> Served:
        started.append(Served(tmp_path / name, settings))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
