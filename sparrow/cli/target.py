"""Which broker a command works on: one that listens at ``--url``, or a directory opened for the command.

Every command that needs a broker takes ``--url`` (or SPARROW_URL) or ``--data``, never both. With neither
it is the default address of ``sparrow up``. A directory given by ``--data`` must exist, so that a misspelt
path is an error and not a new, empty broker; ``sparrow up`` is what makes one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparrow.model.errors import ConnectionLost, InvalidArgument, NotADataDirectory

if TYPE_CHECKING:
    from sparrow.client.blocking import BlockingBroker

URL_DEFAULT = "sparrow://127.0.0.1:9092"
URL_VARIABLE = "SPARROW_URL"
TOKEN_VARIABLE = "SPARROW_TOKEN"
CONNECT_S = 2.0
"""How long a broker is tried for: one that is just starting is waited for, a person is not kept."""
CA_VARIABLE = "SPARROW_TLS_CA"
CERTIFICATE_VARIABLE = "SPARROW_TLS_CERTIFICATE"
KEY_VARIABLE = "SPARROW_TLS_KEY"
VARIABLES = frozenset({URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE})
"""What the environment tells clients; these are not settings of a broker."""

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help=f"The broker; else ${URL_VARIABLE}, else {URL_DEFAULT}.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Open this data directory; no broker may run on it.", hidden=True
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[bool, typer.Option("--table", help="Print a table, also into a pipe.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def address(url: str | None) -> str:
    """Where the broker listens, from the option, the environment or the default."""
    return url or os.environ.get(URL_VARIABLE) or URL_DEFAULT


@contextmanager
def opened(url: str | None, data: Path | None, *, publisher: str | None = None) -> Iterator[BlockingBroker]:
    """The broker of a command, closed when the command ends; over a connection the publisher is said once."""
    if url is not None and data is not None:
        raise InvalidArgument(
            "--url and --data cannot go together",
            hint="--url is for a running broker, --data for a directory that no broker has open.",
        )
    with _directory(data) if data is not None else connected(address(url), publisher) as broker:
        yield broker


def connected(url: str, publisher: str | None = None) -> BlockingBroker:
    """A running broker."""
    from sparrow.client.blocking import BlockingClient
    from sparrow.client.remote import RemoteBroker

    given = {
        "token": os.environ.get(TOKEN_VARIABLE),
        "publisher": publisher,
        "client": "sparrow-cli",
        "tls": _tls(),
    }
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    try:
        return BlockingClient(lambda: RemoteBroker.open(url, connect_s=CONNECT_S, **options))
    except ConnectionLost as error:
        raise ConnectionLost(
            error.message,
            hint=f"Start one with `sparrow up`, or name another with --url or {URL_VARIABLE}.",
        ) from error


def _tls() -> Any:
    """What to trust and to show on sparrows://, from the environment; none is the system's authorities."""
    authority, certificate = os.environ.get(CA_VARIABLE), os.environ.get(CERTIFICATE_VARIABLE)
    if not (authority or certificate):
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, os.environ.get(KEY_VARIABLE) or None)
    except OSError as error:
        raise InvalidArgument(
            f"{CA_VARIABLE}, {CERTIFICATE_VARIABLE} or {KEY_VARIABLE} cannot be used: {error}",
            hint="They name PEM files.",
        ) from error
    return context


def _directory(data: Path) -> BlockingBroker:
    from sparrow.broker.broker import Broker
    from sparrow.client.blocking import BlockingBroker
    from sparrow.model.settings import Settings

    if not data.is_dir():
        raise NotADataDirectory(f"there is no directory {data}")
    return BlockingBroker(lambda: Broker.open(Settings(data=str(data))))
