"""Topics as Spark tables.

    import sparrow.spark

    spark = sparrow.spark.session()
    orders = sparrow.spark.table(spark, "orders", servers="127.0.0.1:9092")
    live = sparrow.spark.stream(spark, "orders.#", servers="127.0.0.1:9092", subscription="billing")

``spark.read.format("sparrow")`` and ``readStream`` work in any session, with nothing to register. Without
Spark, ``sparrow.connect(...).fetch_table("orders")`` gives the same rows as an Arrow table.

Names are imported when they are first used: Spark imports this package in every worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow.spark.causes import cause
    from sparrow.spark.payloads import avro, protobuf
    from sparrow.spark.progress import watch_progress
    from sparrow.spark.sessions import session
    from sparrow.spark.tables import stream, table, typed

_PLACES = {
    "avro": "payloads",
    "cause": "causes",
    "protobuf": "payloads",
    "session": "sessions",
    "stream": "tables",
    "table": "tables",
    "typed": "tables",
    "watch_progress": "progress",
}

__all__ = ["avro", "cause", "protobuf", "session", "stream", "table", "typed", "watch_progress"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'sparrow.spark' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"sparrow.spark.{_PLACES[name]}"), name)
