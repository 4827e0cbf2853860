"""``sparrow up``: one broker process, from a data directory to its listeners and back.

The order is the point. Addresses are taken first, so that a taken port fails at once. The broker is
opened and recovers. Listeners start last, so nobody is answered by a broker that is not whole. A
stop goes the other way: listeners end, then the broker closes.

The first SIGINT or SIGTERM asks for that stop, also during recovery, which then ends before the
broker closes. A second one ends the process at once; a broker is made to survive that.

People on a terminal get a few lines on standard output; logs go to standard error as the settings
say. With ``--json`` the start is one line of JSON instead, for scripts that ask for port 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparrow.model.health import Health

if TYPE_CHECKING:
    import socket

    from sparrow.broker.broker import Broker
    from sparrow.model.settings import Settings
    from sparrow.server.supervision import Supervisor
    from sparrow.server.tcp import TcpServer

app = typer.Typer()

Text = str | None


OpenBroker = Callable[["Settings"], Awaitable["Broker"]]


@app.command()
def up(
    data: Annotated[Text, typer.Option(help="The data directory.")] = None,
    http: Annotated[Text, typer.Option(help="Address of the HTTP API, host:port.")] = None,
    tcp: Annotated[Text, typer.Option(help="Address of the binary protocol, host:port, or none.")] = None,
    grpc: Annotated[Text, typer.Option(help="Address of the gRPC API, host:port.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings.")] = None,
    log_level: Annotated[Text, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[Text, typer.Option(help="json or console.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines although no token is wanted.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the start as JSON.")] = False,
) -> None:
    """Start a broker on a data directory; SIGINT or SIGTERM stops it."""
    from sparrow.broker import logs
    from sparrow.cli.settings import load

    flags = {
        "data": data,
        "http": http,
        "tcp": tcp,
        "grpc": grpc,
        "log.level": log_level,
        "log.format": log_format,
        "access.insecure": insecure or None,
    }
    settings = load(config, os.environ, flags).settings
    logs.configure(settings.log.level, settings.log.format)
    run(settings, as_json=as_json)


def run(settings: Settings, *, as_json: bool = False) -> None:
    """Serve until a signal, on an event loop of its own."""
    _travel_light()
    import uvloop

    from sparrow.broker.broker import Broker

    uvloop.run(serve(settings, Broker.open, as_json=as_json))


async def serve(settings: Settings, open_broker: OpenBroker, *, as_json: bool = False) -> None:
    """Bind, open, listen, wait for the stop, and undo it all in the other order."""
    from sparrow.broker import logs, memory
    from sparrow.model.settings import NONE, parse_address
    from sparrow.server import exposure
    from sparrow.server.http import HttpServer, bind, build
    from sparrow.server.tls import tls_context

    log = logs.get("up")
    stop = _stop_on_signals()
    context = tls_context(settings.server)
    with contextlib.ExitStack() as sockets:
        bound = sockets.enter_context(bind(parse_address(settings.http)))
        bound_tcp = None
        if settings.tcp != NONE:
            bound_tcp = sockets.enter_context(bind(parse_address(settings.tcp)))
        broker = await open_broker(settings)
        try:
            listeners = {"http": bound} if bound_tcp is None else {"http": bound, "tcp": bound_tcp}
            exposure.check(listeners, settings, broker.access)
            tcp = None if bound_tcp is None else await _start_tcp(broker, bound_tcp, settings)
            try:
                http = await HttpServer.start(build(broker), bound, context)
                try:
                    s = "" if context is None else "s"
                    addresses = {"http": f"http{s}://{http.address}"}
                    if tcp is not None:
                        addresses["tcp"] = f"sparrow{s}://{tcp.address}"
                    _announce(settings, addresses, broker.health(), as_json=as_json)
                    log.info("broker-started", **addresses, data=settings.data)
                    broker.steward.on_shutdown = stop.set
                    memory.settle()
                    pipelines = await _start_pipelines(broker, settings, addresses.get("tcp"))
                    try:
                        await _first(stop.wait(), http.wait_closed())
                        log.info("broker-stopping")
                    finally:
                        await pipelines.stop()
                finally:
                    await http.close()
            finally:
                if tcp is not None:
                    await tcp.close()
        finally:
            await broker.close()
    log.info("broker-stopped")


def _travel_light() -> None:
    """Where numpy and pandas are installed pyarrow loads them, at its import and its first conversion: 50 MB
    and a long start for nothing. It looks once; afterwards they may be imported as ever."""

    class Refusal:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name in ("numpy", "pandas"):
                raise ImportError(name)

    refusal = Refusal()
    sys.meta_path.insert(0, refusal)
    try:
        import pyarrow.compute

        pyarrow.scalar(None)
    finally:
        sys.meta_path.remove(refusal)


async def _start_pipelines(broker: Broker, settings: Settings, url: str | None) -> Supervisor:
    """Applies what the directory declares, and runs what is to run; a wrong declaration stops nobody."""
    from sparrow.broker import logs
    from sparrow.model.errors import SparrowError
    from sparrow.server.supervision import Supervisor

    if settings.pipelines.directory:
        from sparrow.spark.pipelines import declarations

        try:
            found = await asyncio.to_thread(declarations.read, Path(settings.pipelines.directory))
            for each in found:
                await broker.pipeline_desk.apply(each, is_stopped=False)
        except SparrowError as error:
            logs.get("up").error("pipelines-refused", error.message, hint=error.hint)
    supervisor = Supervisor(broker, settings.pipelines, url, settings.data)
    supervisor.start()
    return supervisor


async def _start_tcp(broker: Broker, bound: socket.socket, settings: Settings) -> TcpServer:
    from sparrow.server.tcp import TcpServer

    return await TcpServer.start(broker, bound, settings.server)


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait for whichever ends first; its failure, if it failed, is raised."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    for task in done:
        task.result()


def _stop_on_signals() -> asyncio.Event:
    """An event that the first signal sets; the second ends the process on the spot."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _announce(settings: Settings, addresses: dict[str, str], health: Health, *, as_json: bool) -> None:
    if as_json:
        import msgspec

        start = {
            **addresses,
            "data": settings.data,
            "pid": os.getpid(),
            "health": health,
        }
        typer.echo(msgspec.json.encode(start).decode())
    elif sys.stdout.isatty():
        _greet(settings, addresses, health)


def _greet(settings: Settings, addresses: dict[str, str], health: Health) -> None:
    from importlib import metadata

    from rich.console import Console

    rows = [*addresses.items(), ("data", settings.data), ("state", str(health.status))]
    rows += [(check.name, check.message) for check in health.checks if check.name == "recovery"]
    rows += [("advice", sentence) for sentence in health.recommendations]
    # Lines are left unbroken, so that an address or a path can be copied whole.
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]Sparrow {metadata.version('sparrow-broker')}[/] is up. Ctrl-C stops it.")
    for name, value in rows:
        console.print(f"  {name:<10}{value}", markup=False)
