"""The support bundle as ``sparrow doctor --bundle`` writes it: what doctor found, and what the broker tells.

The broker is asked over HTTP, at the address of the settings. When it does not answer the file says so and
holds the rest, since that is when somebody needs it most.
"""

from __future__ import annotations

import io
import os
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow.cli.target import TOKEN_VARIABLE
from sparrow.model.errors import InvalidArgument

if TYPE_CHECKING:
    from sparrow.model.settings import Settings

TIMEOUT_S = 30.0


def write(file: Path, settings: Settings, findings: list[dict[str, Any]]) -> str:
    """Writes the zip; what the broker said, in a few words."""
    import msgspec

    from sparrow.model.settings import masked

    own = {"doctor.json": findings, "local-settings.json": masked(settings)}
    told, said = _ask(settings)
    texts = {name: msgspec.json.format(msgspec.json.encode(part), indent=2) for name, part in own.items()}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {**told, **{f"sparrow/{name}": text for name, text in texts.items()}}.items():
            archive.writestr(name, text)
        archive.writestr("sparrow/broker.txt", said + "\n")
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(target.getvalue())
    except OSError as error:
        raise InvalidArgument(f"cannot write {file}: {error.strerror}") from error
    return said


def _ask(settings: Settings) -> tuple[dict[str, bytes], str]:
    """The parts of the broker's own bundle."""
    scheme = "https" if settings.server.tls_certificate else "http"
    url = f"{scheme}://{settings.http}/api/v1/admin/support-bundle"
    request = urllib.request.Request(url)
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            archive = zipfile.ZipFile(io.BytesIO(answer.read()))
            return {name: archive.read(name) for name in archive.namelist()}, f"{url} answered"
    except urllib.error.HTTPError as error:
        return {}, f"{url} answered {error.code}; is {TOKEN_VARIABLE} set to a token of an administrator?"
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        return {}, f"{url} did not answer: {error}"
