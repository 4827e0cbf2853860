"""A driver that is there to be killed: a streaming query from the topic ``in`` to the topic ``out``.

    python tests/spark/relay.py sparrow://127.0.0.1:9092 /tmp/checkpoint

It says "running" when the query runs. A query that fails, because one of its workers was killed or the broker
stayed away, is started again from its checkpoint, as a supervisor would.
"""

from __future__ import annotations

import sys
from typing import Any

from sparrow.spark import session

ROWS_A_BATCH = 400


def main(address: str, checkpoint: str) -> None:
    quick_start = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    config = {"spark.driver.memory": "512m", "spark.driver.extraJavaOptions": quick_start}
    spark = session("relay", master="local[2]", config=config)
    spark.sparkContext.setLogLevel("OFF")
    while True:
        try:
            relay(spark, address, checkpoint).awaitTermination()
        except Exception as error:  # noqa: BLE001 - whatever it died of, it goes on where it was
            print(f"starting again after {str(error)[:300]!r}", file=sys.stderr, flush=True)


def relay(spark: Any, address: str, checkpoint: str) -> Any:
    """Starts the query."""
    messages = (
        spark.readStream.format("sparrow")
        .option("servers", address)
        .option("subscribe", "in")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", ROWS_A_BATCH)
        .option("columns", "key,data")
        .load()
    )
    query = (
        messages.writeStream.format("sparrow")
        .option("servers", address)
        .option("topic", "out")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    print("running", flush=True)
    return query


if __name__ == "__main__":
    main(*sys.argv[1:])
