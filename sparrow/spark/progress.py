"""Commits a query's progress after every batch, also after the last.

Spark tells a source that a batch is done when it plans the next one; after the last batch it never does. A
listener in the driver hears of every batch. It commits for every query of the session whose source has the
option ``subscription``: the positions that Spark reports say which.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from sparrow.model.errors import SparrowError
from sparrow.spark.offsets import Offsets
from sparrow.spark.options import Where, parse_where
from sparrow.spark.subscribing import SubscriptionCursor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("sparrow.spark")
_watched: dict[tuple[str, Where], ProgressListener] = {}


class ProgressListener(StreamingQueryListener):
    """Commits to the subscriptions of one broker."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._cursors: dict[str, SubscriptionCursor] = {}

    def onQueryStarted(self, event: Any) -> None:
        """Nothing is done yet."""

    def onQueryIdle(self, event: Any) -> None:
        """Nothing new is done."""

    def onQueryTerminated(self, event: Any) -> None:
        """What was done is committed."""

    def onQueryProgress(self, event: Any) -> None:
        for source in event.progress.sources:
            offsets = positions(source.endOffset)
            if offsets is not None and offsets.subscription is not None:
                try:
                    self._cursor(offsets.subscription).commit(offsets)
                except SparrowError as error:
                    _log.warning("progress of %r is not committed: %s", offsets.subscription, error)

    def _cursor(self, name: str) -> SubscriptionCursor:
        if name not in self._cursors:
            self._cursors[name] = SubscriptionCursor.of(self._where, name)
        return self._cursors[name]


def positions(text: str | None) -> Offsets | None:
    """The positions that Spark reports of a source; None when they are another source's."""
    try:
        return Offsets.from_json(json.loads(text or ""))
    except (ValueError, AttributeError, TypeError):
        return None


def watch_progress(spark: SparkSession, where: Where | None = None, **options: str) -> ProgressListener:
    """Lets this session commit the progress of its queries on a broker: ``servers``, ``token``. Calling it
    again is allowed."""
    where = where or parse_where(options)
    key = (str(spark.sparkContext.applicationId), where)
    if key not in _watched:
        _watched[key] = ProgressListener(where)
        spark.streams.addListener(_watched[key])
    return _watched[key]
