"""Sampling: which messages are kept when not all can be.

A message is kept when the hash of its id lies below the share. So the same message gets the same
answer at the same share, on every node and after every restart; and as the share shrinks the kept
sets are nested: what is kept at 10 % was kept at 50 %. The hash is the finaliser of splitmix64, written
here in Arrow's compute functions because messages come by the thousand. It is no part of any format.

``Sampler`` decides the share for a slow subscription that asked for it (features.md E4): all while it
keeps up, less the further it falls behind, never less than its policy allows. Shares go in steps of
1/64, so that a share is in force for a while and not a different one at every look.
"""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from sparrow.kernel.offsets import span
from sparrow.kernel.trend import Level
from sparrow.kernel.watermark import Watermark
from sparrow.model.flow import SamplePolicy
from sparrow.model.message import StreamId

SHARE_STEPS = 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
_WINDOW_US = 5_000_000
_BLOCK = 65_536
"""Offsets hashed at once, so that a long stretch costs time and not memory."""


def numbers_of(first: int, end: int) -> Any:
    """The whole numbers of a stretch, as an Arrow array."""
    return pa.array(array("Q", range(first, end)), pa.uint64())


def mask(numbers: Any, share: float, seed: int = 0) -> Any:
    """Which of these numbers are kept: an Arrow array of truth values."""
    limit = round(min(1.0, max(0.0, share)) * 2**64)
    if limit > _MASK:
        return pa.repeat(pa.scalar(True), len(numbers))
    return pc.less(_mixed(numbers, seed), _word(limit))


def kept(stream: StreamId, first: int, end: int, share: float) -> BitMap64:
    """The offsets from ``first`` to ``end`` (exclusive) of a stream that are kept at this share."""
    if share >= 1.0:
        return span(first, end)
    found = BitMap64()
    seed = _mix(stream.topic_id * _GOLDEN + stream.partition + 1 & _MASK)
    for start in range(first, end if share > 0.0 else first, _BLOCK):
        numbers = numbers_of(start, min(end, start + _BLOCK))
        found |= _to_offsets(numbers.filter(mask(numbers, share, seed)))
    return found


def _to_offsets(numbers: Any) -> BitMap64:
    """A set of the numbers of an array that starts at the head of its buffer."""
    words = array("Q")
    if len(numbers):
        words.frombytes(memoryview(numbers.buffers()[1])[: 8 * len(numbers)])
    return BitMap64(words)


def _mixed(numbers: Any, seed: int) -> Any:
    """splitmix64 of each number; unsigned arithmetic wraps around, as it must."""
    words = pc.add(pc.multiply(numbers, _word(_GOLDEN)), _word(seed))
    words = pc.multiply(_folded(words, 30), _word(_MIX_1))
    words = pc.multiply(_folded(words, 27), _word(_MIX_2))
    return _folded(words, 31)


def _folded(words: Any, bits: int) -> Any:
    return pc.bit_wise_xor(words, pc.shift_right(words, _word(bits)))


def _mix(word: int) -> int:
    """The same for one number."""
    word = (word ^ word >> 30) * _MIX_1 & _MASK
    word = (word ^ word >> 27) * _MIX_2 & _MASK
    return word ^ word >> 31


def _word(value: int) -> Any:
    return pa.scalar(value, pa.uint64())


class Sampler:
    """The share that one slow subscription gets."""

    __slots__ = ("_age", "_policy", "_watermark", "share")

    def __init__(self, policy: SamplePolicy) -> None:
        self._policy = policy
        self._age = Level(_WINDOW_US)
        self._watermark = Watermark(policy.low_s, policy.lag_high_s)
        self.share = 1.0
        """The share to pass to ``kept`` for what is read from now on."""

    def observe(self, oldest_age_us: int, now_us: int) -> float:
        """How old the oldest message is that it has not acked; the share from now on."""
        self._watermark.observe(self._age.observe(oldest_age_us / 1e6, now_us), now_us)
        shed = self._watermark.intensity * (1.0 - self._policy.share_min)
        self.share = max(self._policy.share_min, 1.0 - round(shed * SHARE_STEPS) / SHARE_STEPS)
        return self.share

    def change(self, policy: SamplePolicy) -> None:
        """Another policy from now on."""
        self._policy = policy
        self._watermark.change(policy.low_s, policy.lag_high_s)
