"""All benchmarks, one after the other, and a table of their promises.

    python -m benchmarks [--quick] [--data DIR]

Every file of this folder is a benchmark of its own and runs in a process of its own. Exits with 1 when one of
them breaks a promise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure

SHARED = {"__init__", "__main__", "measure", "remote"}


class Outcome(NamedTuple):
    """How a benchmark ended; one that does not speak JSON has only its exit code."""

    benchmark: str
    exit_code: int
    promises: list[dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that all run, not how fast")
    parser.add_argument("--data", type=Path, default=measure.DATA, help="where to make the data directories")
    chosen = parser.parse_args()
    outcomes = [run(name, chosen.quick, chosen.data.resolve()) for name in names()]
    print_table(outcomes)
    return 1 if any(outcome.exit_code for outcome in outcomes) else 0


def names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in SHARED)


def run(name: str, quick: bool, data: Path) -> Outcome:
    """One benchmark; its text passes through, its JSON is kept."""
    words = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    speaks_json = hasattr(importlib.import_module(f"benchmarks.{name}"), "run")
    print(f"\n== {name}", flush=True)
    if not speaks_json:
        return Outcome(name, subprocess.run(words, cwd=measure.ROOT).returncode, [])
    words += ["--json", "--data", str(data)]
    done = subprocess.run(words, cwd=measure.ROOT, stdout=subprocess.PIPE, text=True)
    promises = json.loads(done.stdout)["promises"] if done.stdout else []
    return Outcome(name, done.returncode, promises)


def print_table(outcomes: list[Outcome]) -> None:
    print(f"\n{'benchmark':<11}{'promise':<46}{'figure':>12}  {'promised':<20}")
    for benchmark, exit_code, promises in outcomes:
        for promise in promises:
            promised = f"{promise['bound']} {promise['limit']:,g} {promise['unit']}"
            verdict = "holds" if promise["holds"] else "BROKEN"
            figure = measure.readable(promise["figure"])
            print(f"{benchmark:<11}{promise['name']:<46}{figure:>12}  {promised:<20}{verdict}")
        if not promises:
            verdict = {0: "holds", 1: "BROKEN"}.get(exit_code, f"failed with {exit_code}")
            print(f"{benchmark:<11}{'see its own text above':<46}{'':>12}  {'':<20}{verdict}")


if __name__ == "__main__":
    sys.exit(main())
