"""Spark's Python daemon, with what its workers need imported beforehand.

Spark forks a worker from its daemon for every task that finds none idle, and for every plan and commit. Each
would import Arrow, Spark and Sparrow anew, which takes longer than its work. Forked from this daemon they
find everything in memory. ``sparrow.spark.session`` asks for it on a local master; elsewhere
``spark.python.daemon.module=sparrow.spark.daemon`` does, where every executor has Sparrow installed.
"""

from __future__ import annotations

import gc

import pyarrow.compute  # noqa: F401
import pyspark.sql.datasource  # noqa: F401
from pyspark.daemon import manager

import sparrow.client.direct
import sparrow.spark.batch
import sparrow.spark.sink
import sparrow.spark.source
import sparrow.spark.streaming
import sparrow.spark.writer  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # Collecting in a worker would write to every page that it shares with the daemon.
    manager()
