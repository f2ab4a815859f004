"""The local model folder: pulled models, each version in its own folder that never changes. And the check of files.

    {root}/{name}/{version}/   the model's files, and
        manifest.json          {"v": 1, "files": {name: {"size": bytes, "sha256": hex}}}, written last
        .source.json           {"repo", "revision", "commit"} of a model from a hub

The version is that of `engine.text.checkpoint.model_version`: a hash of the manifest, and so of the files alone.

A failing disk or a partial copy makes a model that answers wrongly. So every load reads and hashes all files, several
at a time (`verify`). Results are not remembered: a file's time and inode do not change when a disk returns wrong bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from workers.errors import Refused

MANIFEST: Final = "manifest.json"
SOURCE: Final = ".source.json"
INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"
#: Files of a model folder, besides weights, that Penstock reads or keeps with them.
KEPT: Final = re.compile(r"[\w][\w.\-]*\.(json|jinja)|(README|LICENSE|NOTICE)[\w.\-]*", re.ASCII)
#: Files of the modules of Sentence-Transformers' folders, such as `1_Pooling/config.json`.
MODULE_FILE: Final = re.compile(r"[0-9]{1,2}_\w{1,64}/(config\.json|model\.safetensors)", re.ASCII)
#: Files that weights are read from; each must be in the manifest.
WEIGHT_FILES: Final = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
#: Files hashed at a time. Hashing releases the GIL; more threads would only make a disk seek.
THREADS: Final = 8
SHARD: Final = re.compile(r"[\w][\w.\-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A commit of a repository on a hub, and the revision by which it was requested."""

    repo: str
    revision: str
    commit: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model in the local model folder."""

    name: str
    version: str
    folder: Path
    source: Source | None
    pulled_ns: int
    """Time of the pull in unix nanoseconds."""


@dataclass(frozen=True, slots=True)
class LocalModels:
    """The local model folder at `root`, which may not exist yet."""

    root: Path

    @classmethod
    def default(cls) -> LocalModels:
        """PENSTOCK_MODELS, else penstock/models in the user's data folder (XDG_DATA_HOME). Raises Refused."""
        configured = os.environ.get("PENSTOCK_MODELS")
        try:
            data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
            return cls(Path(configured).expanduser().absolute() if configured else data / "penstock" / "models")
        except RuntimeError as error:
            raise Refused(f"cannot tell where models are kept ({error}); set PENSTOCK_MODELS to a folder") from error

    def all(self) -> list[Pulled]:
        """All versions, the last pulled first."""
        versions = [_pulled(manifest.parent) for manifest in self.root.glob(f"[!.]*/[!.]*/{MANIFEST}")]
        return sorted(versions, key=lambda pulled: pulled.pulled_ns, reverse=True)

    def find(self, name: str, version: str = "") -> Pulled | None:
        """A version of a model; without it, the last pulled one."""
        versions = (pulled for pulled in self.all() if pulled.name == name)
        return next((pulled for pulled in versions if version in ("", pulled.version)), None)

    def remove(self, pulled: Pulled) -> None:
        """Remove a version, which is none any more once this begins, and what dead removals left. Raises OSError."""
        pulled.folder.rename(pulled.folder.with_name(f".{pulled.version}.{secrets.token_hex(4)}.removed"))
        for hidden in self.root.glob("*/.*.removed"):
            shutil.rmtree(hidden, ignore_errors=True)  # another process may remove it, too

    def holding(self, digest: str) -> Path | None:
        """A file with this SHA-256 (hex), of any version of any model, by their manifests; None where none has it."""
        for pulled in self.all():
            with suppress(Refused, OSError):
                for name, own in manifest_of(pulled.folder).items():
                    if own == digest and (path := own_file(pulled.folder, name)).is_file():
                        return path
        return None

    def link(self, digest: str, path: Path) -> bool:
        """Make `path` a hard link to a whole file that another version has already. False where none has it."""
        held = self.holding(digest)
        if held is None or sha256_of(held) != digest:
            return False
        try:
            path.hardlink_to(held)
        except OSError:  # another file system, or one without links
            return False
        return True

    @contextmanager
    def workplace(self, name: str, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """A folder in which one process at a time collects a version's files. The same key gives the same folder.

        Its files stay for the next try, unless `finish` makes a version of it. `waiting` is called if another process
        holds it. Raises Refused if it cannot be written.
        """
        folder = self.root / name / f".{key}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(f"cannot write into {folder.parent}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir(exist_ok=True)
            yield folder
        finally:
            os.close(lock)

    def finish(self, folder: Path, digests: Mapping[str, str], source: Source | None) -> Pulled:
        """Make a version of a workplace. `digests`: SHA-256 in hex by file.

        A version that exists already becomes the last pulled one.
        """
        if source is not None:
            (folder / SOURCE).write_text(json.dumps(asdict(source)) + "\n")
        content = write_manifest(folder, digests)
        version = folder.with_name(sha256(content).hexdigest()[:12])
        try:
            folder.rename(version)
        except OSError:
            if not (version / MANIFEST).is_file():
                raise
            if source is not None:
                os.replace(folder / SOURCE, version / SOURCE)
            os.utime(version / MANIFEST)
            shutil.rmtree(folder)
        return _pulled(version)

    def copy(self, name: str, folder: Path) -> Pulled:
        """Copy a model from a user's folder, or a GGUF file.

        Raises Refused if the folder holds no model, lacks a file, differs from its own manifest.json, or the disk is
        full.
        """
        folder, digests = hashed(folder)
        with self.workplace(name, secrets.token_hex(8)) as workplace:
            try:
                for file in digests:
                    (workplace / file).parent.mkdir(exist_ok=True)
                    if not self.link(digests[file], workplace / file):
                        shutil.copyfile(folder / file, workplace / file)
                    if sha256_of(workplace / file) != digests[file]:
                        raise Refused(f"{folder / file} changed while it was copied, or a disk fails; run this again")
                return self.finish(workplace, digests, None)
            except OSError as error:
                raise Refused(f"cannot copy {folder} to {workplace.parent}: {error.strerror or error}") from error
            finally:
                shutil.rmtree(workplace, ignore_errors=True)
                workplace.with_suffix(".lock").unlink(missing_ok=True)


def hashed(folder: Path) -> tuple[Path, dict[str, str]]:
    """The folder of a model's files (of a GGUF file, the one that it lies in), and by file that serving needs its
    SHA-256 in hex. Raises Refused if it holds no model, lacks a file, or differs from its own manifest.json."""
    try:
        files = _files_to_copy(folder)
        folder = folder if folder.is_dir() else folder.parent
        digests = {file: sha256_of(own_file(folder, file)) for file in files}
    except OSError as error:
        raise Refused(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    for file, digest in manifest_of(folder).items():
        if digests.get(file, digest) != digest:
            raise Refused(f"{folder / file} is damaged: its SHA-256 is not the one in {MANIFEST}")
    _check_weights(folder, files)
    return folder, digests


def _files_to_copy(folder: Path) -> list[str]:
    from engine.errors import ModelError
    from engine.text.gguf import gguf_of, read_gguf

    try:
        gguf = gguf_of(folder)
        if gguf is not None:
            return [path.name for path in read_gguf(gguf).parts]
    except ModelError as error:
        raise Refused(str(error)) from error
    names = set(files_of(folder))
    index = own_file(folder, INDEX).read_bytes() if INDEX in names else None
    return needed(str(folder), names, index)


def files_of(folder: Path) -> list[str]:
    """The names of a folder's files, and of those of its modules."""
    paths = [path for path in (*folder.iterdir(), *folder.glob("[0-9]*_*/*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    return sorted(name for name in names if "/" not in name or MODULE_FILE.fullmatch(name))


def write_manifest(folder: Path, digests: Mapping[str, str] | None = None) -> bytes:
    """Write a folder's manifest and return its content.

    `digests`: SHA-256 in hex of the files to list; None: all files.
    """
    if digests is None:
        digests = {name: sha256_of(folder / name) for name in files_of(folder) if name != MANIFEST}
    content = manifest_content({file: ((folder / file).stat().st_size, digest) for file, digest in digests.items()})
    (folder / MANIFEST).write_bytes(content)
    return content


def manifest_content(files: Mapping[str, tuple[int, str]]) -> bytes:
    """A manifest: by file its size (bytes) and SHA-256 in hex. The version is the begin of this content's own."""
    listed = {file: {"size": files[file][0], "sha256": files[file][1]} for file in sorted(files)}
    return (json.dumps({"v": 1, "files": listed}, indent=1) + "\n").encode()


def _check_weights(folder: Path, files: Iterable[str]) -> None:
    """Check that each weights file is as long as its header says. Raises Refused."""
    from engine.errors import ModelError
    from engine.text.tensors import read_header

    try:
        for name in files:
            if name.endswith(".safetensors"):
                read_header(folder / name)
    except ModelError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def own_file(folder: Path, name: str) -> Path:
    """The path of a folder's own file. Raises Refused for a link out of the folder, which would publish that file."""
    from engine.errors import ModelError
    from engine.text.files import file_in

    try:
        path = file_in(folder, name)
    except ModelError as error:
        raise Refused(str(error)) from error
    return folder / name if path is None else path


def needed(whose: str, names: set[str], index: bytes | None) -> list[str]:
    """The files among `names` that serving needs: weights in safetensors, settings, tokenizer, template.

    `index`: content of model.safetensors.index.json, or None. It names the weights files that are needed. `whose`: the
    model's name for errors. Raises Refused, which names a missing file.
    """
    for name, use in {"config.json": "transformers model", "tokenizer.json": "fast tokenizer"}.items():
        if name not in names:
            files = sorted(name for name in names if name.endswith(".gguf"))
            other = f", or one of its GGUF files, as {whose.partition('@')[0]}/{files[0]}" if files else ""
            raise Refused(f"{whose} has no {name}: Penstock needs a {use}{other}")
    weights = {WEIGHTS} if index is None else _shards(whose, index)
    missing = sorted(weights - names)
    if missing:
        others = sorted(name for name in names if name.endswith((".bin", ".pth", ".pt", ".gguf", ".safetensors")))
        has = f"; it has {', '.join(others[:3])}" if others else ""
        raise Refused(f"{whose} has no {missing[0]}{has}: Penstock reads weights as safetensors")
    kept = {name for name in names if KEPT.fullmatch(name) and name not in (MANIFEST, INDEX)}
    kept |= {name for name in names if MODULE_FILE.fullmatch(name)}
    return sorted(weights | kept | ({INDEX} if index is not None else set()))


def sha256_of(path: Path) -> str:
    """A file's SHA-256 in hex."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _shards(whose: str, index: bytes) -> set[str]:
    try:
        shards = set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{whose} has an {INDEX} that cannot be read as a weight map: {error!r}") from error
    odd = next((shard for shard in shards if not isinstance(shard, str) or not SHARD.fullmatch(shard)), None)
    if odd is not None:
        raise Refused(f"{whose} has an {INDEX} that names {odd!r}, which is not a safetensors file beside it")
    return shards


def manifest_of(folder: Path) -> dict[str, str]:
    """SHA-256 in hex by file, from the folder's own manifest.json; empty without one. Raises Refused."""
    path = own_file(folder, MANIFEST)
    if not path.exists():
        return {}
    try:
        return {str(file): str(entry["sha256"]) for file, entry in json.loads(path.read_bytes())["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from error


def _pulled(folder: Path) -> Pulled:
    return Pulled(folder.parent.name, folder.name, folder, source_of(folder), (folder / MANIFEST).stat().st_mtime_ns)


def source_of(folder: Path) -> Source | None:
    """The source of a pulled model; None for one that is not from a hub."""
    try:
        source = json.loads((folder / SOURCE).read_text())
        return Source(str(source["repo"]), str(source["revision"]), str(source["commit"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(folder: Path, say: Callable[[str], None] = lambda line: None) -> None:
    """Compare every file with the folder's manifest.json; a folder without one passes. Pulled models have one.

    Raises Refused, which names a missing or damaged file, or a weights file that the manifest does not name.
    """
    if not (folder / MANIFEST).exists():
        return
    digests = manifest_of(folder)
    if strange := sorted({path.name for pattern in WEIGHT_FILES for path in folder.glob(pattern)} - digests.keys()):
        raise Refused(
            f"{folder} is damaged: {', '.join(strange[:3])} is not in its {MANIFEST}; "
            "remove the folder and pull the model again"
        )
    began = time.monotonic()
    # The largest first, so that the threads end at about the same time.
    try:
        sizes = {name: own_file(folder, name).stat().st_size for name in digests}
    except OSError as error:
        raise Refused(f"{folder} is damaged: {error.filename} is in its {MANIFEST}, and cannot be read") from error
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="verify") as pool:
        digest_of = pool.map(lambda name: _digest(folder / name), names)
        damaged = [name for name, digest in zip(names, digest_of, strict=True) if digest != digests[name]]
    if damaged:
        raise Refused(
            f"{folder} is damaged: the SHA-256 of {', '.join(sorted(damaged)[:3])} is not the one in its {MANIFEST}; "
            "remove the folder and pull the model again"
        )
    total, seconds = sum(sizes.values()), time.monotonic() - began
    say(f"{len(names)} files of {folder} are as its {MANIFEST} says ({total / 1e6:,.1f} MB in {seconds:.1f} s)")


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        return f"unreadable: {error}"
