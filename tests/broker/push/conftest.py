"""Fixtures: a receiver process, and a broker that may reach it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.settings import Settings

from .receiving import ReceiverProcess, push_settings


@pytest.fixture(scope="session")
def receiver_process() -> Iterator[ReceiverProcess]:
    process = ReceiverProcess()
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def receiver(receiver_process: ReceiverProcess, tmp_path: Path) -> ReceiverProcess:
    receiver_process.begin(tmp_path / "received.jsonl")
    return receiver_process


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=str(tmp_path / "data"), push=push_settings())


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    async with await Broker.open(settings) as opened:
        yield opened
