"""What the machine has and what this process uses of it, as the kernel tells. Zero is: not known here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_STATUS = Path("/proc/self/status")
_FILES = Path("/proc/self/fd")
_CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Usage(NamedTuple):
    """What this process uses."""

    memory_bytes: int
    """Of its own: files that are mapped are the kernel's, which takes them back when it needs the space."""
    resident_bytes: int
    open_files: int


class Space(NamedTuple):
    """A disk."""

    free_bytes: int
    total_bytes: int


def usage() -> Usage:
    """What this process uses now."""
    found = {"RssAnon": 0, "VmRSS": 0}
    try:
        for line in _STATUS.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
        files = len(os.listdir(_FILES))
    except (OSError, ValueError):
        files = 0
    return Usage(found["RssAnon"] or found["VmRSS"], found["VmRSS"], files)


def memory_bytes() -> int:
    """What this process may use at most: the memory of its container or of the machine."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        machine = 0
    for path in _CONTAINER:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):
            continue
        return min(limit, machine) if machine else limit
    return machine


def space(path: Path) -> Space:
    """The disk that holds a path."""
    try:
        found = os.statvfs(path)
    except OSError:
        return Space(0, 0)
    return Space(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
