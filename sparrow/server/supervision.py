"""Keeps a runner of pipelines beside the broker: started when a pipeline is to run, started again when it
ends by itself, stopped when nothing is to run for a while and when the broker stops.

The runner is a process of its own with a JVM; whatever becomes of it, the broker goes on. Its standard input
is held open here, so that it ends when this process does. Where it cannot run, the pipelines say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import sys
from collections import deque

from sparrow.broker import logs
from sparrow.broker.broker import Broker
from sparrow.broker.clock import Clock
from sparrow.model.pipeline import PipelineSettings

LOOK_S = 0.5
STEADY_S = 60.0
"""A runner that lasted as long as this had no trouble starting."""
STOP_S = 30.0
NAME = "sparrow up"
_MODULE = "sparrow.spark.pipelines.runner"
_NOISE = re.compile(
    r"Using Spark's default log4j|Setting default log level|To adjust logging|WARN |^WARNING|^\s+(at|File) |"
    r"^\s*\.\.\. \d+ more|^\{\"ts\""
)
_MISSING = "Spark is not installed: `pip install 'sparrow-broker[spark]'`, then start the broker again"


class Supervisor:
    """See the module's text."""

    def __init__(
        self,
        broker: Broker,
        settings: PipelineSettings,
        url: str | None,
        data: str,
        clock: Clock | None = None,
    ) -> None:
        self._broker = broker
        self._pipelines = broker.pipeline_desk
        self._settings = settings
        self._url = url and (settings.servers or url)
        self._home = settings.home or f"{data.rstrip('/')}.pipelines"
        self._clock = clock or Clock()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=20)
        self.starts = 0
        """How often a runner was started."""
        self._log = logs.get("pipelines")

    def start(self) -> None:
        """From now on pipelines run."""
        if self._settings.enabled:
            self._task = asyncio.get_running_loop().create_task(self._live(), name="pipelines")

    async def stop(self) -> None:
        """Returns when the runner is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._end()

    async def _live(self) -> None:
        failures = 0
        while True:
            await self._until(lambda: self._pipelines.is_wanted)
            trouble = self._trouble()
            if trouble:
                await self._pipelines.fail_all(trouble)
                await self._until_changed()
                continue
            began_s = self._clock.monotonic_s()
            try:
                code = await self._run()
            except OSError as error:
                code, trouble = -1, f"the runner cannot be started: {error}"
            if code == 0:
                failures = 0
                continue
            failures = 0 if self._clock.monotonic_s() - began_s > STEADY_S else failures + 1
            wait_s = min(
                self._settings.backoff_max_s, self._settings.backoff_min_s * 2.0 ** min(failures, 20)
            )
            trouble = trouble or f"the runner ended with code {code}: {self._said[-1] if self._said else ''}"
            self._log.warning("runner-ended", trouble, code=code, retry_s=wait_s)
            await self._pipelines.fail_all(trouble)
            await asyncio.sleep(wait_s)

    def _trouble(self) -> str:
        if importlib.util.find_spec("pyspark") is None:
            return _MISSING
        if self._url is None:
            return "pipelines need the binary protocol: give the setting tcp an address"
        return ""

    async def _run(self) -> int:
        """One life of the runner; 0 when it was stopped from here because nothing was to run."""
        self.starts += 1
        name = f"{NAME} {os.getpid()}-{self.starts}"
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            *self._words(name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment(),
            start_new_session=True,
        )
        self._log.info("runner-started", "", pid=process.pid, home=self._home, servers=self._url)
        reading = asyncio.ensure_future(self._read(process))
        idling = asyncio.ensure_future(self._until_idle())
        try:
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait([ended, idling], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._log.info("runner-idle", "no pipeline is to run")
                await self._end()
                return 0
            await reading
            return await ended or -1  # One that ends without being asked is to go on.
        finally:
            idling.cancel()
            reading.cancel()
            self._pipelines.release_all(name)

    def _words(self, name: str) -> list[str]:
        settings = self._settings
        return [
            *("--servers", self._url or ""),
            *("--home", self._home),
            *("--master", settings.master),
            *("--driver-memory", settings.driver_memory),
            *("--pipelines-max", str(settings.pipelines_max)),
            *("--backoff-min", str(settings.backoff_min_s)),
            *("--backoff-max", str(settings.backoff_max_s)),
            *("--name", name),
            "--watch-input",
        ]

    def _environment(self) -> dict[str, str]:
        found = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
        if self._broker.access.is_required:
            token = secrets.token_urlsafe(32)
            self._broker.access.add_bootstrap({token: "pipelines"})
            found["SPARROW_TOKEN"] = token
        return found

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """What the runner writes goes to the broker's log."""
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:
                continue  # A line without an end in sight.
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text and not _NOISE.search(text):
                self._said.append(text)
                self._log.info("runner", text)

    async def _until_idle(self) -> None:
        """Returns when nothing was to run for ``idle_s``."""
        while True:
            await self._until(lambda: not self._pipelines.is_wanted)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.idle_s):
                    await self._until(lambda: self._pipelines.is_wanted)
                continue
            return

    async def _until(self, condition: object) -> None:
        assert callable(condition)
        while True:
            await self._pipelines.pass_over()
            if condition():
                return
            await self._until_changed()

    async def _until_changed(self) -> None:
        """A hold that runs out is no change that anybody tells, so there is a look now and then."""
        self._pipelines.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._pipelines.changed.wait()

    async def _end(self) -> None:
        process = self._process  # Forgotten at the end: who gives up waiting here is followed by ``stop``.
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
                try:
                    async with asyncio.timeout(STOP_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
            self._log.info("runner-stopped")
        # A JVM that is about to end holds the pipes still, and asyncio would wait for it.
        process._transport.close()  # type: ignore[attr-defined]
        self._process = None
        await asyncio.sleep(0)
