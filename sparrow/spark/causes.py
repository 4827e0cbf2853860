"""Our errors inside Spark's: a failure in a source reaches the user as text in an exception of Spark."""

from __future__ import annotations

import re

from sparrow.model.errors import PreconditionFailed, SparrowError, registry

_LINE = re.compile(r"^sparrow\.model\.errors\.\w+: (.*)\[([A-Z_]+)\] ?(.*)$", re.MULTILINE)
_FILE = re.compile(r"\[FAILED_READ_FILE\.\w+\] .*? file (\S.*?/[0-9]{20}(?:-[cm][0-9]+)?\.parquet)")
"""What Spark says of a segment that an executor cannot open."""


def cause(error: BaseException) -> SparrowError | None:
    """The error of Sparrow that made a query fail, with its code and hint; None when it was something else.

    try:
        df.count()
    except Exception as failure:
        raise sparrow.spark.cause(failure) or failure
    """
    if isinstance(error, SparrowError):
        return error
    found = _LINE.findall(str(error))
    if not found:
        return _unread(str(error))
    message, code, hint = found[-1]
    return registry().get(code, SparrowError)(message.strip(), hint=hint.strip() or None)


def _unread(text: str) -> SparrowError | None:
    """History of a table is files, and Spark does not know what is to be done about one that is not there."""
    found = _FILE.search(text)
    if found is None:
        return None
    return PreconditionFailed(
        f"an executor cannot read {found[1]}",
        hint="Let executors see the data directory there, say with table(..., lake=...) where they see it, "
        'or read with format("sparrow"), which asks the broker. A table older than hold_s is made anew.',
    )
