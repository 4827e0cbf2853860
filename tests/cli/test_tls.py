"""A broker with TLS, certificates of clients and tokens, as a process; and commands that reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.certificates import Authority

CALL = [sys.executable, "-c", "from sparrow.cli.main import main\nmain()\n"]
TIMEOUT_S = 60.0


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CALL, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def test_commands_reach_a_broker_that_wants_certificates_and_tokens(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "ours")
    server, client = authority.sign("server"), authority.sign("client")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    settings = {
        "SPARROW_SERVER__TLS_CERTIFICATE": server.certificate,
        "SPARROW_SERVER__TLS_KEY": server.key,
        "SPARROW_SERVER__TLS_CLIENT_CA": authority.certificate,
        "SPARROW_SERVER__TOKENS": "ops:a-secret-of-some-length",
    }
    words = ["up", "--data", str(tmp_path / "data"), "--json", "--http", "0.0.0.0:0", "--tcp", "0.0.0.0:0"]
    process = subprocess.Popen(
        [*CALL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**kept, **settings},
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        assert started["tcp"].startswith("sparrows://0.0.0.0:")
        assert started["http"].startswith("https://0.0.0.0:")
        url = started["tcp"].replace("0.0.0.0", "127.0.0.1")
        trusting = {
            **kept,
            "SPARROW_TLS_CA": authority.certificate,
            "SPARROW_TOKEN": "a-secret-of-some-length",
        }
        known = {**trusting, "SPARROW_TLS_CERTIFICATE": client.certificate, "SPARROW_TLS_KEY": client.key}
        assert run(known, "topic", "create", "t", "--url", url).returncode == 0
        assert run(trusting, "topic", "list", "--url", url).returncode == 5
        assert run({**known, "SPARROW_TOKEN": "other"}, "topic", "list", "--url", url).returncode == 4
        with pytest.raises(httpx.HTTPError):
            httpx.get(started["http"].replace("0.0.0.0", "127.0.0.1") + "/health/live", verify=False)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)


def test_a_certificate_that_is_none_is_a_wrong_argument(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    done = run({**kept, "SPARROW_TLS_CA": str(tmp_path / "none.pem")}, "topic", "list", "--json")
    assert done.returncode == 2
    assert "SPARROW_TLS_CA" in json.loads(done.stderr)["error"]["message"]
