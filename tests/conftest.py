"""What holds for all tests."""

from __future__ import annotations

import os
import sys

from hypothesis import settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("sparrow", deadline=None)
settings.load_profile("sparrow")

# A JVM starts its workers with what it finds here when it begins, whichever test began it.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
