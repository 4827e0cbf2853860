"""Tokens and the audit log over HTTP."""

from __future__ import annotations

import pytest

from .conftest import Served

TOKENS = "/api/v1/admin/tokens"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def root(served: Served) -> dict[str, str]:
    made = await served.http.post(TOKENS, json={"name": "root", "role": "admin"})
    assert made.status_code == 201, made.text
    return bearer(made.json()["token"])


async def test_a_token_made_over_http_works_is_listed_without_its_text_and_can_be_revoked(
    served: Served,
) -> None:
    admin = await root(served)
    wanted = {"name": "shop", "role": "publisher", "topics": "orders.#", "expires_in_s": 3600}
    made = await served.http.post(TOKENS, json=wanted, headers=admin)
    assert made.status_code == 201
    assert made.headers["Cache-Control"] == "no-store"
    shop = made.json()
    assert shop["scopes"] == ["publish:orders.#"]
    assert shop["expires_at"] > shop["created_at"]
    listed = await served.http.get(TOKENS, headers=admin)
    assert [token["name"] for token in listed.json()["tokens"]] == ["root", "shop"]
    assert shop["token"] not in listed.text
    assert "token" not in listed.json()["tokens"][0]
    refused = await served.http.get(TOKENS, headers=bearer(shop["token"]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "PERMISSION_DENIED")
    assert refused.json()["error"]["details"]["scope"] == "admin:#"
    revoked = await served.http.delete(f"{TOKENS}/shop", headers=admin)
    assert revoked.status_code == 204
    assert (await served.http.get(TOKENS, headers=bearer(shop["token"]))).status_code == 401
    assert (await served.http.delete(f"{TOKENS}/shop", headers=admin)).status_code == 404


@pytest.mark.parametrize(
    ("wanted", "status", "code"),
    [
        ({"name": "x"}, 400, "INVALID_ARGUMENT"),
        ({"name": "x", "role": "king"}, 400, "INVALID_ARGUMENT"),
        ({"name": "x", "scopes": ["publish:a.#.b"]}, 400, "INVALID_PATTERN"),
        ({"name": "x", "role": "admin", "rights": 1}, 400, "INVALID_ARGUMENT"),
        ({"name": 5, "role": "admin"}, 400, "INVALID_ARGUMENT"),
        ({"name": "x", "role": "admin", "expires_in_s": -1}, 400, "INVALID_ARGUMENT"),
        ({"name": "x", "role": "publisher"}, 409, "FAILED_PRECONDITION"),
    ],
)
async def test_a_token_that_makes_no_sense_is_refused(
    served: Served, wanted: dict[str, object], status: int, code: str
) -> None:
    answer = await served.http.post(TOKENS, json=wanted)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert await served.broker.tokens() == []


async def test_two_tokens_of_a_name_are_a_conflict(served: Served) -> None:
    admin = await root(served)
    again = await served.http.post(TOKENS, json={"name": "root", "role": "admin"}, headers=admin)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "TOKEN_EXISTS")


async def test_changes_and_refusals_are_in_the_audit_log_with_their_request_id(served: Served) -> None:
    admin = await root(served)
    made = await served.http.post(TOKENS, json={"name": "viewer", "role": "read-only"}, headers=admin)
    viewer = bearer(made.json()["token"])
    asked = {**viewer, "X-Request-Id": "req-7"}
    assert (await served.http.delete(f"{TOKENS}/root", headers=asked)).status_code == 403
    # Somebody puts the text where the name belongs.
    text = made.json()["token"]
    assert (await served.http.delete(f"{TOKENS}/{text}", headers=admin)).status_code == 404
    found = await served.http.get("/api/v1/admin/audit?limit=3", headers=admin)
    assert found.status_code == 200
    entries = found.json()["entries"]
    assert [(entry["who"], entry["action"], entry["what"], entry["outcome"]) for entry in entries] == [
        ("root", "create_token", "viewer", "done"),
        ("viewer", "revoke_token", "root", "PERMISSION_DENIED"),
        ("root", "revoke_token", "sparrow_…", "TOKEN_NOT_FOUND"),
    ]
    assert entries[1]["request_id"] == "req-7"
    assert text not in found.text
    assert (await served.http.get("/api/v1/admin/audit", headers=viewer)).status_code == 403
    assert (await served.http.get("/api/v1/admin/audit?limit=0", headers=admin)).status_code == 400


async def test_too_many_calls_of_one_token_are_refused_with_the_time_to_wait(served: Served) -> None:
    admin = await root(served)
    other = await served.http.post(TOKENS, json={"name": "other", "role": "admin"}, headers=admin)
    answers = [
        await served.http.post(TOKENS, json={"name": "root", "role": "admin"}, headers=admin)
        for _ in range(12)
    ]
    limited = answers[-1]
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "RATE_LIMITED")
    assert 1 <= int(limited.headers["Retry-After"]) <= 6
    # Looking has a limit of its own, and so has everybody else.
    assert (await served.http.get(TOKENS, headers=admin)).status_code == 200
    third = {"name": "third", "role": "admin"}
    answer = await served.http.post(TOKENS, json=third, headers=bearer(other.json()["token"]))
    assert answer.status_code == 201
