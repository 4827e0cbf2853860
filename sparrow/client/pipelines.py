"""The verbs for pipelines, over a connection and for blocking code; broker/pipelineverbs.py says more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sparrow.client import verbs
from sparrow.model.pipeline import PipelineLine, PipelineProgress, PipelineReport

Place = tuple[str, int, int]


class RemotePipelines:
    """A part of the remote broker."""

    async def _call(self, verb: str, result: Any = None, /, **arguments: Any) -> Any:
        raise NotImplementedError

    async def apply_pipeline(
        self, declaration: Mapping[str, Any], *, is_stopped: bool = False
    ) -> PipelineReport:
        """Makes a pipeline be what is declared; a new one is to run at once unless ``is_stopped``."""
        return await self._report("apply_pipeline", declaration=_plain(declaration), is_stopped=is_stopped)

    async def pipelines(self) -> list[PipelineReport]:
        """All pipelines, by name: declaration, state, lag, last error, what the runner said last."""
        found: list[PipelineReport] = await self._call("pipelines", list[PipelineReport])
        return found

    async def pipeline(self, name: str) -> PipelineReport:
        """One of them."""
        return await self._report("pipeline", name=name)

    async def start_pipeline(self, name: str) -> PipelineReport:
        """It is to run, from where it stands."""
        return await self._report("start_pipeline", name=name)

    async def stop_pipeline(self, name: str) -> PipelineReport:
        """It is not to run."""
        return await self._report("stop_pipeline", name=name)

    async def seek_pipeline(self, name: str, target: Any) -> PipelineReport:
        """Goes on elsewhere, with a new run."""
        return await self._report("seek_pipeline", name=name, target=verbs.to_position(target))

    async def delete_pipeline(self, name: str) -> None:
        """The pipeline and its subscription go; what it wrote stays."""
        await self._call("delete_pipeline", name=name)

    async def pipeline_log(self, name: str, *, after: int = 0, count: int = 100) -> list[PipelineLine]:
        """The newest lines that its runner wrote, behind a number."""
        found: list[PipelineLine] = await self._call(
            "pipeline_log", list[PipelineLine], name=name, after=after, count=count
        )
        return found

    async def hold_pipeline(self, name: str, runner: str) -> PipelineReport:
        """Takes a pipeline up, unless another runner has it."""
        return await self._report("hold_pipeline", name=name, runner=runner)

    async def begin_pipeline(self, name: str, runner: str, run: int) -> dict[str, list[Place]]:
        """Begins a run: by subscription, the positions to go on from."""
        found: dict[str, list[Place]] = await self._call(
            "begin_pipeline", dict[str, list[Place]], name=name, runner=runner, run=run
        )
        return found

    async def tell_pipelines(
        self, runner: str, progress: Sequence[PipelineProgress], lines: Sequence[tuple[str, str, str]] = ()
    ) -> list[str]:
        """How the pipelines of a runner go; the names that are no longer its."""
        told = [msgspec.to_builtins(each) for each in progress]
        found: list[str] = await self._call(
            "tell_pipelines", list[str], runner=runner, progress=told, lines=[list(line) for line in lines]
        )
        return found

    async def release_pipeline(self, name: str, runner: str) -> None:
        """The runner has stopped it."""
        await self._call("release_pipeline", name=name, runner=runner)

    async def _report(self, verb: str, **arguments: Any) -> PipelineReport:
        found: PipelineReport = await self._call(verb, PipelineReport, **arguments)
        return found


def _plain(declaration: Any) -> Any:
    return msgspec.to_builtins(declaration)


class BlockingPipelines:
    """A part of the broker for blocking code; the same verbs."""

    _target: Any

    def _run(self, work: Any) -> Any:
        raise NotImplementedError

    def apply_pipeline(self, declaration: Mapping[str, Any], *, is_stopped: bool = False) -> PipelineReport:
        """Makes a pipeline be what is declared; a new one is to run at once unless ``is_stopped``."""
        found: PipelineReport = self._run(self._target.apply_pipeline(declaration, is_stopped=is_stopped))
        return found

    def pipelines(self) -> list[PipelineReport]:
        """All pipelines, by name: declaration, state, lag, last error, what the runner said last."""
        found: list[PipelineReport] = self._run(self._target.pipelines())
        return found

    def pipeline(self, name: str) -> PipelineReport:
        """One of them."""
        found: PipelineReport = self._run(self._target.pipeline(name))
        return found

    def start_pipeline(self, name: str) -> PipelineReport:
        """It is to run, from where it stands."""
        found: PipelineReport = self._run(self._target.start_pipeline(name))
        return found

    def stop_pipeline(self, name: str) -> PipelineReport:
        """It is not to run."""
        found: PipelineReport = self._run(self._target.stop_pipeline(name))
        return found

    def seek_pipeline(self, name: str, target: Any) -> PipelineReport:
        """Goes on elsewhere, with a new run: what it aggregates begins anew."""
        found: PipelineReport = self._run(self._target.seek_pipeline(name, target))
        return found

    def delete_pipeline(self, name: str) -> None:
        """The pipeline and its subscription go; what it wrote stays."""
        self._run(self._target.delete_pipeline(name))

    def pipeline_log(self, name: str, *, after: int = 0, count: int = 100) -> list[PipelineLine]:
        """The newest lines that its runner wrote, behind a number."""
        found: list[PipelineLine] = self._run(self._target.pipeline_log(name, after=after, count=count))
        return found

    def hold_pipeline(self, name: str, runner: str) -> PipelineReport:
        """Takes a pipeline up, unless another runner has it."""
        found: PipelineReport = self._run(self._target.hold_pipeline(name, runner))
        return found

    def begin_pipeline(self, name: str, runner: str, run: int) -> dict[str, list[Place]]:
        """Begins a run: by subscription, the positions to go on from."""
        found: dict[str, list[Place]] = self._run(self._target.begin_pipeline(name, runner, run))
        return found

    def tell_pipelines(
        self, runner: str, progress: Sequence[PipelineProgress], lines: Sequence[tuple[str, str, str]] = ()
    ) -> list[str]:
        """How the pipelines of a runner go; the names that are no longer its."""
        found: list[str] = self._run(self._target.tell_pipelines(runner, progress, lines))
        return found

    def release_pipeline(self, name: str, runner: str) -> None:
        """The runner has stopped it."""
        self._run(self._target.release_pipeline(name, runner))
