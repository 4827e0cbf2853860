"""What receivers verify with. The expected bytes are computed here by other means than the code's own."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys

import pytest

from sparrow import webhooks
from sparrow.broker.push import signing
from sparrow.model.errors import InvalidArgument, WebhookNotVerified

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OTHER = "whsec_" + base64.b64encode(bytes(range(1, 33))).decode()
NOW_S = 1_700_000_000
BODY = '{"data":"\N{SNOWMAN}"}'.encode()


def hmac_by_hand(key: bytes, content: bytes) -> bytes:
    """RFC 2104, from the hash alone."""
    key = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + content).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()


def request(
    *secrets: str, message_id: str = "1-0-7", at_s: int = NOW_S, body: bytes = BODY
) -> dict[str, str]:
    keys = [webhooks.key_of(secret) for secret in secrets]
    return signing.headers(keys, message_id, 3, at_s, body)


def test_the_signature_is_the_one_of_the_standard() -> None:
    expected = base64.b64encode(hmac_by_hand(KEY, b"1-0-7.1700000000." + BODY)).decode()
    assert webhooks.sign(SECRET, "1-0-7", NOW_S, BODY) == f"v1,{expected}"
    headers = request(SECRET)
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["X-PubSub-Signature"] == "sha256=" + hmac_by_hand(KEY, BODY).hex()
    assert (headers["webhook-id"], headers["X-PubSub-Message-Id"]) == ("1-0-7", "1-0-7")
    assert (headers["webhook-timestamp"], headers["X-PubSub-Attempt"]) == ("1700000000", "3")


def test_a_published_example_of_the_standard_verifies() -> None:
    """The test vector that the standard's own libraries carry."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert webhooks.verify(secret, headers, body, now_s=1614265330).id == "msg_p5jXN8AQM9LWM0D4loKWxJek"


def test_what_was_signed_verifies() -> None:
    found = webhooks.verify(SECRET, request(SECRET), BODY, now_s=NOW_S)
    assert found == webhooks.Webhook("1-0-7", NOW_S, 3)


def test_header_names_may_be_written_in_any_case() -> None:
    headers = {name.upper(): value for name, value in request(SECRET).items()}
    assert webhooks.verify(SECRET, headers, BODY, now_s=NOW_S).attempt == 3


@pytest.mark.parametrize("known", [[SECRET], [OTHER], [OTHER, SECRET]])
def test_while_a_secret_is_replaced_either_one_verifies(known: list[str]) -> None:
    headers = request(OTHER, SECRET)
    assert len(headers["webhook-signature"].split(" ")) == 2
    webhooks.verify(known, headers, BODY, now_s=NOW_S)


@pytest.mark.parametrize("late_s", [-300, 300])
def test_within_the_tolerance_time_does_not_matter(late_s: int) -> None:
    webhooks.verify(SECRET, request(SECRET), BODY, now_s=NOW_S + late_s)


@pytest.mark.parametrize(
    ("headers", "body", "now_s"),
    [
        (request(SECRET), BODY + b" ", NOW_S),
        (request(SECRET), b"", NOW_S),
        (request(OTHER), BODY, NOW_S),
        (request(SECRET) | {"webhook-id": "1-0-8"}, BODY, NOW_S),
        (request(SECRET) | {"webhook-timestamp": str(NOW_S + 1)}, BODY, NOW_S),
        (request(SECRET) | {"webhook-timestamp": "now"}, BODY, NOW_S),
        (request(SECRET) | {"webhook-timestamp": "1e9"}, BODY, NOW_S),
        (request(SECRET) | {"webhook-timestamp": ""}, BODY, NOW_S),
        (request(SECRET) | {"webhook-signature": ""}, BODY, NOW_S),
        (request(SECRET) | {"webhook-signature": "v1,"}, BODY, NOW_S),
        (request(SECRET) | {"webhook-signature": "v1a," + "A" * 44}, BODY, NOW_S),
        (
            request(SECRET) | {"webhook-signature": "v2" + request(SECRET)["webhook-signature"][2:]},
            BODY,
            NOW_S,
        ),
        (request(SECRET) | {"webhook-signature": "v1,\N{SNOWMAN}"}, BODY, NOW_S),
        (request(SECRET), BODY, NOW_S + 301),
        (request(SECRET), BODY, NOW_S - 301),
        ({}, BODY, NOW_S),
        ({"webhook-id": "1-0-7", "webhook-timestamp": str(NOW_S)}, BODY, NOW_S),
    ],
)
def test_what_is_not_signed_so_is_refused(headers: dict[str, str], body: bytes, now_s: int) -> None:
    with pytest.raises(WebhookNotVerified):
        webhooks.verify(SECRET, headers, body, now_s=now_s)


@pytest.mark.parametrize("secret", ["", "whsec_", "secret", "whsec_!!!!", "whsec_QUJD", SECRET[6:]])
def test_what_is_no_secret_is_named_so_and_not_shown(secret: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        webhooks.verify(secret, request(SECRET), BODY, now_s=NOW_S)
    assert len(secret) < 7 or secret not in str(caught.value)


def test_without_secrets_nothing_verifies() -> None:
    with pytest.raises(InvalidArgument):
        webhooks.verify([], request(SECRET), BODY, now_s=NOW_S)


def test_a_secret_is_replaced_with_an_overlap_and_never_more_than_two_count() -> None:
    held = [signing.Secret(text=SECRET, created_at_us=0)]
    held = signing.rotated(held, OTHER, now_us=100, overlap_us=50)
    assert [secret.text for secret in signing.in_force(held, 149)] == [OTHER, SECRET]
    assert [secret.text for secret in signing.in_force(held, 150)] == [OTHER]
    third = signing.new_secret(bytes(32))
    held = signing.rotated(held, third, now_us=120, overlap_us=50)
    assert [secret.text for secret in held] == [third, OTHER]
    assert [secret.text for secret in signing.rotated(held, SECRET, now_us=130, overlap_us=0)] == [SECRET]


def test_a_receiver_needs_no_broker() -> None:
    code = (
        "import sys; from sparrow import webhooks; "
        "heavy = ('sparrow.broker', 'sparrow.store', 'pyarrow', 'aiohttp'); "
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
