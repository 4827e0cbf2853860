"""Secrets are told once, to whoever made them: never in a log, in a listing or in the settings as shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import sparrow
from sparrow.client.options import Options
from sparrow.model.errors import PermissionDenied, SparrowError

BOOTSTRAP = "b00tstrap-s3cret-that-nobody-may-see"
CALL = [sys.executable, "-c", "from sparrow.cli.main import main\nmain()\n"]
TIMEOUT_S = 60.0
PATHS = (
    "/health/ready",
    "/nowhere",
    "/metrics",
    "/v1/topics",
    "/v1/subscriptions",
    "/v1/subscriptions/hook",
    "/api/v1/topics",
    "/api/v1/config",
    "/api/v1/support-bundle",
)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPARROW_")}
    reachable = {"SPARROW_PUSH__ALLOW_NETWORKS": "127.0.0.0/8", "SPARROW_PUSH__PORTS": "9"}
    return {**kept, **reachable, "SPARROW_SERVER__TOKENS": f"ops:{BOOTSTRAP}"}


def shown(*words: str) -> str:
    done = subprocess.run(
        [*CALL, *words], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(), check=True
    )
    return done.stdout + done.stderr


def test_the_settings_are_shown_without_their_secrets() -> None:
    for words in (("config", "show"), ("config", "show", "--json")):
        told = shown(*words)
        assert "***" in told
        assert BOOTSTRAP not in told


def test_a_wrong_secret_setting_is_not_repeated() -> None:
    done = subprocess.run(
        [*CALL, "config", "show"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**environment(), "SPARROW_SERVER__TOKENS": BOOTSTRAP},
    )
    assert done.returncode == 2
    assert BOOTSTRAP not in done.stdout + done.stderr


def test_nothing_that_a_broker_logs_or_answers_holds_a_secret(tmp_path: Path) -> None:
    words = ["up", "--data", str(tmp_path / "data"), "--json", "--log-level", "debug"]
    words += ["--http", "127.0.0.1:0", "--tcp", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*CALL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        secrets, answers = _use(started)
        process.terminate()
        out, logged = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert "token-created" in logged
    assert "client-refused" in logged
    audited = (tmp_path / "data" / "audit.log").read_text()
    for secret in secrets:
        assert len(secret) > 20
        for told in (logged, out, json.dumps(started), audited, *answers):
            assert secret not in told


def _use(started: dict[str, str]) -> tuple[list[str], list[str]]:
    """Works with secrets on every listener; the secrets, and what was answered."""
    answers: list[str] = []
    with sparrow.connect(started["tcp"], token=BOOTSTRAP) as broker:
        made = broker.create_token("shop", scopes=["publish:orders"])
        secrets = [BOOTSTRAP, made.text]
        answers += [repr(broker.tokens()), repr(broker.audit_log()), repr(broker), repr(made)]
        hook = broker.subscribe("hook", "orders", push={"url": "http://127.0.0.1:9/nobody-listens"})
        secrets += [*hook.push_secrets(), hook.rotate_secret()]
        answers += [repr(hook.push_state()), repr(hook.policy), repr(broker.subscriptions()), repr(hook)]
        with pytest.raises(SparrowError) as refused:
            broker.revoke_token(made.text)
        answers += [str(refused.value), str(refused.value.to_dict())]
    with sparrow.connect(started["tcp"], token=made.text) as shop:
        shop.publish_batch("orders", [b"x"] * 10)
        with pytest.raises(PermissionDenied) as denied:
            shop.publish("other", b"x")
        answers += [str(denied.value), repr(shop)]
    almost = made.text[:-1] + "x"
    secrets.append(almost)
    with pytest.raises(SparrowError) as unknown, sparrow.connect(started["tcp"], token=almost):
        pass
    answers.append(str(unknown.value))
    for token in (BOOTSTRAP, made.text, almost):
        for path in PATHS:
            headers = {"Authorization": f"Bearer {token}"}
            answer = httpx.get(started["http"] + path, headers=headers)
            answers.append(answer.text + str(answer.headers))
    return secrets, answers


def test_options_of_a_client_are_shown_without_the_token() -> None:
    assert BOOTSTRAP not in repr(Options(token=BOOTSTRAP))
    assert "token=''" in repr(Options())
