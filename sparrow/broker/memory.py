"""How a process that is a broker and nothing else has its interpreter work."""

from __future__ import annotations

import gc
import sys

_THRESHOLDS = (10_000, 20, 100)
"""A broker makes many objects that live shortly and in no cycle, beside many that stay. With Python's own
figures (700, 10, 10), 10,000 subscriptions that ask at once spend as long in the collector as at work."""


_SWITCH_S = 0.0005
"""How long a thread that wants the interpreter waits until it is asked for. With Python's own 5 ms, a receipt
waits so long for the journal's thread while the sealer works, three times on its way."""


def settle() -> None:
    """What is there by now stays: the collector need not walk over every module again and again, which would
    stop all connections for tens of milliseconds at a time."""
    sys.setswitchinterval(_SWITCH_S)
    gc.set_threshold(*_THRESHOLDS)
    gc.collect()
    gc.freeze()
