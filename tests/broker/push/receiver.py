"""A receiver of webhooks in a process of its own, which does as it is told.

Run as ``python receiver.py PORT``: prints its port. ``POST /log`` names a file to which requests are appended
as JSON lines from then on; ``POST /mode`` says how to answer: a status, headers, a body, a delay, or a text
in a body that fails.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web


class Story:
    """What one test has to do with the receiver."""

    def __init__(self, log: Path | None) -> None:
        self._log = None if log is None else log.open("a", buffering=1)
        self.mode: dict[str, Any] = {}
        self._now_in = 0
        self._most_in = 0

    @property
    def most_in(self) -> int:
        return self._most_in

    async def hook(self, request: web.Request) -> web.Response:
        body = await request.read()
        mode = self.mode
        self._now_in += 1
        self._most_in = max(self._most_in, self._now_in)
        try:
            status = mode.get("status", 200)
            if mode.get("fails_on") and mode["fails_on"].encode() not in body:
                status = 200
            if "chaos" in mode:
                # Drawn from the message and its attempt, so that a run can be repeated.
                drawn = random.Random(f"{mode['chaos']}{body!r}{request.headers['X-PubSub-Attempt']}")
                status = drawn.choice([200, 200, 200, 204, 400, 404, 500, 503, 429, 302, 0])
            self._write(request, body, status)
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                status = 500
            if mode.get("delay_s"):
                await asyncio.sleep(mode["delay_s"])
            return web.Response(status=status, headers=mode.get("headers", {}), text=mode.get("body", ""))
        finally:
            self._now_in -= 1

    def _write(self, request: web.Request, body: bytes, status: int) -> None:
        entry = {
            "path": request.path_qs,
            "headers": dict(request.headers),
            "body": base64.b64encode(body).decode(),
            "at": time.time(),
            "status": status,
        }
        if self._log is not None:
            self._log.write(json.dumps(entry) + "\n")


class Receiver:
    def __init__(self) -> None:
        self._story = Story(None)

    async def log(self, request: web.Request) -> web.Response:
        self._story = Story(Path(await request.text()))
        return web.Response()

    async def mode(self, request: web.Request) -> web.Response:
        self._story.mode = await request.json()
        return web.Response()

    async def most(self, request: web.Request) -> web.Response:
        return web.json_response(self._story.most_in)

    async def options(self, request: web.Request) -> web.Response:
        allowed = self._story.mode.get("allows", "*")
        return web.Response(headers={"WebHook-Allowed-Origin": allowed} if allowed else {})

    async def hook(self, request: web.Request) -> web.Response:
        return await self._story.hook(request)


async def serve(port: int) -> None:
    receiver = Receiver()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/log", receiver.log)
    app.router.add_post("/mode", receiver.mode)
    app.router.add_get("/most", receiver.most)
    app.router.add_options("/{tail:.*}", receiver.options)
    app.router.add_post("/{tail:.*}", receiver.hook)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
