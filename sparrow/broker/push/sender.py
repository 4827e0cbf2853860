"""One webhook over HTTP: sent, answered, judged.

Only 2xx is a success. Redirects are not followed: a 3xx is a refusal like a 4xx. Proxies and credentials
of the environment are not looked at. Of the answer's body the first bytes are kept when it failed, because
they often say why; a long body is not read to its end.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from sparrow.broker.push.guard import Guard, GuardedConnector, Lookup
from sparrow.kernel.push import Answer, judge, parse_retry_after
from sparrow.model.errors import EndpointRefused
from sparrow.model.push import PushPolicy

REASON_BYTES = 512
"""Of the body of a failed answer, what is kept."""
BODY_BYTES_MAX = 65_536
"""Of the body of a good answer, what is read so that the connection can be used again."""
CONNECT_S_MAX = 10.0
KEEPALIVE_S = 4.0
"""Below what common servers wait: a request must not meet a connection that is just being closed."""
USER_AGENT = "Sparrow-Webhooks/1"
ORIGIN = "sparrow"
"""Who asks in the OPTIONS handshake."""

_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class Reply(NamedTuple):
    """What became of one request."""

    answer: Answer
    reason: str = ""
    status: int | None = None
    retry_after_s: float | None = None


class Target(NamedTuple):
    """A policy, made ready for sending."""

    url: URL
    headers: Mapping[str, str]
    timeout: aiohttp.ClientTimeout
    timeout_s: float


def make_target(policy: PushPolicy) -> Target:
    """What is the same for all requests of a subscription."""
    timeout = aiohttp.ClientTimeout(
        total=policy.timeout_s, sock_connect=min(CONNECT_S_MAX, policy.timeout_s), ceil_threshold=1e9
    )
    return Target(URL(policy.url), dict(policy.headers), timeout, policy.timeout_s)


class Sender:
    """The HTTP client that all push subscriptions share."""

    def __init__(self, guard: Guard, look_up: Lookup | None = None) -> None:
        self.guard = guard
        self._session = aiohttp.ClientSession(
            connector=GuardedConnector(guard, look_up, keepalive_s=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": USER_AGENT},
            skip_auto_headers=["Accept", "Accept-Encoding"],
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, target: Target, content: bytes, headers: Mapping[str, str], now_us: int) -> Reply:
        """Posts a webhook; what goes wrong is in the reply."""
        try:
            return await self._post(target, content, headers, now_us)
        except EndpointRefused as error:
            return Reply(Answer.UNREACHABLE, error.message)
        except aiohttp.ClientConnectorError as error:
            return _not_connected(getattr(error, "os_error", None), str(error))
        except aiohttp.ConnectionTimeoutError:
            return Reply(Answer.UNREACHABLE, "no connection in time")
        except aiohttp.InvalidURL as error:
            return Reply(Answer.UNREACHABLE, f"the URL cannot be used: {error}")
        except TimeoutError:
            return Reply(Answer.FAILED, f"no answer within {target.timeout_s:g} s")
        except aiohttp.ServerDisconnectedError:
            return Reply(Answer.FAILED, "the connection was closed without an answer")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError is what some broken answers become.
            return Reply(Answer.FAILED, f"{type(error).__name__}: {error}")

    async def _post(self, target: Target, content: bytes, headers: Mapping[str, str], now_us: int) -> Reply:
        all_headers = CIMultiDict(target.headers)
        all_headers.update(headers)
        async with self._session.post(
            target.url, data=content, headers=all_headers, timeout=target.timeout, allow_redirects=False
        ) as response:
            answer = judge(response.status)
            if answer is Answer.ACCEPTED:
                await _finish(response)
                return Reply(answer, status=response.status)
            retry_after_s = parse_retry_after(response.headers.get("Retry-After"), now_us)
            return Reply(answer, await _reason(response), response.status, retry_after_s)

    async def ask(self, target: Target) -> tuple[bool, str]:
        """The handshake: whether the receiver wants webhooks from here; if not, why that is thought."""
        headers = {"WebHook-Request-Origin": ORIGIN}
        try:
            async with self._session.options(
                target.url, headers=headers, timeout=target.timeout, allow_redirects=False
            ) as response:
                allowed = response.headers.get("WebHook-Allowed-Origin", "")
                if response.status == 200 and allowed.strip() in ("*", ORIGIN):
                    return True, ""
                return False, f"the receiver did not agree to webhooks: {await _reason(response)}"
        except (EndpointRefused, aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            return False, f"the receiver could not be asked: {type(error).__name__}: {error}"


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Reads the rest, if it is short, so that the connection can be used again."""
    content = response.content
    size = 0
    while size <= BODY_BYTES_MAX and not content.at_eof():
        size += len(await content.read(BODY_BYTES_MAX))


async def _reason(response: aiohttp.ClientResponse) -> str:
    """The status and what the body begins with."""
    try:
        start = await response.content.read(REASON_BYTES)
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        start = b""
    text = start.decode("utf-8", "replace").replace("\x00", "").strip()
    status = f"{response.status} {response.reason or ''}".strip()
    return f"{status}: {text}" if text else status


def _not_connected(error: OSError | None, text: str) -> Reply:
    is_own = error is not None and error.errno in _OWN_FAULTS
    return Reply(Answer.FAULT if is_own else Answer.UNREACHABLE, text)
