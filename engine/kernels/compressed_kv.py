"""KV caches of 8 bits: their layout in every kernel set.

Each key and each value of a head is rounded by itself when it is written, and widened when it is read. "int8" has
numbers from -127 to 127 and one scale, stored after them as fp32. "fp8" is plain e4m3 without a scale, because its
exponent covers the range of keys and values. Both caches are bytes.
"""

from __future__ import annotations

from typing import Final

#: The bytes of the scale after each key and each value, for "int8".
SCALE_BYTES: Final = 4


def stored_width(head_dim: int, kind: str) -> int:
    """The numbers that a key or value of a head takes, its scale included. `kind`: EngineConfig.kv_cache_dtype."""
    return head_dim + SCALE_BYTES * (kind == "int8")
