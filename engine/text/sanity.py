"""Refuses harmful tokenizer.json files. They are untrusted, and native code reads them.

The library itself finds many faults, with an error or a panic. This module finds valid but harmful settings: parts
that make a short text long, and sizes that the library would allocate unchecked.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, Final

from engine.errors import ModelError

#: The factor by which replacing may lengthen a text. Well-known models have 3 at most.
MOST_GROWTH: Final = 64
#: The most characters put before a text, and the most special tokens put around it.
MOST_AROUND: Final = 64
_PARTS: Final = ("normalizers", "pretokenizers", "decoders", "processors")


def check(tokenizer: Mapping[str, Any]) -> None:
    """Check the parsed file. Raises ModelError naming the harmful part. Malformed parts are left to the library."""
    for name in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        growth, around = 1.0, 0
        for part in flat(tokenizer.get(name)):
            match part.get("type"):
                case "Replace":
                    growth *= _growth(part)
                case "Prepend":
                    around += _length(part.get("prepend"))
                case "Precompiled":
                    _charsmap(part.get("precompiled_charsmap"))
                case "TemplateProcessing":
                    special, texts = _around(part)
                    around += special
                    growth *= max(1, texts)
            if around > MOST_AROUND:
                raise ModelError(
                    f"tokenizer.json has a {name} that puts {around} pieces around a text; at most {MOST_AROUND}"
                )
            if growth > MOST_GROWTH:
                raise ModelError(f"tokenizer.json has a {name} that makes a text over {MOST_GROWTH} times longer")


def flat(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a part and all parts inside it, in order."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            for name in _PARTS:
                inner = part.get(name)
                if isinstance(inner, list):
                    waiting += reversed(inner)


def _growth(part: Mapping[str, Any]) -> float:
    content, pattern = part.get("content"), part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression may match at every character and between any two.
    shortest = len(text) if isinstance(text, str) and text else 0.5
    return max(1.0, len(content) / shortest) if isinstance(content, str) else 1.0


def _length(what: Any) -> int:
    return len(what) if isinstance(what, (str, list)) else 0


def _around(template: Mapping[str, Any]) -> tuple[int, int]:
    """The most token ids that a template adds, and the most copies of its texts, for one text or a pair.

    A special token may be many ids, and may occur many times.
    """
    tokens = template.get("special_tokens")
    listed = tokens if isinstance(tokens, dict) else {}
    special = texts = 0
    for pieces in (template.get("single"), template.get("pair")):
        named = [_special(piece) for piece in pieces] if isinstance(pieces, list) else []
        special = max(special, sum(_ids(listed.get(name)) for name in named if name is not None))
        texts = max(texts, named.count(None))
    return special, texts


def _special(piece: Any) -> str | None:
    """The special token of a template's piece. None for a piece of text."""
    token = piece.get("SpecialToken") if isinstance(piece, dict) else None
    return str(token.get("id")) if isinstance(token, dict) else None


def _ids(token: Any) -> int:
    return _length(token.get("ids")) if isinstance(token, dict) else 0


def _charsmap(text: Any) -> None:
    """Check SentencePiece's table: the trie's size (4 bytes, little-endian), the trie in units of 4 bytes, strings.

    The library allocates as much as the size says.
    """
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        data = b""
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 4:
        raise ModelError("tokenizer.json has a precompiled_charsmap that is truncated or none at all")
