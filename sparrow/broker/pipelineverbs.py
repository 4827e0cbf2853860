"""The broker's verbs for pipelines; the rules are in pipelines.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sparrow.broker.pipelines import Pipelines, Place
from sparrow.model.errors import InvalidArgument
from sparrow.model.pipeline import PipelineLine, PipelineProgress, PipelineReport


class PipelineVerbs:
    """A part of the broker."""

    _pipelines: Pipelines

    def _check_open(self) -> None:
        raise NotImplementedError

    @property
    def pipeline_desk(self) -> Pipelines:
        """For whoever supervises runners beside the broker."""
        return self._pipelines

    async def apply_pipeline(
        self, declaration: Mapping[str, Any], *, is_stopped: bool = False
    ) -> PipelineReport:
        """Makes a pipeline be what is declared (docs/guides/pipelines.md). A new one is to run at once unless
        ``is_stopped``; one that exists stays running or stopped. Another transformation or source begins a
        new run, from where the pipeline stands."""
        self._check_open()
        return await self._pipelines.apply(declaration, is_stopped=is_stopped)

    async def pipelines(self) -> list[PipelineReport]:
        """All pipelines, by name: declaration, state, lag, last error, what the runner said last."""
        self._check_open()
        return self._pipelines.reports()

    async def pipeline(self, name: str) -> PipelineReport:
        """One of them."""
        self._check_open()
        return self._pipelines.report(name)

    async def start_pipeline(self, name: str) -> PipelineReport:
        """It is to run, from where it stands; as resuming its subscription."""
        self._check_open()
        return await self._pipelines.set_running(name, True)

    async def stop_pipeline(self, name: str) -> PipelineReport:
        """It is not to run; as pausing its subscription."""
        self._check_open()
        return await self._pipelines.set_running(name, False)

    async def seek_pipeline(self, name: str, target: Any) -> PipelineReport:
        """Goes on elsewhere, as seeking its subscription, with a new run: what it aggregates begins anew."""
        self._check_open()
        return await self._pipelines.seek(name, target)

    async def delete_pipeline(self, name: str) -> None:
        """The pipeline and its subscription go; what it wrote stays."""
        self._check_open()
        await self._pipelines.delete(name)

    async def pipeline_log(self, name: str, *, after: int = 0, count: int = 100) -> list[PipelineLine]:
        """The newest lines that its runner wrote, behind a number. They do not outlast the broker."""
        self._check_open()
        return self._pipelines.lines(name, after, count)

    # For runners.

    async def hold_pipeline(self, name: str, runner: str) -> PipelineReport:
        """Takes a pipeline up, unless another runner has it; ``tell_pipelines`` keeps it."""
        self._check_open()
        return await self._pipelines.hold(name, runner)

    async def begin_pipeline(self, name: str, runner: str, run: int) -> dict[str, list[Place]]:
        """Begins a run: by subscription, the positions to go on from."""
        self._check_open()
        return await self._pipelines.begin(name, runner, run)

    async def tell_pipelines(
        self, runner: str, progress: Sequence[Any], lines: Sequence[Any] = ()
    ) -> list[str]:
        """How the pipelines of a runner go, and lines of their logs as (pipeline, level, text); returns the
        names that are no longer the runner's."""
        self._check_open()
        try:
            told = msgspec.convert([msgspec.to_builtins(each) for each in progress], list[PipelineProgress])
            written = msgspec.convert([list(each) for each in lines], list[tuple[str, str, str]])
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidArgument(f"tell_pipelines: {error}") from error
        return await self._pipelines.tell(runner, told, written)

    async def release_pipeline(self, name: str, runner: str) -> None:
        """The runner has stopped it."""
        self._check_open()
        await self._pipelines.release(name, runner)
