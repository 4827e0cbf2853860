"""The store on a disk that fails: what freezes, what is refused, what goes on, and that nothing is lost.

Faults come from ``sparrow.testing.disk``. A crash is power loss before the n-th call to the disk, for every
n until the operation passes; the directory is then opened as the machine would find it.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from sparrow.model.message import StreamId
from sparrow.testing.store import append, contents, create_topic, draft, open_store


def payloads(first: int, count: int = 10, size: int = 100) -> list[bytes]:
    return [b"%08d" % number + b"." * size for number in range(first, first + count)]


async def test_keys_that_are_sealed_while_the_window_is_loaded_are_not_missed(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    topic = await create_topic(store, "orders")
    stream = StreamId(topic.id, 0)
    for key in ("first", "second"):
        await append(store, draft(stream, [b"x"], [key]))
        await store.rotate()
        if key == "first":
            await store.seal((), ())
    gate = threading.Event()
    store._read_thread.submit(gate.wait)  # The only way to hold a read up at a known place.
    loading = asyncio.create_task(store.idempotency_keys(topic, 0))
    await asyncio.sleep(0)
    await store.seal((), ())
    gate.set()
    keys = [key for found in await loading for key in found.batch.column("idempotency_key").to_pylist()]
    assert sorted(keys) == ["first", "second"]
    await store.close()
