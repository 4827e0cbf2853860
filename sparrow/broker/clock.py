"""The one place where the broker reads a clock.

Everything else takes time as an argument, or asks the ``Clock`` it was given. A test passes a clock
of its own and so decides what time it is.
"""

from __future__ import annotations

import time


class Clock:
    """The machine's clocks."""

    def now_us(self) -> int:
        """Wall time in microseconds since 1970, UTC; may jump when the machine's clock is set."""
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment; never goes back. For measuring and for deadlines."""
        return time.monotonic()
