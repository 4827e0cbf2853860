"""A broker that is killed under load keeps every promise. See driver.py for how."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).parent / "driver.py"


def test_killed_brokers_lose_nothing_double_nothing_and_keep_offsets_dense(tmp_path: Path) -> None:
    cycles = int(os.environ.get("SPARROW_CRASH_CYCLES", "200"))
    seed = int(os.environ.get("SPARROW_CRASH_SEED", "0")) or random.randrange(1, 1 << 30)
    command = [sys.executable, str(DRIVER), "--cycles", str(cycles), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--data", str(tmp_path)], capture_output=True, text=True, timeout=60 + 5 * cycles
    )
    repeat = shlex.join([*command, "--data", "/tmp/sparrow-crash"])
    assert done.returncode == 0, f"repeat it with:\n  {repeat}\n{done.stderr[-8000:]}"
    counts = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}
    print(done.stdout.strip(), f"seed={seed}")
    assert counts["cycles"] == cycles
    # The load was real: most lives were checked, and what was to happen under the kills did happen.
    assert counts["learned"] > cycles * 0.7, "too few lives lasted until their check"
    assert counts["messages"] > cycles * 50, "too little was published"
    assert min(counts[name] for name in ("sealed", "dropped", "deleted")) > cycles / 50, counts
