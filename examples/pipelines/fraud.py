"""Orders that look like fraud, to a topic of alerts: a rule in Python."""

import sparrow


@sparrow.pipeline(
    "fraud",
    source={
        "topic": "orders.#",
        "start": "earliest",
        "view": "orders",
        "schema": "id STRING, country STRING, amount DOUBLE, ordered_at TIMESTAMP",
    },
    expect={"the amount is positive": "amount > 0"},
    sinks=[{"topic": "alerts.fraud", "key": "id", "attributes": {"rule": "rule", "country": "country"}}],
)
def fraud(orders):
    """What costs more than an order usually does."""
    large = orders.where("amount > 1000").select("id", "country", "amount", "ordered_at")
    return large.selectExpr("*", "'large-order' AS rule")
