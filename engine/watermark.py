"""The keys of watermarks, and what they decide: which key a request gets, and a position's hash. No torch.

    a file of keys ─▶ Watermarks: name -> key ─▶ a sequence's key ─▶ a row's key ─▶ engine.sampling.watermark

The tokens before a position (the context) and the secret decide which tokens are green there, a share gamma of the
vocabulary. That is a function of these alone: so a text goes on with the same words wherever, and however, it is
continued. A row's key is BLAKE2b of the context, keyed with the secret, so that what texts show of their green lists
tells nothing about the secret.
"""

from __future__ import annotations

import re
import struct
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from engine.declared import Integer, Number, Text, WatermarkName, shown
from engine.errors import EngineError, ErrorText, RequestError
from engine.params import REQUIRED, has_keys

#: The largest file of keys (bytes), and the most keys of it.
MAX_FILE: Final = 1 << 20
MAX_KEYS: Final = 1_000
#: The bounds of what a key may set, with its defaults.
GAMMA, DELTA, CONTEXT = 0.25, 2.0, 2
_BOUNDS: Final = {"gamma": Number(0.01, 0.99), "delta": Number(0, 50, above=True), "context": Integer(1, 16)}
_SECRET: Final = Text(1024)
_SHORTEST: Final = 16
#: The number of hashes of 31 bits.
HASHES: Final = 1 << 31
_NAME: Final = WatermarkName()


@dataclass(frozen=True, slots=True)
class WatermarkKey:
    """A key by its name. Its secret stands in no repr."""

    name: str
    secret: bytes = field(repr=False)
    """32 bytes, of the text in the file."""
    gamma: float = GAMMA
    """The share of the vocabulary that is green."""
    delta: float = DELTA
    """What is added to the logits of green tokens."""
    context: int = CONTEXT
    """The number of tokens before a position that decide what is green there; at a text's beginning those there are."""

    @property
    def limit(self) -> int:
        """Hashes of 31 bits below this are green."""
        return int(self.gamma * HASHES)

    def row_key(self, context: Sequence[int]) -> bytes:
        """The 8 bytes that decide what is green after these tokens, of which the last ones count."""
        tokens = context[-self.context :]
        packed = struct.pack(f"<{len(tokens)}q", *tokens)
        return blake2b(packed, digest_size=8, key=self.secret, person=b"penstock-mark").digest()


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The keys that requests may name, and which one they get that name none."""

    keys: dict[str, WatermarkKey]
    default: str | None = None
    optional: bool = False
    """Whether a request may turn the default off."""

    def key_of(self, requested: str | bool | None) -> WatermarkKey | None:
        """The key of a request's `watermark`. Raises RequestError for an unknown name, or where none is no choice."""
        if not requested:
            if requested is False and self.default is not None and not self.optional:
                raise RequestError(ErrorText.of("{watermark}=False: {}", REQUIRED), param="watermark")
            return self.keys[self.default] if requested is None and self.default is not None else None
        if requested not in self.keys:
            raise RequestError(
                ErrorText.of("{watermark}={}: {}", shown(requested), has_keys(self.keys)), param="watermark"
            )
        return self.keys[str(requested)]

    def describe(self) -> dict[str, Any]:
        """The entry in a model's card: names alone."""
        return {"keys": sorted(self.keys), "default": self.default, "optional": self.optional}


def read_watermarks(file: str | Path, default: str | None = None, *, optional: bool = False) -> Watermarks:
    """The keys of a TOML file: a table for each, by its name. Raises EngineError naming what is wrong, never a secret.

    A key has a `secret` (16 to 1,024 characters), and may have `gamma`, `delta` and `context`.
    """
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise EngineError(f"cannot read the watermark keys {file}: {error.strerror or error}") from None
    if len(data) > MAX_FILE:
        raise EngineError(f"the watermark keys {file} have more than {MAX_FILE} bytes")
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError):  # its message may have a part of a secret
        raise EngineError(f"the watermark keys {file} are not TOML") from None
    if not tables:
        raise EngineError(f"the file {file} has no watermark key; `penstock watermark key NAME --keys FILE` makes one")
    if len(tables) > MAX_KEYS:
        raise EngineError(f"the file {file} has {len(tables)} watermark keys; at most {MAX_KEYS} are taken")
    keys = {name: _key(name, table, file) for name, table in tables.items()}
    if default is not None and default not in keys:
        raise EngineError(
            ErrorText.of("{watermark_default}={}: {} has the keys {}", shown(default), file, ", ".join(sorted(keys)))
        )
    return Watermarks(keys, default, optional)


def _key(name: str, table: Any, file: str | Path) -> WatermarkKey:
    """The key of a file's table. Raises EngineError."""
    try:
        if _NAME.check("name", name) is False:
            raise RequestError(f"{name} is what requests say that want no watermark")
        if not isinstance(table, dict):
            raise RequestError("it must be a table: [NAME], with secret = ... below")
        if unknown := sorted(table.keys() - {"secret", *_BOUNDS}):
            raise RequestError(f"it has {shown(unknown[0])}; a key has secret, {', '.join(_BOUNDS)}")
        secret = table.get("secret")
        if not isinstance(secret, str) or not _SHORTEST <= len(secret) <= _SECRET.longest:  # type: ignore[operator]
            raise RequestError(f"its secret must be a text of {_SHORTEST} to {_SECRET.longest} characters")
        values = {field: bound.check(field, table[field]) for field, bound in _BOUNDS.items() if field in table}
    except RequestError as error:
        raise EngineError(f"the watermark key {shown(name)} in {file}: {error}") from None
    return WatermarkKey(name, blake2b(secret.encode(), digest_size=32, person=b"penstock-secret").digest(), **values)


#: A name that a table of TOML may have without quotes.
_BARE: Final = re.compile("[A-Za-z0-9_-]+")


def written(name: str, secret: str) -> str:
    """A new key with the defaults, as its file has it."""
    title = name if _BARE.fullmatch(name) else f'"{name}"'
    return f'[{title}]\nsecret = "{secret}"\ngamma = {GAMMA}\ndelta = {DELTA}\ncontext = {CONTEXT}\n'
