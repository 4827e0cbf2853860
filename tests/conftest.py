"""What holds for all tests."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("sparrow", deadline=None)
settings.load_profile("sparrow")

# A JVM starts its workers with what it finds here when it begins, whichever test began it.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)

LONG = ("tests/crash/", "tests/spark/", "tests/test_benchmarks.py", "tests/test_docs.py", "tests/simulation/")
"""What takes longest is begun first: what is begun last keeps one process busy while the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((place for place, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))

    items.sort(key=rank)
