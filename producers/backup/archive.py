"""A backup's place: the files that it has, and the manifest that names them.

    segment-000001 ...   lines (`entries`), some megabytes each
    blob-NAME            the content of a file, a part of a batch's files, or a moved result
    progress             what is done so far, of a backup that has not ended
    manifest             all files with their hashes, and what is in them: written last

`location` is a folder or a bucket's URL, as of files (`producers.store.blobs`).

**Entries.** The lines of a backup: one JSON object each, in files of many (`archive`).

| `kind` | fields beside it |
| --- | --- |
| `task` | `id`, `record`, `stream` (its entries), `result` (the compacted stream), `entry` (its Idempotency-Key's) |
| `batch` | `id`, `batch`, `refused`, `parts`, `begun` |
| `file` | `id`, `fields` |
| `row` | `name`, `fields`, `due` (ms, of its place in an index) of the outbox |
| `usage` | `id`, `fields` of a row of the ledger |
| `key` | `name`, `type`, `value` of any other key |
| `letter` | `value`: a dead letter of the broker |
| `weight` | `tenant`, `weight` |

`at`: the server's time (ms) of the reading; `ttl`: what was left to live then (ms), absent where it had no end. Bytes
that are not UTF-8 are `{"b": base64}`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

from producers.backup import sealed
from producers.backup.sealed import VERSION, Damaged, Stored
from producers.contract.sealing import Keyring
from producers.store.blobs import BlobNotFound, Blobs, open_blobs

#: Kinds, in the order of a backup.
KINDS: Final = ("usage", "task", "batch", "file", "row", "key", "letter", "weight")

Entry = dict[str, Any]


def encode(value: Any) -> Any:
    """A value of the store as JSON may have it."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        # A field's name that is no text would not be JSON; none of ours is.
        return {
            name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name: encode(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> bytes:
    """A value as the store takes it."""
    if isinstance(value, dict):
        return base64.b64decode(value["b"])
    return str(value).encode("utf-8", "surrogateescape")


def pairs(value: Mapping[str, Any]) -> list[bytes]:
    """A hash as arguments of HSET."""
    return [part for name, item in value.items() for part in (decode(name), decode(item))]


def line(entry: Entry) -> bytes:
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def parse(chunks: Iterable[bytes]) -> Iterable[Entry]:
    """The entries of a file's bytes."""
    remainder = b""
    for chunk in chunks:
        *whole, remainder = (remainder + chunk).split(b"\n")
        for text in whole:
            yield json.loads(text)


def commands(name: str, kind: str, value: Any) -> list[tuple[Any, ...]]:
    """The commands that make a key of this type, which is not there.

    Raises ValueError for an unknown type.
    """
    if not value and value != "":
        return []
    match kind:
        case "hash":
            flat = pairs(value)
            return [("HSET", name, *flat[k : k + 1000]) for k in range(0, len(flat), 1000)]
        case "string":
            return [("SET", name, decode(value))]
        case "set":
            return [("SADD", name, *map(decode, value[k : k + 1000])) for k in range(0, len(value), 1000)]
        case "zset":
            flat = [part for member, score in value for part in (repr(score).encode(), decode(member))]
            return [("ZADD", name, *flat[k : k + 1000]) for k in range(0, len(flat), 1000)]
        case "list":
            return [("RPUSH", name, *map(decode, value[k : k + 1000])) for k in range(0, len(value), 1000)]
        case "stream":
            return [("XADD", name, entry, *map(decode, fields)) for entry, fields in value]
    raise ValueError(f"{name} has the type {kind}, which no key of Penstock has")


MANIFEST: Final = "manifest"
PROGRESS: Final = "progress"
#: Bytes of a blob that are in memory at a time.
PIECE: Final = 1 << 20


@dataclass(slots=True)
class Manifest:
    """The contents of a backup, finished or not. Times are server milliseconds.

    `store`, `broker`: where it is from, without passwords. `epoch`: the store's. `run`: who writes it. `counts`: lines
    by kind. `stage`, `cursor`: where an unfinished backup goes on. `ledger`: the last row of the ledger that it has.
    `notes`: what an operator should know.
    """

    id: str
    began: int
    store: str
    broker: str
    version: str
    epoch: str = ""
    run: str = ""
    v: int = VERSION
    ended: int = 0
    stage: int = 0
    cursor: int = 0
    ledger: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    celery: dict[str, int] = field(default_factory=dict)
    """Queue of a model -> plain Celery messages that wait there."""
    notes: list[str] = field(default_factory=list)
    segments: list[Stored] = field(default_factory=list)
    blobs: dict[str, Stored] = field(default_factory=dict)
    """The name of a blob in the system -> its file here."""

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Raises Damaged."""
        try:
            fields = json.loads(raw)
            if fields["v"] != VERSION:
                raise Damaged(f"the backup has the format {fields['v']}; this release reads the format {VERSION}")
            segments = [Stored(**stored) for stored in fields.pop("segments")]
            blobs = {name: Stored(**stored) for name, stored in fields.pop("blobs").items()}
            return cls(**fields, segments=segments, blobs=blobs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged("the manifest cannot be read") from error

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Archive:
    """The files of one backup. `location`: as `open_blobs` takes it, with its errors. All calls block, and may raise
    OSError."""

    def __init__(self, location: str, ring: Keyring) -> None:
        self.location, self._ring = location, ring
        self._blobs = open_blobs(location)

    def read_manifest(self) -> Manifest:
        """Raises Damaged, also where a backup has not ended."""
        if (manifest := self.look(MANIFEST)) is None:
            if self.look(PROGRESS) is not None:
                raise Damaged(f"the backup in {self.location} has not ended: run `penstock backup` again, it goes on")
            raise Damaged(f"there is no backup in {self.location}")
        return manifest

    def look(self, name: str) -> Manifest | None:
        """`manifest` or `progress`; None where it is not there. Raises Damaged."""
        try:
            self._blobs.size(name)
        except (BlobNotFound, NotADirectoryError):
            return None
        return Manifest.parse(b"".join(sealed.read(self._blobs, name, self._ring)))

    def save(self, name: str, manifest: Manifest) -> None:
        sealed.write(self._blobs, name, [manifest.to_json()], self._ring)

    def forget_progress(self) -> None:
        self._blobs.delete(PROGRESS)

    def put(self, name: str, chunks: Iterable[bytes]) -> Stored:
        return sealed.write(self._blobs, name, chunks, self._ring)

    def copy_in(self, source: Blobs, name: str) -> Stored:
        """Copy a blob of the system. Raises BlobNotFound where it is gone."""
        return self.put(_file_of(name), _pieces(source, name))

    def copy_out(self, stored: Stored, target: Blobs, name: str) -> None:
        """Copy a blob into a system, whole or not at all. Raises Damaged."""
        with target.writer(name) as writer:
            for piece in sealed.read(self._blobs, stored.name, self._ring, stored):
                writer.write(piece)
            writer.commit()

    def entries(self, segment: Stored) -> Iterator[Entry]:
        """The entries of a segment. Raises Damaged."""
        yield from parse(sealed.read(self._blobs, segment.name, self._ring, segment))

    def check(self, stored: Stored) -> int:
        """Read a file to its end. Returns its bytes as they were. Raises Damaged."""
        return sum(map(len, sealed.read(self._blobs, stored.name, self._ring, stored)))


def check(archive: Archive) -> Manifest:
    """Read all of a backup: hashes, format, counts. Blocks. Raises Damaged and OSError."""
    manifest, counts = archive.read_manifest(), dict[str, int]()
    for segment in manifest.segments:
        for entry in archive.entries(segment):
            counts[entry["kind"]] = counts.get(entry["kind"], 0) + 1
    if counts != manifest.counts:
        differs = ", ".join(
            f"{counts.get(kind, 0)} of {manifest.counts.get(kind, 0)} {kind}"
            for kind in sorted(counts.keys() | manifest.counts.keys())
            if counts.get(kind, 0) != manifest.counts.get(kind, 0)
        )
        raise Damaged(f"the backup does not have what its manifest counts: {differs}")
    for stored in manifest.blobs.values():
        archive.check(stored)
    return manifest


def _pieces(source: Blobs, name: str) -> Iterator[bytes]:
    size, at = source.size(name), 0
    while at < size:
        piece = source.read(name, at, PIECE)
        if not piece:
            raise OSError(f"the blob {name} has {size} bytes, and ends after {at}")
        at += len(piece)
        yield piece


def _file_of(name: str) -> str:
    """A blob's file here. Names of files are bounded."""
    return f"blob-{name}" if len(name) < 100 else f"blob-{hashlib.sha256(name.encode()).hexdigest()}"


def describe(manifest: Manifest) -> dict[str, Any]:
    """A backup's summary, for operators."""
    return {
        "id": manifest.id,
        "began": manifest.began,
        "ended": manifest.ended,
        "from": manifest.store,
        "version": manifest.version,
        "segments": len(manifest.segments),
        "bytes": sum(stored.size for stored in (*manifest.segments, *manifest.blobs.values())),
        "blobs": len(manifest.blobs),
        "counts": manifest.counts,
        "celery": manifest.celery,
        "notes": manifest.notes,
    }
