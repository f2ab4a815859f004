"""Stream entries: stored in `penstock:stream:<id>` and sent over `penstock:tokens:<id>`.

An entry is JSON, in the stream's field `e`; its position is its entry id less one (`1-0` is position 0).

- token: `[choice, index, token id, "text"]`, then optionally the logprobs `[logprob, [[token id, logprob], ...]]` or
  null, then on a choice's last token its finish reason. The text may be empty: part of a character is held back.
- prompt: `{"prompt": first index, "token_ids": [...], "logprobs": [...]}`, before the first token, in pieces of at most
  512 tokens. `logprobs` has an element as above for each token, null for the prompt's first.
- terminal: `{"end": status, "reasons": [...], "usage": {...}, "error": null | {...}}`; nothing follows it.
- any other object is of a kind that a later version adds; readers skip it.

A channel message is `[position of the first entry, entry, ...]`.

A compacted stream is the hash `penstock:result:<id>` of blocks: its field k holds the entries of positions k * 1000 to
k * 1000 + 999, a line each, compressed (zlib, RFC 1950).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Final

#: Encodes a string as JSON with the fewest escapes.
quote: Final = encode_basestring

#: Most tokens of a prompt in one entry.
PROMPT_PIECE: Final = 512
#: Entries in a block of a compacted stream; readers read one block at a time.
BLOCK: Final = 1000
#: Made once: `json.dumps` makes one for each call that is given separators.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
#: zlib's compression level; higher ones hardly make streams smaller.
LEVEL: Final = 6

#: A token's logprob, then the alternatives: (logprob, ((token id, logprob), ...)).
Logprobs = tuple[float, tuple[tuple[int, float], ...]]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one choice."""

    position: int
    choice: int
    index: int
    token_id: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The terminal entry."""

    position: int
    status: str
    reasons: tuple[str | None, ...]
    usage: dict[str, int]
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Log probabilities of a part of the prompt, one a token given those before it; None for the first token."""

    position: int
    first: int
    """Index in the prompt of the part's first token."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]


Event = Token | Prompt | End


def encode_token(
    choice: int,
    index: int,
    token_id: int,
    text: str,
    logprobs: Logprobs | None = None,
    finish_reason: str | None = None,
) -> str:
    """A token's entry as JSON. Built by hand, five times faster than `json.dumps`, since it runs once a token."""
    head = f"[{choice},{index},{token_id},{quote(text)}"
    if logprobs is None and finish_reason is None:
        return head + "]"
    shown = "null" if logprobs is None else _ENCODER.encode(logprobs)
    return f"{head},{shown}]" if finish_reason is None else f'{head},{shown},"{finish_reason}"]'


def encode_prompt(token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]) -> list[str]:
    """The entries of a prompt's log probabilities, in pieces of PROMPT_PIECE tokens."""
    return [
        _ENCODER.encode(
            {
                "prompt": first,
                "token_ids": list(token_ids[first : first + PROMPT_PIECE]),
                "logprobs": logprobs[first : first + PROMPT_PIECE],
            }
        )
        for first in range(0, len(token_ids), PROMPT_PIECE)
    ]


def decode(position: int, entry: Any) -> Event | None:
    """An entry (parsed JSON) as an event; None for a kind that this version does not know."""
    if isinstance(entry, list):
        logprobs = entry[4] if len(entry) > 4 else None
        return Token(
            position, entry[0], entry[1], entry[2], entry[3], _logprobs(logprobs), entry[5] if len(entry) > 5 else None
        )
    if "end" in entry:
        return End(position, entry["end"], tuple(entry["reasons"]), entry["usage"], entry["error"])
    if "prompt" in entry:
        return Prompt(
            position, entry["prompt"], tuple(entry["token_ids"]), tuple(_logprobs(one) for one in entry["logprobs"])
        )
    return None


def _logprobs(found: Any) -> Logprobs | None:
    return (found[0], tuple((t, p) for t, p in found[1])) if found else None


def decode_message(payload: str | bytes) -> list[tuple[int, Any]]:
    """A channel message as (position, entry) pairs."""
    first, *entries = json.loads(payload)
    return [(first + k, entry) for k, entry in enumerate(entries)]


def stream_position(entry_id: str | bytes) -> int:
    """The position of a stream entry, by its id."""
    name = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    return int(name.partition("-")[0]) - 1


def pack(entries: Sequence[bytes]) -> bytes:
    """A block of these entries (JSON; none holds a line break)."""
    return zlib.compress(b"\n".join(entries), LEVEL)


def unpack(number: int, block: bytes, start: int = 0, most: int | None = None, each: int = 0) -> list[tuple[int, Any]]:
    """The entries of block `number`, parsed, each with its position, from position `start` on. `most`: no further entry
    is parsed once they have so many bytes, of which each counts `each` more. Raises zlib.error or ValueError."""
    lines = zlib.decompress(block).split(b"\n")[max(0, start - number * BLOCK) :]
    if most is not None:
        size = taken = 0
        while taken < len(lines) and size < most:
            size += len(lines[taken]) + each
            taken += 1
        del lines[taken:]
    first = max(start, number * BLOCK)
    # One call for all costs a third of one for each.
    return list(zip(range(first, first + len(lines)), json.loads(b"[%b]" % b",".join(lines)), strict=True))
