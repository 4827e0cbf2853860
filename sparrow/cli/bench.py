"""``sparrow bench``: a quick figure for one broker: how fast it takes messages and hands them out.

It makes a topic and a subscription of its own and deletes them at the end, also when interrupted. Publishers
are threads that wait for their receipts, so the figure is of what is as safe as the topic's durability says.
The benchmarks of the project (``make bench``) are the thorough ones; this one tells whether a broker and its
disk are healthy.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sparrow.cli.output import OnProgress, count, print_json, progress, reflow, size, span
from sparrow.cli.target import Data, Json, Url, address, opened
from sparrow.model.errors import InvalidArgument
from sparrow.model.limits import REQUEST_BYTES_MAX
from sparrow.model.topic import Durability

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker
    from sparrow.client.subscription import BlockingSubscription

app = typer.Typer()

_PULL = 2000
_SILENT_S = 10.0
"""A broker that hands out nothing for so long is not measured any further."""


class Plan(NamedTuple):
    """What is measured."""

    messages: int
    size_bytes: int
    batch: int
    publishers: int
    partitions: int
    durability: str


@app.command(epilog="Example: sparrow bench --messages 200000 --size 1024 --batch 1000")
def bench(
    messages: Annotated[int, typer.Option(min=1, help="How many messages.")] = 100_000,
    size_: Annotated[int, typer.Option("--size", min=1, help="Bytes of each.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Messages in one publish; 1 is single ones.")] = 1000,
    publishers: Annotated[int, typer.Option(min=1, max=64, help="Publishes under way at once.")] = 4,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of the topic.")] = 1,
    durability: Annotated[Durability, typer.Option(help="When receipts are given.")] = Durability.DURABLE,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Measure publishing and consuming against a broker, in a topic that is deleted afterwards."""
    plan = Plan(messages, size_, min(batch, messages), publishers, partitions, durability.value)
    if plan.batch * (plan.size_bytes + 64) > REQUEST_BYTES_MAX:
        raise InvalidArgument(
            f"a batch of {size(plan.batch * plan.size_bytes)} is more than one request may hold",
            hint=f"Use a smaller --batch; a request holds {size(REQUEST_BYTES_MAX)}.",
        )
    with opened(url, data) as broker, _place(broker, plan) as (topic, handle):
        with progress("publishing", as_json=as_json) as on_progress:
            published_s, latencies = _publish(broker, topic, plan, on_progress)
        with progress("consuming", as_json=as_json) as on_progress:
            consumed, consumed_s = _consume(handle, plan, on_progress)
    where = str(data) if data is not None else address(url)
    result = {
        "target": where,
        "settings": plan._asdict(),
        "publish": {**_rate(plan, plan.messages, published_s), **_quantiles(latencies)},
        "consume": _rate(plan, consumed, consumed_s),
    }
    if as_json:
        print_json(result)
    else:
        _print(where, plan, result)


@contextmanager
def _place(broker: BlockingBroker, plan: Plan) -> Iterator[tuple[str, BlockingSubscription]]:
    """A topic and a subscription of our own."""
    name = f"sparrow-bench-{secrets.token_hex(4)}"
    broker.create_topic(name, partitions=plan.partitions, durability=plan.durability)
    try:
        handle = broker.subscribe(name, name, start="earliest")
        try:
            yield name, handle
        finally:
            handle.unsubscribe()
    finally:
        broker.delete_topic(name, force=True)


def _publish(
    broker: BlockingBroker, topic: str, plan: Plan, on_progress: OnProgress | None
) -> tuple[float, list[float]]:
    """How long it took, and the time to the receipt of each publish."""
    data = [secrets.token_bytes(plan.size_bytes)] * plan.batch
    rounds = [plan.batch] * (plan.messages // plan.batch)
    rounds += [plan.messages % plan.batch] if plan.messages % plan.batch else []

    def one(number: int) -> float:
        began_s = time.perf_counter()
        if number == 1:
            broker.publish(topic, data[0])
        else:
            broker.publish_batch(topic, data[:number])
        return time.perf_counter() - began_s

    latencies: list[float] = []
    began_s = time.perf_counter()
    with ThreadPoolExecutor(plan.publishers) as pool:
        try:
            for taken_s in pool.map(one, rounds):
                latencies.append(taken_s)
                if on_progress is not None:
                    on_progress(min(plan.messages, len(latencies) * plan.batch), plan.messages)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return time.perf_counter() - began_s, latencies


def _consume(handle: BlockingSubscription, plan: Plan, on_progress: OnProgress | None) -> tuple[int, float]:
    """How many came, and how long it took until their acks were durable."""
    taken = 0
    began_s = time.perf_counter()
    while taken < plan.messages:
        messages = handle.pull(_PULL, _SILENT_S)
        if not messages:
            break
        handle.ack(messages)
        taken += len(messages)
        if on_progress is not None:
            on_progress(taken, plan.messages)
    handle.flush()
    return taken, time.perf_counter() - began_s


def _rate(plan: Plan, number: int, seconds: float) -> dict[str, Any]:
    return {
        "messages": number,
        "seconds": round(seconds, 6),
        "messages_per_s": round(number / seconds, 1),
        "bytes_per_s": round(number * plan.size_bytes / seconds, 1),
    }


def _quantiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    last = len(ordered) - 1
    return {f"p{share}_s": round(ordered[round(last * share / 100)], 6) for share in (50, 99)}


def _print(where: str, plan: Plan, result: dict[str, Any]) -> None:
    promise = {
        "durable": "receipts after fdatasync: survives power loss",
        "written": "receipts after write: survives kill -9, NOT power loss",
        "none": "receipts at once: NOT safe",
    }[plan.durability]
    typer.echo(
        f"{where}: {count(plan.messages, 'message')} of {size(plan.size_bytes)}, batches of {plan.batch:,}, "
        f"{count(plan.publishers, 'publisher')}, {count(plan.partitions, 'partition')}"
    )
    typer.echo(f"{plan.durability}: {promise}")
    for name in ("publish", "consume"):
        found = result[name]
        rest = ""
        if name == "publish":
            rest = f", receipt after {span(found['p50_s'])} (p50), {span(found['p99_s'])} (p99)"
        typer.echo(
            f"{name:<8} {found['messages_per_s']:>11,.0f} messages/s  "
            f"{size(found['bytes_per_s']):>9}/s  in {found['seconds']:.2f} s{rest}"
        )


reflow(app)
