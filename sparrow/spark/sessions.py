"""A Spark session fit for topics: starts anywhere, with what makes small batches quick."""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from sparrow.spark.java import prepare_java

TUNED = {
    # Rows go between Python and the JVM by Unix sockets: a third of the latency of a micro-batch.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A task that runs twice would read twice; offsets make that harmless, and it is never worth it.
    "spark.speculation": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Workers are forked with everything imported; here Sparrow is surely installed where they run.
    "spark.python.daemon.module": "sparrow.spark.daemon",
    # Without Hadoop's native library every name that its FileContext looks at, and every file, costs a
    # process that runs readlink or chmod: more than half of a small micro-batch. This way it is one a file.
    # Checkpoints keep Hadoop's checksums; Spark's own, beside them, double the files.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming"
    ".checkpointing.FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}


def session(
    name: str | None = None, *, master: str | None = None, config: dict[str, Any] | None = None
) -> SparkSession:
    """The session of this process, made when there is none. ``master`` is ``local[*]`` unless it,
    ``spark-submit`` or the environment's SPARK_MASTER says otherwise. What ``spark-submit`` was told goes
    before what is set here, and ``config`` before both."""
    submitted = _submitted()
    chosen = master or submitted.get("spark.master") or os.environ.get("SPARK_MASTER") or "local[*]"
    if not submitted:
        prepare_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings: dict[str, Any] = dict(TUNED)
    if chosen.startswith("local"):
        settings |= _LOCAL
        settings["spark.sql.shuffle.partitions"] = os.cpu_count() or 2
    settings = {key: value for key, value in settings.items() if key not in submitted} | (config or {})
    title = name or submitted.get("spark.app.name") or "sparrow"
    builder = SparkSession.builder.appName(title).master(chosen)
    for key, value in settings.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        builder = builder.config(key, text)
    found: SparkSession = builder.getOrCreate()
    return found


def _submitted() -> dict[str, str]:
    """What ``spark-submit`` was told: it starts the JVM, and this program from there, and a builder would
    override it in silence."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()  # Only a configuration that sees the JVM knows.
    return dict(SparkConf().getAll())
