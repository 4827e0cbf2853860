"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Pair(NamedTuple):
    """A certificate and its key, as PEM files."""

    certificate: str
    key: str


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self.certificate = str(root / f"{name}.pem")
        self._key = str(root / f"{name}.key")
        root.mkdir(exist_ok=True)
        _openssl(
            "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}",
            "-keyout", self._key, "-out", self.certificate,
        )  # fmt: skip

    def sign(self, name: str) -> Pair:
        """A certificate for 127.0.0.1 and localhost."""
        made = Pair(str(self._root / f"{name}.pem"), str(self._root / f"{name}.key"))
        request, names = str(self._root / f"{name}.csr"), self._root / f"{name}.ext"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl(
            "req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request,
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key, "-days", "2",
            "-CAcreateserial", "-extfile", str(names), "-out", made.certificate,
        )  # fmt: skip
        return made
