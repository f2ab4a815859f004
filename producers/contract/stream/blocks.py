"""A compacted stream's blocks, the fields of the hash `penstock:result:<id>`.

The hash's field k holds the stream entries of positions k * 1000 to k * 1000 + 999: their JSON, a line each, compressed
(zlib, RFC 1950).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any, Final

#: Entries in a block; readers read one block at a time.
BLOCK: Final = 1000
#: zlib's compression level; higher ones hardly make streams smaller.
LEVEL: Final = 6


def pack(entries: Sequence[bytes]) -> bytes:
    """A block of these entries (JSON; none holds a line break)."""
    return zlib.compress(b"\n".join(entries), LEVEL)


def unpack(number: int, block: bytes) -> list[tuple[int, Any]]:
    """The entries of block `number`, parsed, each with its position. Raises zlib.error or ValueError."""
    return [(number * BLOCK + k, json.loads(line)) for k, line in enumerate(zlib.decompress(block).split(b"\n"))]
