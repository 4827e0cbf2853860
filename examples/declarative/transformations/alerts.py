"""Orders as a table, and large ones as alerts to a topic.

Each run takes what is there and ends: Spark executes the flows with ``Trigger.AvailableNow``, which the
source supports. Its position is in the flow's checkpoint and, by ``subscription``, in the broker, where the
lag is seen between the runs; the last batch of a run counts until the next. The sink publishes each batch
once.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
SERVERS = spark.conf.get("sparrow.servers")
SCHEMA = "id STRING, country STRING, amount DOUBLE"


def read(subscription: str) -> DataFrame:
    """The orders as they come, their JSON as columns."""
    rows = (
        spark.readStream.format("sparrow")
        .option("servers", SERVERS)
        .option("subscribePattern", "orders.#")
        .option("startingOffsets", "earliest")
        .option("subscription", subscription)
        .load()
    )
    parsed = rows.selectExpr(f"from_json(CAST(data AS STRING), '{SCHEMA}') AS body", "publish_time")
    return parsed.select("body.*", "publish_time")


@dp.table
def orders() -> DataFrame:
    """All orders, in Spark's catalog."""
    return read("declarative-orders")


dp.create_sink("alerts", "sparrow", {"servers": SERVERS, "topic": "alerts.large"})


@dp.append_flow(target="alerts")
def large_orders() -> DataFrame:
    """What a sink takes: data, and a key."""
    large = read("declarative-alerts").where("amount > 1000")
    return large.selectExpr("to_json(struct(*)) AS data", "id AS key")
