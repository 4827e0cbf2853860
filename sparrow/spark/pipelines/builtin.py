"""Transformations that come with Sparrow, by name: ``builtin: statistics`` in a declaration.

Each takes the views of the sources and the declaration's ``options``, and returns a DataFrame. Jobs that are
no streams (archive, compact, merge) are commands of their own; compact and merge can be scheduled (jobs.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sparrow.model.errors import InvalidPipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PLACES = {"copy": "copying:copy", "replay": "replay:replay", "statistics": "statistics:statistics"}

Transform = Callable[[Mapping[str, "DataFrame"], dict[str, Any]], "DataFrame"]


def find(name: str) -> Transform:
    """The built-in of this name."""
    if name not in PLACES:
        raise InvalidPipeline(
            f"builtin {name!r} does not exist", hint=f"There are: {', '.join(PLACES)}.", key="builtin"
        )
    module, _, function = PLACES[name].partition(":")
    found: Transform = getattr(importlib.import_module(f"sparrow.spark.pipelines.{module}"), function)
    return found
