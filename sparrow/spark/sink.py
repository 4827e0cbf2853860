"""The sink: DataFrames into topics, each batch once (docs/guides/spark-sink.md).

Tasks stage what they write, under a name of their own for every attempt. The driver's commit names the parts
that count, and the broker publishes them in one step, once for each application and batch number. A streaming
query is the application, its batch ids are the numbers; a batch write is an application by itself unless the
options say which.

Spark makes a writer anew for every commit, in a process that lives for a moment. So nothing is imported here
that is slow, and everything a commit needs travels in the messages of the tasks; the work of a task is in
writer.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sparrow.model.errors import SparrowError
from sparrow.spark.options import Where
from sparrow.spark.writeplan import Staged, WritePlan, parse_plan, transaction_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

REMEMBER_S = 86_400.0
"""How long a batch write without an application id is known: long enough for every repeat of its commit."""


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """The writer of ``df.write.format("sparrow")``."""
    plan = parse_plan(options, schema, overwrite, is_stream=False)
    if plan.application is None:
        plan = replace(plan, application=f"write-{secrets.token_hex(16)}", batch=0)
        return BatchWriter(plan, REMEMBER_S)
    return BatchWriter(plan, None)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """The writer of ``df.writeStream.format("sparrow")``."""
    return StreamWriter(parse_plan(options, schema, overwrite, is_stream=True))


class BatchWriter(DataSourceArrowWriter):
    """One write of a DataFrame: published whole, once, or not at all."""

    def __init__(self, plan: WritePlan, remember_s: float | None) -> None:
        self._plan = plan
        self._remember_s = remember_s

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from sparrow.spark.writer import write_part

        assert self._plan.application is not None
        assert self._plan.batch is not None
        return write_part(self._plan, self._plan.application, self._plan.batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _commit(self._plan, messages, self._remember_s)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        assert self._plan.application is not None
        assert self._plan.batch is not None
        _abort(self._plan, {transaction_of(self._plan, self._plan.application, self._plan.batch)})


class StreamWriter(DataSourceStreamArrowWriter):
    """A streaming query: every micro-batch is published whole and once."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from sparrow.spark.writer import streaming_identity, write_part

        query, batch = streaming_identity()
        return write_part(self._plan, self._plan.application or query, batch, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _commit(self._plan, messages, None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _abort(self._plan, {found.transaction for found in _staged(messages)})


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [message for message in messages if isinstance(message, Staged)]


def _commit(
    plan: WritePlan, messages: Sequence[WriterCommitMessage | None], remember_s: float | None
) -> None:
    found = sorted(_staged(messages), key=lambda message: message.partition)
    if not found:
        return
    batches = {(message.application, message.batch) for message in found}
    assert len(batches) == 1, f"tasks staged for several batches: {batches}"
    ((application, batch),) = batches
    parts = [[each.transaction, each.part, each.messages] for each in found if each.messages]
    if parts:
        with plan.line() as line:
            line.call(
                "commit_staged", application=application, batch=batch, parts=parts, remember_s=remember_s
            )


def _abort(plan: WritePlan, transactions: set[str]) -> None:
    """Tells the broker to drop what was staged; one that cannot be told drops it by itself, later."""
    try:
        with replace(plan, where=_hasty(plan.where)).line() as line:
            for transaction in transactions:
                line.call("abort_staged", transaction=transaction)
    except SparrowError:
        return


def _hasty(where: Where) -> Where:
    return Where(where.servers, where.path, where.token, min(1.0, where.retry_s))
