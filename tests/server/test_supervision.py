"""The runner beside the broker: not there while nothing is to run, and no harm when it cannot be."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import sparrow
from sparrow.broker.broker import Broker
from sparrow.model.pipeline import PipelineSettings
from sparrow.server.supervision import Supervisor

DECLARED = {
    "name": "large",
    "source": "orders.#",
    "sql": "SELECT * FROM source",
    "sinks": [{"topic": "large"}],
}


async def state_of(broker: Broker, wanted: str) -> str:
    """The pipeline's error when it has come to a state."""
    async with asyncio.timeout(30):
        while (report := await broker.pipeline("large")).state != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return report.error


async def test_without_spark_the_broker_is_well_and_the_pipeline_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)  # What a machine looks like that has none.
    async with sparrow.aopen(tmp_path / "data") as broker:
        supervisor = Supervisor(broker, PipelineSettings(), "sparrow://127.0.0.1:1", str(tmp_path / "data"))
        supervisor.start()
        await broker.apply_pipeline(DECLARED)
        assert "Spark is not installed" in await state_of(broker, "failing")
        assert broker.health().status.value == "healthy"
        await broker.publish("orders.us", b"1")
        assert (await broker.stop_pipeline("large")).state == "stopped"
        await supervisor.stop()


async def test_pipelines_need_the_binary_protocol(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data") as broker:
        supervisor = Supervisor(broker, PipelineSettings(), None, str(tmp_path / "data"))
        supervisor.start()
        await broker.apply_pipeline(DECLARED)
        assert "tcp" in await state_of(broker, "failing")
        await supervisor.stop()


async def test_a_runner_that_ends_is_told_of_and_started_again(tmp_path: Path) -> None:
    """Its home cannot be made, so it ends as soon as it tries."""
    (tmp_path / "file").write_text("")
    settings = PipelineSettings(home=str(tmp_path / "file" / "home"), backoff_min_s=0.05, backoff_max_s=0.1)
    async with sparrow.aopen(tmp_path / "data") as broker:
        from sparrow.model.settings import parse_address
        from sparrow.server.http import bind
        from sparrow.server.tcp import TcpServer

        with bind(parse_address("127.0.0.1:0")) as bound:
            server = await TcpServer.start(broker, bound)
            supervisor = Supervisor(broker, settings, f"sparrow://{server.address}", str(tmp_path / "data"))
            supervisor.start()
            await broker.apply_pipeline(DECLARED)
            assert "the runner ended with code 1" in await state_of(broker, "failing")
            async with asyncio.timeout(60):
                while supervisor.starts < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await supervisor.stop()
            await server.close()


async def test_a_runner_is_told_the_address_that_the_settings_name(tmp_path: Path) -> None:
    settings = PipelineSettings(servers="sparrows://127.0.0.1:1", home=str(tmp_path / "home"))
    async with sparrow.aopen(tmp_path / "data") as broker:
        told = Supervisor(broker, settings, "sparrow://0.0.0.0:9092", str(tmp_path / "data"))._words("me")
        assert told[told.index("--servers") + 1] == "sparrows://127.0.0.1:1"
        without = Supervisor(broker, PipelineSettings(), "sparrow://127.0.0.1:9092", str(tmp_path / "data"))
        assert "sparrow://127.0.0.1:9092" in without._words("me")


async def test_pipelines_can_be_turned_off(tmp_path: Path) -> None:
    async with sparrow.aopen(tmp_path / "data") as broker:
        supervisor = Supervisor(broker, PipelineSettings(enabled=False), None, str(tmp_path / "data"))
        supervisor.start()
        assert (await broker.apply_pipeline(DECLARED)).state == "waiting"
        await supervisor.stop()
        assert (await broker.pipeline("large")).error == ""
