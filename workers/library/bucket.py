"""Pulls models from a bucket: `s3://BUCKET/PREFIX/NAME/VERSION`, a version's folder as the local model folder has it.

The folder has a manifest.json, which was written last and names all files; the version follows from it. So what is here
already is never asked for, also while the bucket is away. A broken download goes on where it was, also in another
process; each file is compared with the manifest's SHA-256. Files that other versions here have are linked.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

from producers.connection.aws import AwsError, AwsNotInstalled
from producers.connection.trouble import Trouble
from producers.store.blobs import bucket as urls
from producers.store.blobs.base import PIECE, BlobNotFound
from producers.store.blobs.s3 import Objects
from workers.errors import Refused
from workers.library.local_models import (
    KEPT,
    MANIFEST,
    MODULE_FILE,
    SHARD,
    LocalModels,
    Pulled,
    manifest_content,
    sha256_of,
)
from workers.library.signatures import SIGNATURES
from workers.progress import Progress, bytes_bar

VERSION: Final = re.compile(r"[0-9a-f]{12}")
#: Most bytes of a manifest, and of its signatures, that are read.
LONGEST: Final = 4 << 20
#: Most bytes of a file: S3 has no larger object.
MOST_BYTES: Final = 50 << 40
#: How often a read is tried again while the bucket does not answer, and the longest pause (s) between two tries; boto3
#: itself tries each request twice.
TRIES: Final = 5
LONGEST_PAUSE_S: Final = 8.0
_GGUF: Final = re.compile(r"[\w][\w.\-]*\.gguf", re.ASCII)


@dataclass(frozen=True, slots=True)
class BucketModel:
    """A version's folder in a bucket. `version`: empty where its path does not say it."""

    bucket: urls.Bucket
    name: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse s3://BUCKET/PREFIX/NAME[/VERSION][?OPTIONS]. Raises Refused."""
        try:
            bucket = urls.read(text)
        except ValueError as error:
            raise Refused(str(error)) from error
        *_, parent, last = ("", "", *bucket.prefix.split("/"))
        if VERSION.fullmatch(last) and parent:
            return cls(bucket, parent, last)
        if not last:
            raise Refused(f"{text!r} names no model; it must be s3://BUCKET/PREFIX/NAME/VERSION")
        return cls(bucket, last, "")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    sha256: str


def pull(
    model: BucketModel, models: LocalModels, name: str, say: Callable[[str], None], *, quiet: bool = False
) -> Pulled:
    """Download a version into the local model folder, unless it is here under this name. `quiet`: show no progress.

    Raises Refused: no such folder, no access, bucket unreachable, disk full, or a damaged file.
    """
    if model.version and (old := _here(models, name, model.version)) is not None:
        return old
    with _refusals(model):
        objects = Objects(model.bucket)
        files = _files(model, _small(objects, model, MANIFEST))
        content = manifest_content({file.name: (file.size, file.sha256) for file in files})
        version = sha256(content).hexdigest()[:12]
        if model.version not in ("", version):
            raise Refused(f"{model.bucket} is damaged: its {MANIFEST} is of version {version}")
        if (old := _here(models, name, version)) is not None:
            return old
        waiting = f"another process is pulling {model.bucket}: waiting for it"
        with models.workplace(name, version, lambda: say(waiting)) as folder:
            if (old := _here(models, name, version)) is not None:
                shutil.rmtree(folder)
                return old
            size = sum(file.size for file in files)
            say(f"pulling {model.bucket}: {len(files)} files, {size / 1e6:,.1f} MB")
            _check_room(model, files, folder)
            signatures = _signatures(objects, model, say)
            with Progress(quiet=quiet) as progress:
                progress.show(lambda: bytes_bar(_fetched(files, folder), size))
                for file in files:
                    _fetch(objects, model, models, file, folder)
            if signatures is not None:
                (folder / SIGNATURES).write_bytes(signatures)
            pulled = models.finish(folder, {file.name: file.sha256 for file in files}, None)
    say(f"{name} {pulled.version} is in {pulled.folder}")
    return pulled


def _here(models: LocalModels, name: str, version: str) -> Pulled | None:
    return next((pulled for pulled in models.all() if (pulled.name, pulled.version) == (name, version)), None)


def _files(model: BucketModel, manifest: bytes) -> list[_File]:
    """The files that a manifest names. Raises Refused for names that no model's files have: they become paths."""
    try:
        entries = json.loads(manifest)["files"]
        files = [_File(str(name), int(entry["size"]), str(entry["sha256"])) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Refused(f"the {MANIFEST} of {model.bucket} cannot be read: {error!r}") from error
    odd = [file.name for file in files if not _is_model_file(file.name) or not 0 <= file.size <= MOST_BYTES]
    if odd or not files:
        raise Refused(f"the {MANIFEST} of {model.bucket} names {odd[:1] or 'no files'}; it is no model's")
    return files


def _is_model_file(name: str) -> bool:
    patterns = KEPT, SHARD, MODULE_FILE, _GGUF
    return name not in (MANIFEST, SIGNATURES) and any(pattern.fullmatch(name) for pattern in patterns)


def _small(objects: Objects, model: BucketModel, name: str) -> bytes:
    data = _read(objects, name, 0, LONGEST + 1)
    if len(data) > LONGEST:
        raise Refused(f"{name} of {model.bucket} has more than {LONGEST} bytes")
    return data


def _signatures(objects: Objects, model: BucketModel, say: Callable[[str], None]) -> bytes | None:
    """The signatures beside the manifest; None where nobody has signed it."""
    try:
        return _small(objects, model, SIGNATURES)
    except BlobNotFound:
        return None
    except AwsError as error:
        if error.code != "AccessDenied":
            raise
        say(f"no {SIGNATURES} is pulled: {error}. Without s3:ListBucket, S3 says so also where there is none")
        return None


def _fetch(objects: Objects, model: BucketModel, models: LocalModels, file: _File, folder: Path) -> None:
    """Download one file, or the rest of it, unless another version has it. Raises Refused if it is damaged."""
    path = folder / file.name
    path.parent.mkdir(exist_ok=True)
    if not path.exists() and models.link(file.sha256, path):
        return
    if not (path.exists() and path.stat().st_nlink > 1):  # a killed run linked it: nothing may be written to it
        with path.open("ab") as partial:
            if partial.tell() > file.size:
                partial.truncate(0)
            at = path.stat().st_size
            while at < file.size:
                data = _read(objects, file.name, at, min(PIECE, file.size - at))
                if not data:
                    break
                partial.write(data)
                at += len(data)
    if sha256_of(path) != file.sha256:
        path.unlink()
        raise Refused(f"{file.name} of {model.bucket} is not what its {MANIFEST} says; it was removed: run this again")


def _read(objects: Objects, name: str, start: int, size: int) -> bytes:
    for attempt in range(TRIES):
        try:
            return objects.read(name, start, size)
        except AwsError as error:
            if error.trouble is not Trouble.AWAY or attempt == TRIES - 1:
                raise
            time.sleep(min(LONGEST_PAUSE_S, 0.5 * 2**attempt))
    raise AssertionError("the last try returns or raises")


def _fetched(files: list[_File], folder: Path) -> int:
    return sum((folder / file.name).stat().st_size for file in files if (folder / file.name).exists())


def _check_room(model: BucketModel, files: list[_File], folder: Path) -> None:
    missing, free = sum(file.size for file in files) - _fetched(files, folder), shutil.disk_usage(folder).free
    if missing > free:
        raise Refused(
            f"{model.bucket} needs {missing / 1e6:,.1f} MB more, and {folder.parent} has {free / 1e6:,.1f} MB free: "
            "make room, or set PENSTOCK_MODELS to a folder on another disk"
        )


@contextmanager
def _refusals(model: BucketModel) -> Iterator[None]:
    """Turns errors of the bucket and the disk into Refused, with what to do about them."""
    try:
        yield
    except AwsNotInstalled as error:
        raise Refused(str(error)) from error
    except BlobNotFound as error:
        raise Refused(
            f"{error}: a version's folder has its {MANIFEST}, which is written last, and all files that it names"
        ) from error
    except AwsError as error:
        later = "; what came so far is kept: run this again later" if error.trouble is Trouble.AWAY else ""
        raise Refused(f"{error}{later}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise Refused("the disk is full; what came so far is kept: make room and run this again") from error
        raise Refused(f"cannot download {model.bucket}: {error}") from error
