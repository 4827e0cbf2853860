"""A broker that is there to be killed: only the binary protocol, so that it starts quickly.

python tests/spark/broker.py 9092 /tmp/data
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import sparrow
from sparrow.server.tcp import TcpServer


async def serve(port: str, data: Path) -> None:
    async with sparrow.aopen(data) as broker:
        with socket.create_server(("127.0.0.1", int(port))) as bound:
            bound.setblocking(False)
            await TcpServer.start(broker, bound)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
