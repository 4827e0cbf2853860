"""Our errors inside Spark's: a failure in a source reaches the user as text in an exception of Spark."""

from __future__ import annotations

import re

from sparrow.model.errors import SparrowError, registry

_LINE = re.compile(r"^sparrow\.model\.errors\.\w+: (.*)\[([A-Z_]+)\] ?(.*)$", re.MULTILINE)


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
        return None
    message, code, hint = found[-1]
    return registry().get(code, SparrowError)(message.strip(), hint=hint.strip() or None)
