"""The pipeline family of the HTTP API: declare, look at, start, stop, seek and delete Spark pipelines.

Whoever applies a pipeline lets code run beside the broker, so that, and changing one, is for administrators
of the whole broker; looking is for whoever may read everything.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sparrow.model.access import Action
from sparrow.model.errors import InvalidPipeline
from sparrow.model.pipeline import Pipeline, PipelineLine, PipelineReport
from sparrow.server.api.calls import changing
from sparrow.server.api.family import Answer, Api, Page, Req, answer, body, no_content, paged, query
from sparrow.server.api.operation import described
from sparrow.server.api.routing import delete, get, post, put
from sparrow.server.api.subscriptions import Seek

TAG = "pipelines"
ONE = "/v1/pipelines/{pipeline:str}"
_EXAMPLE = {
    "source": {"topic": "orders.#", "schema": "id STRING, amount DOUBLE"},
    "expect": {"the amount is positive": "amount > 0"},
    "sql": "SELECT * FROM source WHERE amount > 1000",
    "sinks": [{"topic": "large-orders", "key": "id"}],
}


class PipelineList(msgspec.Struct):
    """A page of pipelines."""

    pipelines: list[PipelineReport]
    total: int


class LogQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which lines: the newest so many, behind a number."""

    after: int = 0
    count: int = 100


class PipelineLog(msgspec.Struct):
    """Lines of a pipeline's log."""

    lines: list[PipelineLine]


def routes(api: Api) -> list[Any]:
    """The handlers."""
    return [*_life(api), *_moves(api)]


def _life(api: Api) -> list[Any]:
    @put(
        ONE,
        opt=described(
            "Make a pipeline be what is declared",
            tag=TAG,
            description="A new one is to run at once; one that exists goes on from where it stands. Keys are "
            "those of docs/guides/pipelines.md.",
            body=Pipeline,
            body_example=_EXAMPLE,
            answers={200: PipelineReport},
            errors=(409,),
        ),
    )
    async def apply_pipeline(request: Req, pipeline: str) -> Answer:
        declaration = await body(request, dict[str, Any])
        if declaration.get("name", pipeline) != pipeline:
            raise InvalidPipeline(
                f"name is {declaration['name']!r}, but the URL says {pipeline!r}", key="name"
            )
        async with changing(api, request, "apply_pipeline", pipeline):
            found = await api.broker.apply_pipeline({**declaration, "name": pipeline})
        return answer(found)

    @get(
        "/v1/pipelines",
        opt=described("List pipelines", tag=TAG, query=Page, answers={200: PipelineList}),
    )
    async def list_pipelines(request: Req) -> Answer:
        api.require(request, Action.READ)
        return paged(request, "pipelines", await api.broker.pipelines(), query(request, Page))

    @get(
        ONE,
        opt=described(
            "Look at a pipeline: state, lag, last batch, last error",
            tag=TAG,
            answers={200: PipelineReport},
            errors=(404,),
        ),
    )
    async def get_pipeline(request: Req, pipeline: str) -> Answer:
        api.require(request, Action.READ)
        return answer(await api.broker.pipeline(pipeline))

    @get(
        f"{ONE}/log",
        opt=described(
            "What its runner wrote", tag=TAG, query=LogQuery, answers={200: PipelineLog}, errors=(404,)
        ),
    )
    async def get_pipeline_log(request: Req, pipeline: str) -> Answer:
        api.require(request, Action.READ)
        asked = query(request, LogQuery)
        lines = await api.broker.pipeline_log(pipeline, after=asked.after, count=asked.count)
        return answer(PipelineLog(lines))

    @delete(
        ONE,
        status_code=200,
        opt=described("Delete a pipeline; what it wrote stays", tag=TAG, answers={204: None}, errors=(404,)),
    )
    async def delete_pipeline(request: Req, pipeline: str) -> Answer:
        async with changing(api, request, "delete_pipeline", pipeline):
            await api.broker.delete_pipeline(pipeline)
        return no_content()

    return [apply_pipeline, list_pipelines, get_pipeline, get_pipeline_log, delete_pipeline]


def _moves(api: Api) -> list[Any]:
    @post(
        f"{ONE}/start",
        status_code=200,
        opt=described(
            "Let it run, from where it stands", tag=TAG, answers={200: PipelineReport}, errors=(404,)
        ),
    )
    async def start_pipeline(request: Req, pipeline: str) -> Answer:
        async with changing(api, request, "start_pipeline", pipeline):
            found = await api.broker.start_pipeline(pipeline)
        return answer(found)

    @post(
        f"{ONE}/stop",
        status_code=200,
        opt=described("Stop it", tag=TAG, answers={200: PipelineReport}, errors=(404,)),
    )
    async def stop_pipeline(request: Req, pipeline: str) -> Answer:
        async with changing(api, request, "stop_pipeline", pipeline):
            found = await api.broker.stop_pipeline(pipeline)
        return answer(found)

    @post(
        f"{ONE}/seek",
        status_code=200,
        opt=described(
            "Go on elsewhere in the log, with a new run",
            tag=TAG,
            body=Seek,
            body_example={"position": "earliest"},
            answers={200: PipelineReport},
            errors=(404, 409, 416),
        ),
    )
    async def seek_pipeline(request: Req, pipeline: str) -> Answer:
        target = (await body(request, Seek)).to_target()
        async with changing(api, request, "seek_pipeline", pipeline):
            found = await api.broker.seek_pipeline(pipeline, target)
        return answer(found)

    return [start_pipeline, stop_pipeline, seek_pipeline]
