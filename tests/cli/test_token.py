"""``sparrow token`` on a data directory, and over the network against a broker that wants tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparrow.broker.broker import Broker
from sparrow.model.access import Principal
from sparrow.model.settings import Address, Settings
from sparrow.server.http import bind
from sparrow.server.tcp import TcpServer

from .conftest import Commands


def test_a_token_is_printed_once_and_listed_without_its_secret(sparrow: Commands) -> None:
    made = sparrow("token", "create", "admin", "--role", "admin").strip()
    shop = sparrow.json("token", "create", "shop", "--scope", "publish:orders.#", "--expires", "90d")
    assert made.startswith("sparrow_")
    assert shop["scopes"] == ["publish:orders.#"]
    rows = sparrow.rows("token", "list")
    assert [(row["name"], row["scopes"]) for row in rows] == [
        ("admin", "admin:#"),
        ("shop", "publish:orders.#"),
    ]
    listed = (
        sparrow("token", "list") + sparrow("token", "list", "--json") + sparrow("token", "list", "--table")
    )
    assert made not in listed
    assert shop["token"] not in listed
    assert rows[0]["expires"] == ""
    assert rows[1]["expires"] == shop["expires"]


def test_a_role_goes_with_the_topics_of_a_pattern(sparrow: Commands) -> None:
    sparrow("token", "create", "admin", "--role", "admin")
    made = sparrow.json("token", "create", "t", "--role", "subscriber", "--topics", "orders.#")
    assert made["scopes"] == ["subscribe:orders.#"]


def test_a_token_is_revoked_by_name_or_id_after_asking(sparrow: Commands) -> None:
    sparrow("token", "create", "admin", "--role", "admin")
    first = sparrow.json("token", "create", "a", "--role", "read-only")
    sparrow("token", "create", "b", "--role", "read-only")
    sparrow("token", "revoke", "b", code=2)
    assert sparrow.json("token", "revoke", first["id"], "--yes") == {"revoked": "a", "id": first["id"]}
    assert [row["name"] for row in sparrow.rows("token", "list")] == ["admin", "b"]
    assert sparrow.error("token", "revoke", "a", "--yes", code=3)["code"] == "TOKEN_NOT_FOUND"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("create", "t"), 2, "INVALID_ARGUMENT"),
        (("create", "t", "--role", "king"), 2, "INVALID_ARGUMENT"),
        (("create", "t", "--scope", "publish"), 2, "INVALID_ARGUMENT"),
        (("create", "t", "--scope", "publish:a.#.b"), 2, "INVALID_PATTERN"),
        (("create", "t", "--role", "admin", "--expires", "soon"), 2, "INVALID_ARGUMENT"),
        (("create", "t", "--role", "publisher"), 4, "FAILED_PRECONDITION"),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(
    sparrow: Commands, words: tuple[str, ...], code: int, error: str
) -> None:
    assert sparrow.error("token", *words, code=code)["code"] == error
    assert sparrow.rows("token", "list") == []


class Served(threading.Thread):
    """A broker with a TCP listener, on a loop of its own."""

    def __init__(self, data: Path) -> None:
        super().__init__(daemon=True)
        self.data = data
        self.url = ""
        self.root = ""
        self._ready = threading.Event()
        self._is_over: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        async with await Broker.open(Settings(data=str(self.data))) as broker:
            server = await TcpServer.start(broker, bind(Address("127.0.0.1", 0)))
            self.root = (await broker.create_token("root", role="admin")).text
            await broker.access.audit(Principal("root", "x", ()), "seal", "")
            self.url = f"sparrow://{server.address}"
            self._ready.set()
            await self._is_over.wait()
            await server.close()

    def __enter__(self) -> Served:
        self.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._is_over.set)
        self.join(30)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "served") as found:
        yield found


def test_commands_take_the_token_from_the_environment(
    sparrow: Commands, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARROW_URL", served.url)
    sparrow.bare("topic", "list", code=4)
    assert "UNAUTHENTICATED" in sparrow.err
    assert "SPARROW_TOKEN" in sparrow.err
    monkeypatch.setenv("SPARROW_TOKEN", served.root)
    sparrow.bare("topic", "create", "orders")
    viewer = sparrow.bare("token", "create", "viewer", "--role", "read-only").strip()
    assert viewer not in sparrow.bare("token", "list")
    monkeypatch.setenv("SPARROW_TOKEN", viewer)
    assert "orders" in sparrow.bare("topic", "list")
    sparrow.bare("topic", "delete", "orders", "--yes", code=4)
    assert "PERMISSION_DENIED" in sparrow.err
    assert "admin:orders" in sparrow.err
    sparrow.bare("token", "list", code=4)
    monkeypatch.setenv("SPARROW_TOKEN", served.root)
    titles, *lines = sparrow.bare("token", "audit").splitlines()
    assert titles == "at\twho\taction\twhat\toutcome"
    told = [line.split("\t")[1:] for line in lines]
    assert ["root", "create_topic", "orders", "done"] in told
    assert ["viewer", "delete_topic", "orders", "PERMISSION_DENIED"] in told
    assert ["viewer", "tokens", "", "PERMISSION_DENIED"] in told
