"""A compacted stream's blocks, as they stand in `penstock:result:<id>`.

The hash's field k holds the entries of positions k * 1000 to k * 1000 + 999 as they stood in the stream: their JSON, a
line each, compressed (zlib, RFC 1950).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

#: Entries in a block: what a reader takes in at a time.
BLOCK: Final = 1000
#: Of zlib's nine, where its size hardly falls any more on streams.
LEVEL: Final = 6


def pack(entries: Sequence[bytes]) -> bytes:
    """A block of these entries (JSON; none holds a line break)."""
    return zlib.compress(b"\n".join(entries), LEVEL)


def unpack(number: int, block: bytes) -> list[tuple[int, Any]]:
    """The entries of block `number`, parsed, each with its position. Raises zlib.error or ValueError."""
    return [(number * BLOCK + k, json.loads(line)) for k, line in enumerate(zlib.decompress(block).split(b"\n"))]
