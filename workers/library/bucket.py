"""Models in a bucket: `s3://BUCKET/PREFIX/NAME/VERSION`, a version's folder as the local model folder has it.

    publish   files that are not there yet, then manifest.sig, then manifest.json: only then the version is there
    pull      manifest.json, then the files that are not here yet
    check     reads all files in the bucket;  remove: manifest.json first;  stored: lists;  abandoned: broken publishes

The version follows from the manifest, which names all files. So what is here already is never asked for, also while
the bucket is away. Broken downloads and publishes go on where they were, also in another process; each file is compared
with the manifest's SHA-256, which S3 keeps beside its content. No file is sent or downloaded twice: S3 copies what
another version in the bucket has, and what another version here has is linked. A version's folder in the bucket needs
no other: copies take room there, but a version can go without a look at all others.

What stands when a process dies in between, or another works beside it: docs/how/deaths.md.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from producers.connection.aws import AwsError, AwsNotInstalled
from producers.connection.trouble import Trouble
from producers.store.blobs import bucket as urls
from producers.store.blobs.base import MIN_PART, PIECE, BlobNotFound
from producers.store.blobs.s3 import Content, Objects, S3Writer
from workers.errors import Refused
from workers.library.download import disk_errors, download
from workers.library.local_models import (
    KEPT,
    MANIFEST,
    MODULE_FILE,
    SHARD,
    LocalModels,
    Pulled,
    hashed,
    manifest_content,
    manifest_of,
    sha256_of,
    verify,
)
from workers.library.signatures import SIGNATURES, check_signature, signatures_in, signatures_of
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
#: Files that are sent, or read and hashed, at a time. Each that is sent holds two parts in memory
#: (`producers.store.blobs.s3`).
AT_ONCE: Final = 4
#: Age (s) of a version without a manifest from which on nobody is taken to be publishing it.
ABANDONED_S: Final = 24 * 3600.0
#: A GGUF file has the name that its user gave it, of printable characters.
_GGUF: Final = re.compile(r"[^./\\][^/\\]*\.gguf")
#: Versions in the bucket, the newest, that are searched for files which need not be sent.
MOST_SOURCES: Final = 200
#: Bytes of these versions' manifests after which the search ends.
MOST_READ: Final = 64 << 20
#: A key in a version's folder, of which a URL can be written.
_KEY: Final = re.compile(
    r"(?P<folder>(?:[A-Za-z0-9!_.*'()/-]*?/)?(?P<name>[A-Za-z0-9][\w.-]*)/(?P<version>[0-9a-f]{12}))/(?P<file>.+)",
    re.ASCII,
)
#: The SHA-256 of a file, in what S3 keeps beside it.
_SHA256: Final = "sha256"

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Stored:
    """A version in a bucket. `size`: in bytes; `at`: when the last file was written (unix s); `whole`: whether
    its manifest is there."""

    model: BucketModel
    files: int
    size: int
    at: float
    whole: bool


class _Steady(Objects):
    """Tries each request again while the bucket does not answer."""

    def request(self, call: str, permission: str, name: str, **more: Any) -> dict[str, Any]:
        return _again(partial(super().request, call, permission, name, **more))

    def unfinished(self, name: str) -> tuple[str, dict[int, dict[str, Any]]]:
        return _again(partial(super().unfinished, name))


def publish(folder: Path, name: str, place: urls.Bucket, say: Callable[[str], None], *, quiet: bool = False) -> Stored:
    """Write a model of this machine into `place`/`name`/VERSION, its manifest last. What is there already with the same
    size and SHA-256 is not sent again, so a broken publish goes on; what another version under `place` has is copied.
    `quiet`: show no progress.

    Raises Refused: no model, damaged files, no access, or bucket unreachable.
    """
    folder, files = _own_files(folder)
    content = manifest_content({file.name: (file.size, file.sha256) for file in files})
    version = sha256(content).hexdigest()[:12]
    url = replace(place, prefix="/".join(filter(None, (place.prefix, name, version)))).url
    model = BucketModel.parse(url)
    with _refusals(model, "publish to"):
        objects, other = _Steady(model.bucket), _Steady(place)
        there = _sizes(objects)
        missing = [file for file in files if there.get(file.name) != file.size or not _is_same(objects, file)]
        sources = _sources(other, [file for file in missing if file.size >= MIN_PART], say)
        sent = _Publish(objects, other, sources, folder)
        try:
            _send_all(sent, missing, quiet)
        finally:
            for error in sent.unlisted[:1]:
                say(f"a publish that breaks off sends large files from their beginning: {error}")
        _check_all_there(objects, files)
        _merge_signatures(objects, model, folder)
        if MANIFEST not in there or _small(objects, model, MANIFEST) != content:
            _put(objects, MANIFEST, content)
            _check_all_there(objects, files)  # `remove` may have run beside this
    say(f"{len(files)} files: {sent.summary(len(files) - len(missing))}")
    return Stored(model, len(files), sum(file.size for file in files), time.time(), whole=True)


def _own_files(folder: Path) -> tuple[Path, list[_File]]:
    """The folder of a model's files, and those of its manifest, or those that serving needs. Raises Refused."""
    if (folder / MANIFEST).is_file():
        verify(folder)
        digests = manifest_of(folder)
    else:
        folder, digests = hashed(folder)
    files = [_File(name, (folder / name).stat().st_size, digest) for name, digest in digests.items()]
    content = manifest_content({file.name: (file.size, file.sha256) for file in files})
    odd = next((file.name for file in files if not _is_model_file(file.name)), None)
    if odd is None and (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() != content:
        odd = MANIFEST
    if odd is not None and odd.endswith(".gguf"):
        raise Refused(
            f"{folder / odd} cannot be published under this name: rename it, without / and \\, control characters or a "
            "dot at its beginning"
        )
    if odd is not None:
        raise Refused(
            f"{folder / odd} is nothing that workers pull: `penstock models pull {folder} --name NAME` makes a version "
            "without it; sign and publish that"
        )
    return folder, files


def _sizes(objects: Objects) -> dict[str, int]:
    """Size by name of what a version's folder has."""
    return _again(lambda: {entry.name: entry.size for entry in objects.listed("")})


def _check_all_there(objects: Objects, files: list[_File]) -> None:
    sizes = _sizes(objects)
    if gone := [file.name for file in files if sizes.get(file.name) != file.size]:
        raise Refused(f"{gone[0]} has gone from {objects.bucket} meanwhile: run this again")


def _is_same(objects: Objects, file: _File, encryption: str = "") -> bool:
    """Whether S3 keeps the file's SHA-256 beside what it has, and, unless that is empty, encrypts it so."""
    with suppress(BlobNotFound):
        head = _head(objects, file.name, file)
        return head is not None and encryption in ("", head.get("ServerSideEncryption", ""))
    return False


def _head(objects: Objects, name: str, file: _File) -> dict[str, Any] | None:
    """What S3 says of an object beside which it keeps this file's SHA-256; None of another. Raises BlobNotFound."""
    answer = objects.request("head_object", "s3:GetObject", name)
    same = answer["ContentLength"] == file.size and answer.get("Metadata", {}).get(_SHA256) == file.sha256
    return answer if same else None


def _sources(place: Objects, files: list[_File], say: Callable[[str], None]) -> dict[str, str]:
    """SHA-256 -> object of these files that whole versions under a place have, by their manifests."""
    missing, sources, read = {file.sha256 for file in files}, dict[str, str](), 0
    if not missing:
        return sources
    try:
        versions = [version for version in _again(lambda: _versions(place)).values() if version.whole]
        for version in sorted(versions, key=lambda version: version.at, reverse=True)[:MOST_SOURCES]:
            folder = version.model.bucket.prefix.removeprefix(place.bucket.prefix).removeprefix("/")
            with suppress(BlobNotFound, Refused):  # it went meanwhile, or is damaged
                manifest = _small(place, version.model, f"{folder}/{MANIFEST}")
                read += len(manifest)
                for file in _files(version.model, manifest):
                    if file.sha256 in missing:
                        sources[file.sha256] = f"{folder}/{file.name}"
            if sources.keys() == missing or read > MOST_READ:
                break
    except AwsError as error:
        if error.trouble is not Trouble.DENIED:
            raise
        say(f"files of other versions are sent again: {error}")
    return sources


@dataclass(frozen=True, slots=True)
class _Publish:
    """One publish: into the version's folder, from a folder here and, by SHA-256, from objects under the place."""

    objects: Objects
    place: Objects
    sources: dict[str, str]
    folder: Path
    stopped: threading.Event = field(default_factory=threading.Event)
    done: dict[str, int] = field(default_factory=dict)
    """Bytes by file."""
    copied: list[str] = field(default_factory=list)
    unlisted: list[AwsError] = field(default_factory=list)
    """Why uploads that broke off cannot be gone on with."""

    def summary(self, there: int) -> str:
        """How many files came from where. `there`: how many were there before."""
        counts = {"sent": len(self.done) - len(self.copied), "copied in the bucket": len(self.copied)}
        counts["there before"] = there
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)

    def bring(self, file: _File) -> None:
        """Copy a file from another version, or send it; all others stop where it fails. Raises Refused where somebody
        else keeps writing it."""
        try:
            self._bring(file)
        except BaseException:
            self.stopped.set()
            raise

    def _bring(self, file: _File) -> None:
        if self._copy(file):
            self.done[file.name] = file.size
            self.copied.append(file.name)
            return
        for resume in (True, False):
            resumed = False
            try:
                resumed = self._send(file, resume)
            except AwsError as error:
                # Another process has ended the upload, or sent a part again; the answer to its end was lost; or it was
                # begun by another program, for other checksums.
                if error.code not in ("NoSuchUpload", "InvalidPart", *(["InvalidRequest"] if resume else [])):
                    raise
            # An upload is encrypted as whoever began it said.
            if self.stopped.is_set() or _is_same(self.objects, file, self.objects.bucket.sse if resumed else ""):
                return
        raise Refused(f"{file.name} in {self.objects.bucket} is written by somebody else, too: run this again later")

    def _copy(self, file: _File) -> bool:
        """Let S3 copy a file. False where no version has it, has it any longer, or may be read."""
        if (source := self.sources.get(file.sha256)) is None:
            return False
        with suppress(BlobNotFound, AwsError, InterruptedError):
            if (head := _head(self.place, source, file)) is None:
                return False
            with S3Writer(self.objects, file.name, {_SHA256: file.sha256}) as writer:
                writer.append(source, self.place, Content(etag=head["ETag"]), self.stopped.is_set)
                writer.commit()
            return True
        return False

    def _send(self, file: _File, resume: bool) -> bool:
        """Returns whether it went on with an upload."""
        digest, path, metadata = sha256(), self.folder / file.name, {_SHA256: file.sha256}
        sending = S3Writer(self.objects, file.name, metadata, resume=resume)
        try:
            with sending as writer, path.open("rb") as opened:
                while piece := opened.read(PIECE):
                    if self.stopped.is_set():
                        return writer.resumed
                    digest.update(piece)
                    writer.write(piece)
                    self.done[file.name] = writer.size
                if digest.hexdigest() != file.sha256:
                    raise Refused(f"{path} changed while it was sent, or a disk fails; run this again")
                writer.commit()
                return writer.resumed
        finally:
            if sending.unlisted is not None:
                self.unlisted.append(sending.unlisted)


def _send_all(publish: _Publish, files: list[_File], quiet: bool) -> None:
    """Bring files into the version's folder, several at a time."""
    total = sum(file.size for file in files)
    largest_first = sorted(files, key=lambda file: file.size, reverse=True)
    with Progress(quiet=quiet) as progress, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="publish") as pool:
        progress.show(lambda: bytes_bar(sum(list(publish.done.values())), total))
        try:
            for _ in pool.map(publish.bring, largest_first):
                pass
        except BaseException:
            publish.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _merge_signatures(objects: Objects, model: BucketModel, folder: Path) -> None:
    """Write the folder's signatures, beside those of other keys that are there."""
    if not (own := signatures_in(folder)):
        return
    theirs: dict[str, str] = {}
    with suppress(BlobNotFound, ValueError):
        theirs = signatures_of(_small(objects, model, SIGNATURES))
    if (both := {**theirs, **own}) != theirs:
        _put(objects, SIGNATURES, (json.dumps({"v": 1, "signatures": both}, indent=1) + "\n").encode())


def _put(objects: Objects, name: str, content: bytes) -> None:
    with S3Writer(objects, name) as writer:
        writer.write(content)
        writer.commit()


def stored(place: urls.Bucket) -> list[Stored]:
    """The versions under a place, by name and time. Raises Refused."""
    with _refusals(BucketModel(place, "", ""), "list"):
        objects = _Steady(place)
        versions = _again(lambda: _versions(objects))
    return sorted(versions.values(), key=lambda version: (version.model.name, version.at))


def _versions(objects: Objects) -> dict[str, Stored]:
    place, versions = objects.bucket, dict[str, Stored]()
    for entry in objects.listed(""):
        if (key := _KEY.fullmatch(place.key(entry.name))) is None:
            continue
        old = versions.get(key["folder"])
        if old is None:
            model = BucketModel(replace(place, prefix=key["folder"]), key["name"], key["version"])
            old = Stored(model, 0, 0, 0.0, whole=False)
        whole, more = old.whole or key["file"] == MANIFEST, key["file"] not in (MANIFEST, SIGNATURES)
        versions[key["folder"]] = Stored(
            old.model, old.files + more, old.size + entry.size * more, max(old.at, entry.at), whole
        )
    return versions


def check(model: BucketModel, key_files: Sequence[Path] = ()) -> Stored:
    """Read all files of a version in its bucket, and compare them with its manifest, and that with the version; with
    `key_files` also its signature (`check_signature`). Raises Refused, which names the file."""
    with _refusals(model, "read"), tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        objects = Objects(model.bucket)
        manifest = _small(objects, model, MANIFEST)
        files = _files(model, manifest)
        version = sha256(manifest).hexdigest()[:12]
        if model.version not in ("", version):
            raise Refused(f"{model.bucket} is damaged: its {MANIFEST} is of version {version}")
        if key_files:
            Path(folder, MANIFEST).write_bytes(manifest)
            with suppress(BlobNotFound):  # nobody has signed it
                Path(folder, SIGNATURES).write_bytes(_small(objects, model, SIGNATURES))
            check_signature(Path(folder), key_files)
        largest_first = sorted(files, key=lambda file: file.size, reverse=True)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="check") as pool:
            sound = pool.map(partial(_is_sound, objects), largest_first)
            damaged = [file.name for file, well in zip(largest_first, sound, strict=True) if not well]
    if damaged:
        raise Refused(f"{model.bucket} is damaged: {', '.join(sorted(damaged)[:3])} is not what its {MANIFEST} says")
    return Stored(replace(model, version=version), len(files), sum(file.size for file in files), 0.0, whole=True)


def _is_sound(objects: Objects, file: _File) -> bool:
    digest, at = sha256(), 0
    while at <= file.size and (data := _read(objects, file.name, at, PIECE)):
        digest.update(data)
        at += len(data)
    return at == file.size and digest.hexdigest() == file.sha256


def remove(model: BucketModel, check: Callable[[], None] = lambda: None) -> int:
    """Remove a version, its manifest first, so that nobody pulls a part of it. `check` is called without the manifest,
    which is put back where it raises. Returns how many objects went. Raises Refused, also where nothing is there."""
    if not model.version:
        raise Refused(f"{model.bucket} names no version; it must be s3://BUCKET/PREFIX/NAME/VERSION")
    with _refusals(model, "remove"):
        objects = _Steady(model.bucket)
        names = _sizes(objects).keys()
        if not names:
            raise Refused(f"there is nothing in {model.bucket}")
        manifest = _small(objects, model, MANIFEST) if MANIFEST in names else None
        _delete(objects, names & {MANIFEST})
        try:
            check()
        except BaseException:
            if manifest is not None:
                _put(objects, MANIFEST, manifest)
            raise
        _delete(objects, names - {MANIFEST})
    return len(names)


def _delete(objects: Objects, names: Iterable[str]) -> None:
    for name in sorted(names):
        objects.request("delete_object", "s3:DeleteObject", name)


def remove_abandoned(version: Stored) -> bool:
    """Remove what a broken publish left. False where somebody has gone on with it meanwhile. Raises Refused."""
    with _refusals(version.model, "remove"):
        objects = _Steady(version.model.bucket)
        entries = _again(lambda: list(objects.listed("")))
        if any(entry.name == MANIFEST or entry.at > version.at for entry in entries):
            return False
        _delete(objects, [entry.name for entry in entries])
    return True


def abandoned(place: urls.Bucket) -> list[Stored]:
    """Versions under a place that `publish` began, that have no manifest, and got no file or part of one for a day.
    Others may have folders with such names. Raises Refused."""
    old = [version for version in stored(place) if not version.whole and time.time() - version.at > ABANDONED_S]
    return [version for version in old if _is_abandoned(version.model)]


def _is_abandoned(model: BucketModel) -> bool:
    """Whether `publish` wrote all files: it leaves their SHA-256 beside them. And whether none is being sent."""

    def is_ours(objects: Objects, name: str) -> bool:
        with suppress(BlobNotFound):
            answer = objects.request("head_object", "s3:GetObject", name)
            return name == SIGNATURES or _SHA256 in answer.get("Metadata", {})
        return True

    with _refusals(model, "read"):
        objects = _Steady(model.bucket)
        since = datetime.now(UTC) - timedelta(seconds=ABANDONED_S)
        return all(is_ours(objects, name) for name in _sizes(objects)) and not _again(
            lambda: objects.is_uploading(since)
        )


def end_uploads(place: urls.Bucket) -> int:
    """End uploads of versions' files under a place that got nothing for a day: S3 bills their parts. Returns how many.
    Raises Refused."""
    with _refusals(BucketModel(place, "", ""), "end uploads to"):
        objects = _Steady(place)
        before = datetime.now(UTC) - timedelta(seconds=ABANDONED_S)
        return _again(lambda: objects.abort_untouched(before, _KEY.fullmatch))


def pull(
    model: BucketModel, models: LocalModels, name: str, say: Callable[[str], None], *, quiet: bool = False
) -> Pulled:
    """Download a version into the local model folder, unless it is here under this name. `quiet`: show no progress.

    Raises Refused: no such folder, no access, bucket unreachable, disk full, or a damaged file.
    """
    if model.version and (old := models.find(name, model.version)) is not None:
        return old
    with _refusals(model):
        objects = Objects(model.bucket)
        files = _files(model, _small(objects, model, MANIFEST))
        content = manifest_content({file.name: (file.size, file.sha256) for file in files})
        version = sha256(content).hexdigest()[:12]
        if model.version not in ("", version):
            raise Refused(f"{model.bucket} is damaged: its {MANIFEST} is of version {version}")
        if (old := models.find(name, version)) is not None:
            return old
        waiting = f"another process is pulling {model.bucket}: waiting for it"
        with models.workplace(name, version, lambda: say(waiting)) as folder:
            if (old := models.find(name, version)) is not None:
                shutil.rmtree(folder)
                return old
            signatures, by_name = _signatures(objects, model, say), {file.name: file for file in files}
            sizes = {file.name: file.size for file in files}
            fetch = partial(_fetch, objects, model, models, folder)
            download(model.bucket, sizes, folder, lambda name: fetch(by_name[name]), say, quiet=quiet)
            if signatures is not None:
                (folder / SIGNATURES).write_bytes(signatures)
            pulled = models.finish(folder, {file.name: file.sha256 for file in files}, None)
    say(f"{name} {pulled.version} is in {pulled.folder}")
    return pulled


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
    if _GGUF.fullmatch(name):
        return name.isprintable() and len(name.encode()) <= 255
    return name not in (MANIFEST, SIGNATURES) and any(pattern.fullmatch(name) for pattern in (KEPT, SHARD, MODULE_FILE))


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


def _fetch(objects: Objects, model: BucketModel, models: LocalModels, folder: Path, file: _File) -> None:
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
    return _again(lambda: objects.read(name, start, size))


def _again(call: Callable[[], T]) -> T:
    """The call's answer; it is tried again while the bucket does not answer."""
    for attempt in range(TRIES):
        try:
            return call()
        except AwsError as error:
            if error.trouble is not Trouble.AWAY or attempt == TRIES - 1:
                raise
            time.sleep(min(LONGEST_PAUSE_S, 0.5 * 2**attempt))
    raise AssertionError("the last try returns or raises")


@contextmanager
def _refusals(model: BucketModel, doing: str = "download") -> Iterator[None]:
    """Turns errors of the bucket and the disk into Refused, with what to do about them."""
    with disk_errors(f"{doing} {model.bucket}"):
        try:
            yield
        except AwsNotInstalled as error:
            raise Refused(str(error)) from error
        except BlobNotFound as error:
            raise Refused(
                f"{error}: a version's folder has its {MANIFEST}, which is written last, and all files that it names. "
                "`penstock models ls s3://...` lists versions"
            ) from error
        except AwsError as error:
            kept = "what came so far is kept: " if doing in ("download", "publish to") else ""
            later = f"; {kept}run this again later" if error.trouble is Trouble.AWAY else ""
            raise Refused(f"{error}{later}") from error
