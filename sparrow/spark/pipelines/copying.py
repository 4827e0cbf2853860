"""``builtin: copy``: messages as they are, with the day they were published on, to keep or to pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from sparrow.model.errors import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def copy(views: Mapping[str, DataFrame], options: dict[str, Any]) -> DataFrame:
    """All columns, and ``date``; a typed source has ``__publish_time``."""
    if options or len(views) != 1:
        raise InvalidPipeline("builtin copy takes one source and no options", key="options")
    (rows,) = views.values()
    time = "__publish_time" if "__publish_time" in rows.columns else "publish_time"
    return rows.withColumn("date", F.to_date(F.col(time)))
