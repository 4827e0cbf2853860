"""The support bundle of ``sparrow doctor``, when the broker does not answer."""

from __future__ import annotations

import json
import socket
import zipfile
from pathlib import Path

import pytest

from sparrow.cli import bundle
from sparrow.model.errors import InvalidArgument
from sparrow.model.settings import ServerSettings, Settings


def settings() -> Settings:
    """Of a broker at a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Settings(http=f"127.0.0.1:{port}", server=ServerSettings(tokens="ops:geheim-123"))


def test_without_a_broker_the_bundle_says_so_and_holds_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "support.zip"
    said = bundle.write(file, settings(), [{"name": "disk", "level": "ok"}])
    assert "did not answer" in said
    archive = zipfile.ZipFile(file)
    assert json.loads(archive.read("sparrow/doctor.json")) == [{"name": "disk", "level": "ok"}]
    assert json.loads(archive.read("sparrow/local-settings.json"))["server.tokens"] == "***"
    assert "did not answer" in archive.read("sparrow/broker.txt").decode()
    assert file.stat().st_mode & 0o077 == 0, "it is for whoever made it"


def test_a_file_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot write"):
        bundle.write(tmp_path / "no" / "such.zip", settings(), [])
