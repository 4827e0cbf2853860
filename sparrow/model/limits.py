"""Bounds that hold everywhere, each with its reason.

They are the ceilings of the formats and of good sense. What an operator may tune is in settings.py.
"""

from __future__ import annotations

MESSAGE_BYTES_MAX = 10 * 1024 * 1024
"""One message's data. The same number bounds a request, as in the wire protocol."""

REQUEST_BYTES_MAX = 10 * 1024 * 1024
"""One publish request: data, keys and attributes of all its messages together."""

BATCH_MESSAGES_MAX = 100_000
"""Messages in one stored batch; larger publishes are split."""

BATCH_BYTES_MAX = 8 * 1024 * 1024
"""Bytes aimed at for one stored batch; a larger table is split at this size."""

PARTITIONS_MAX = 1024
"""Partitions of one topic."""

ATTRIBUTES_MAX = 100
"""Attributes that a publisher may give a message."""

ATTRIBUTES_ADDED_MAX = 16
"""Attributes that the broker may add to a message it stores again: a dead letter, a replay."""

ATTRIBUTE_KEY_BYTES_MAX = 256
ATTRIBUTE_VALUE_BYTES_MAX = 1024
"""As Google Pub/Sub allows, so that its clients meet no smaller limit."""

KEY_BYTES_MAX = 1024
"""A message key; also bounds idempotency keys."""

PRIORITY_MIN = -128
PRIORITY_MAX = 127
