"""Which messages a batch of a query is of, by what its checkpoint says.

Spark writes down the end of a batch before it runs it, in ``offsets/<number>``: a version, some settings, and
the position of each source on a line of its own. A batch begins where the one before it ends; the first one
begins where the run does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparrow.spark.offsets import Offsets

_EARLIEST = -2


class Batches:
    """The batches of one checkpoint."""

    def __init__(
        self, spark: Any, checkpoint: str, starts: Mapping[str, Sequence[tuple[str, int, int]]]
    ) -> None:
        self._spark = spark
        self._checkpoint = checkpoint
        self._starts = {
            name: {(topic, partition): at for topic, partition, at in places}
            for name, places in starts.items()
        }

    def stretches(self, number: int) -> dict[str, list[tuple[str, int, int, int]]]:
        """By subscription: topic, partition, start and end of what is new in a batch."""
        ends = self._read(number)
        starts = self._read(number - 1) if number else self._starts
        found: dict[str, list[tuple[str, int, int, int]]] = {}
        for name, places in ends.items():
            before = starts.get(name, {})
            for (topic, partition), end in places.items():
                start = before.get((topic, partition), _EARLIEST)
                if start < end and end > 0:
                    found.setdefault(name, []).append((topic, partition, start, end))
        return found

    def _read(self, number: int) -> dict[str, dict[tuple[str, int], int]]:
        path = f"{self._checkpoint}/offsets/{number}"
        if "://" in path:
            (text,) = self._spark.sparkContext.wholeTextFiles(path, 1).values().collect()
        else:
            text = Path(path).read_text()
        found: dict[str, dict[tuple[str, int], int]] = {}
        for line in text.splitlines()[2:]:
            if line.startswith("{"):
                offsets = Offsets.from_json(json.loads(line))
                if offsets.subscription is not None:
                    found[offsets.subscription] = dict(offsets.next)
        return found
