"""The process that runs pipelines: one warm Spark session, a worker for each pipeline that is to run.

``sparrow up`` starts it when there is something to run, with the broker's address; it can be started by hand
on any machine that reaches the broker. It asks the broker what is to run, holds that, and tells how it goes.
The broker decides: a pipeline that is stopped, changed or sought is stopped here and taken up anew.

It ends when it is told to, when the broker stays away for long, and, started by ``sparrow up``, when that
process is gone: then its standard input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow.client.blocking import BlockingClient
from sparrow.client.remote import RemoteBroker
from sparrow.model.errors import ConnectionLost, InvalidArgument, PipelineHeld, SparrowError
from sparrow.model.pipeline import PipelineReport, PipelineSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sparrow.spark.options import Where
    from sparrow.spark.pipelines.jobs import JobWorker
    from sparrow.spark.pipelines.worker import Worker

    AnyWorker = Worker | JobWorker

LOOK_S = 0.5
AWAY_S = 120.0
"""How long a broker that is away is waited for."""
STOP_S = 30.0
TOKEN_VARIABLE = "SPARROW_TOKEN"
_log = logging.getLogger("sparrow.pipelines")


class Runner:
    """See the module's text."""

    def __init__(
        self,
        url: str,
        home: Path,
        settings: PipelineSettings,
        *,
        name: str,
        token: str = "",
        only: str | None = None,
        is_once: bool = False,
    ) -> None:
        self.name = name
        self._url = url
        self._home = home
        self._settings = settings
        self._token = token
        self._only = only
        """By hand: this pipeline, whether it is to run or not."""
        self._is_once = is_once
        self._workers: dict[str, AnyWorker] = {}
        self._spark: SparkSession | None = None
        self._client: BlockingClient | None = None
        self._stopping = threading.Event()
        self._has_finished = False
        self._turn = threading.Lock()
        """Pipelines start one after the other."""
        self._job_turn = threading.Lock()
        """One job at a time."""
        self.on_look: Any = None
        """Called with the progress of all pipelines at every look."""

    def stop(self) -> None:
        """Asks for the end."""
        self._stopping.set()

    def run(self) -> None:
        """Returns when it is stopped, or when everything that was there is done."""
        self._client = self._connect()
        try:
            if self._only is not None:
                self._client.hold_pipeline(self._only, self.name)
            self._open_session()
            away_since = 0.0
            while not self._stopping.is_set():
                try:
                    self._look()
                    away_since = 0.0
                except ConnectionLost as error:
                    away_since = away_since or time.monotonic()
                    if time.monotonic() - away_since > AWAY_S:
                        raise
                    _log.warning("the broker is away: %s", error.message)
                if self._only is not None and not self._workers:
                    return
                self._stopping.wait(LOOK_S)
        finally:
            self._close()

    def _connect(self) -> BlockingClient:
        options = {
            "client": "pipelines",
            "connect_s": 30.0,
            **({"token": self._token} if self._token else {}),
        }
        return BlockingClient(lambda: RemoteBroker.open(self._url, **options))

    def _open_session(self) -> None:
        from sparrow.spark.sessions import session

        try:
            self._home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"the home {self._home} cannot be made: {error}") from error
        config = {
            "spark.driver.memory": self._settings.driver_memory,
            "spark.sql.warehouse.dir": str(self._home / "warehouse"),
            "spark.sql.streaming.stopTimeout": "20s",
            "spark.scheduler.mode": "FAIR",
            # Executors and planners keep their Python workers warm for all pipelines.
            "spark.python.worker.reuse": "true",
        }
        self._spark = session("sparrow-pipelines", master=self._settings.master, config=config)
        self._spark.sparkContext.setLogLevel("ERROR")

    def _where(self) -> Where:
        from sparrow.spark.options import Where

        return Where(self._url, None, self._token)

    # Looking.

    def _look(self) -> None:
        """Makes what runs be what is wanted, and tells the broker."""
        assert self._client is not None
        reports = {report.pipeline.name: report for report in self._client.pipelines()}
        over: set[str] = set()
        for name, worker in list(self._workers.items()):
            report = reports.get(name)
            if report is None or not self._is_wanted(report) or self._is_other(worker, report):
                worker.stop()
            if not worker.is_alive:
                self._tell([worker])
                del self._workers[name]
                self._has_finished = self._has_finished or worker.is_finished
                over |= {name} if worker.is_finished else set()
                if worker.is_finished or report is None or not self._is_wanted(report):
                    self._client.release_pipeline(name, self.name)
        for name, report in reports.items():
            room = len(self._workers) < self._settings.pipelines_max
            if name not in self._workers and name not in over and self._is_wanted(report) and room:
                self._take_up(name)
        lost = self._tell(list(self._workers.values()))
        for name in lost:
            self._workers[name].stop()
        if self.on_look is not None:
            self.on_look([worker.progress for worker in self._workers.values()])

    def _is_wanted(self, report: PipelineReport) -> bool:
        if self._only is not None:
            return report.pipeline.name == self._only and not self._has_finished
        is_mine = report.runner in ("", self.name)
        return report.is_wanted and is_mine and (report.is_due or report.pipeline.name in self._workers)

    def _is_other(self, worker: AnyWorker, report: PipelineReport) -> bool:
        return worker.run != report.run or worker.pipeline != report.pipeline

    def _take_up(self, name: str) -> None:
        assert self._client is not None
        assert self._spark is not None
        try:
            report = self._client.hold_pipeline(name, self.name)
        except PipelineHeld:
            return
        if self._only is None and not report.is_due:  # It was a moment ago.
            self._client.release_pipeline(name, self.name)
            return
        self._workers[name] = worker = self._worker(report)
        worker.start()

    def _worker(self, report: PipelineReport) -> AnyWorker:
        from sparrow.spark.pipelines.jobs import JobWorker
        from sparrow.spark.pipelines.worker import Worker

        assert self._client is not None
        assert self._spark is not None
        if report.pipeline.is_job:
            is_by_hand = self._only is not None
            return JobWorker(
                self._spark, report, self.name, self._client, self._job_turn, if_due=not is_by_hand
            )
        return Worker(
            self._spark,
            report,
            self.name,
            self._client,
            self._where(),
            str(self._home),
            self._settings,
            self._turn,
            is_once=self._is_once,
        )

    def _tell(self, workers: Sequence[AnyWorker]) -> list[str]:
        assert self._client is not None
        lines = [line for worker in workers for line in worker.take_lines()]
        for name, level, text in lines:
            _log.log(logging.getLevelNamesMapping().get(level.upper(), logging.INFO), "%s: %s", name, text)
        if not workers:
            return []
        return self._client.tell_pipelines(self.name, [worker.progress for worker in workers], lines)

    # The end.

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.stop()
        deadline = time.monotonic() + STOP_S
        for worker in self._workers.values():
            worker.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(SparrowError):
            if self._client is not None:
                self._tell(list(self._workers.values()))
                for name in self._workers:
                    self._client.release_pipeline(name, self.name)
        if self._client is not None:
            with contextlib.suppress(SparrowError):
                self._client.close()
        if self._spark is not None:
            self._spark.stop()


def main(words: Sequence[str] | None = None) -> int:
    """``python -m sparrow.spark.pipelines.runner``."""
    given = _parse(words)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    for name in ("py4j", "SQLQueryContextLogger"):  # What they say comes as the error of a pipeline.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = PipelineSettings(
        master=given.master,
        driver_memory=given.driver_memory,
        pipelines_max=given.pipelines_max,
        backoff_min_s=given.backoff_min,
        backoff_max_s=given.backoff_max,
    )
    token = os.environ.get(TOKEN_VARIABLE, "")
    runner = Runner(given.servers, Path(given.home).absolute(), settings, name=given.name, token=token)
    signal.signal(signal.SIGTERM, lambda *_: runner.stop())
    signal.signal(signal.SIGINT, lambda *_: runner.stop())
    if given.watch_input:
        threading.Thread(target=_watch_input, args=(runner,), daemon=True).start()
    try:
        runner.run()
    except SparrowError as error:
        _log.error("%s (%s) %s", error.message, error.code, error.hint)
        return 1
    except ImportError as error:
        _log.error("Spark cannot be used: %s", error)
        return 1
    return 0


def _watch_input(runner: Runner) -> None:
    """Whoever started this process holds the other end; when it closes, that process is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):  # Not by sys.stdin, whose lock would be held when the interpreter ends.
            pass
    runner.stop()


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the pipelines of a broker on one Spark session.")
    defaults = PipelineSettings()
    parser.add_argument("--servers", default="sparrow://127.0.0.1:9092", help="the broker")
    parser.add_argument("--home", required=True, help="where checkpoints and relative tables are")
    parser.add_argument("--master", default=defaults.master, help="the Spark master")
    parser.add_argument("--driver-memory", default=defaults.driver_memory, help="like 1g")
    parser.add_argument("--pipelines-max", type=int, default=defaults.pipelines_max)
    parser.add_argument("--backoff-min", type=float, default=defaults.backoff_min_s, help="seconds")
    parser.add_argument("--backoff-max", type=float, default=defaults.backoff_max_s, help="seconds")
    parser.add_argument("--name", default=f"runner {os.getpid()}", help="what it is called")
    parser.add_argument("--watch-input", action="store_true", help="end when standard input ends")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
