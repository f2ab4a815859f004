"""The local model folder: models that were pulled, each version in a folder of its own that never changes.

    {root}/{name}/{version}/   the model's files, and
        manifest.json          {"v": 1, "files": {name: {"size": bytes, "sha256": hex}}}, written last
        .source.json           {"repo", "revision", "commit"}: where it came from, if from a hub

The version is the one that `engine.text.checkpoint.model_version` gives: that of the manifest, thus of the files alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from workers.errors import Refused

MANIFEST: Final = "manifest.json"
SOURCE: Final = ".source.json"
INDEX: Final = "model.safetensors.index.json"
WEIGHTS: Final = "model.safetensors"
#: Files of a model folder that Penstock reads, or that belong to them.
KEPT: Final = re.compile(r"[\w][\w.\-]*\.(json|jinja)|(README|LICENSE|NOTICE)[\w.\-]*", re.ASCII)
SHARD: Final = re.compile(r"[\w][\w.\-]*\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A commit of a repository on a hub, and the revision by which it was asked for."""

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
    """When, in unix nanoseconds."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The local model folder at `root`, which need not exist."""

    root: Path

    @classmethod
    def default(cls) -> Shelf:
        """PENSTOCK_MODELS, else penstock/models in the user's data folder (XDG_DATA_HOME). Raises Refused."""
        given = os.environ.get("PENSTOCK_MODELS")
        try:
            data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
            return cls(Path(given).expanduser().absolute() if given else data / "penstock" / "models")
        except RuntimeError as error:
            raise Refused(f"cannot tell where models are kept ({error}); set PENSTOCK_MODELS to a folder") from error

    def all(self) -> list[Pulled]:
        """The last pulled first."""
        found = [_pulled(manifest.parent) for manifest in self.root.glob(f"[!.]*/[!.]*/{MANIFEST}")]
        return sorted(found, key=lambda pulled: pulled.pulled_ns, reverse=True)

    def find(self, name: str) -> Pulled | None:
        """The last pulled version of a model."""
        return next((pulled for pulled in self.all() if pulled.name == name), None)

    @contextmanager
    def workplace(self, name: str, key: str, waiting: Callable[[], None] = lambda: None) -> Iterator[Path]:
        """A folder to gather a version's files in, the same for the same key; for one process at a time.

        What is in it stays for the next try, unless `finish` makes a version of it. `waiting` is called where another
        process has it. Raises Refused where it cannot be written.
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
        """Make a version of a workplace, by its files' SHA-256 in hex. One that is there becomes the last pulled."""
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
        """Take in a copy of what belongs to the model in a folder of the user's own.

        Raises Refused where it is no model's, lacks something, is not what its own manifest.json says, or there is no
        room.
        """
        try:
            names = {path.name for path in folder.iterdir() if path.is_file()}
            index = own_file(folder, INDEX).read_bytes() if INDEX in names else None
            files = needed(str(folder), names, index)
            digests = {file: sha256_of(own_file(folder, file)) for file in files}
        except OSError as error:
            raise Refused(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
        for file, digest in manifest_of(folder).items():
            if digests.get(file, digest) != digest:
                raise Refused(f"{folder / file} is damaged: its SHA-256 is not the one in {MANIFEST}")
        _check_weights(folder, files)
        with self.workplace(name, secrets.token_hex(8)) as place:
            try:
                for file in files:
                    shutil.copyfile(folder / file, place / file)
                    if sha256_of(place / file) != digests[file]:
                        raise Refused(f"{folder / file} changed while it was copied, or a disk fails; run this again")
                return self.finish(place, digests, None)
            except OSError as error:
                raise Refused(f"cannot copy {folder} to {place.parent}: {error.strerror or error}") from error
            finally:
                shutil.rmtree(place, ignore_errors=True)
                place.with_suffix(".lock").unlink(missing_ok=True)


def write_manifest(folder: Path, digests: Mapping[str, str] | None = None) -> bytes:
    """Write the manifest of a folder and return its content. `digests`: SHA-256 in hex of the files that it is to list;
    None: of all there are."""
    if digests is None:
        digests = {path.name: sha256_of(path) for path in folder.iterdir() if path.name != MANIFEST}
    files = {file: {"size": (folder / file).stat().st_size, "sha256": digests[file]} for file in sorted(digests)}
    content = (json.dumps({"v": 1, "files": files}, indent=1) + "\n").encode()
    (folder / MANIFEST).write_bytes(content)
    return content


def _check_weights(folder: Path, files: Iterable[str]) -> None:
    """Each file is as long as its header says."""
    from engine.errors import ModelError
    from engine.text.checkpoint import read_header

    try:
        for name in files:
            if name.endswith(".safetensors"):
                read_header(folder / name)
    except ModelError as error:
        raise Refused(str(error)) from error
    except OSError as error:
        raise Refused(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def own_file(folder: Path, name: str) -> Path:
    """A file of the folder. What it links to elsewhere would become part of the model, for all its callers to see."""
    from engine.errors import ModelError
    from engine.text.folder import file_in

    try:
        path = file_in(folder, name)
    except ModelError as error:
        raise Refused(str(error)) from error
    return folder / name if path is None else path


def needed(whose: str, names: set[str], index: bytes | None) -> list[str]:
    """Those of a model's file `names` that serving it takes: weights in safetensors, settings, tokenizer, template.

    `index` is the content of model.safetensors.index.json, where there is one: of several forms of the weights, only
    what that names. Raises Refused, which names what is missing.
    """
    for name, use in {"config.json": "transformers model", "tokenizer.json": "fast tokenizer"}.items():
        if name not in names:
            raise Refused(f"{whose} has no {name}: Penstock needs a {use}")
    weights = {WEIGHTS} if index is None else _shards(whose, index)
    missing = sorted(weights - names)
    if missing:
        others = sorted(name for name in names if name.endswith((".bin", ".pth", ".pt", ".gguf", ".safetensors")))
        has = f"; it has {', '.join(others[:3])}" if others else ""
        raise Refused(f"{whose} has no {missing[0]}{has}: Penstock reads weights as safetensors")
    kept = {name for name in names if KEPT.fullmatch(name) and name not in (MANIFEST, INDEX)}
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
        raise Refused(f"{whose} has an {INDEX} that names {odd!r}, which is no safetensors file beside it")
    return shards


def manifest_of(folder: Path) -> dict[str, str]:
    """SHA-256 by file, as the folder's own manifest.json says; empty where it has none. Raises Refused."""
    path = own_file(folder, MANIFEST)
    if not path.exists():
        return {}
    try:
        return {str(file): str(entry["sha256"]) for file, entry in json.loads(path.read_bytes())["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{path} cannot be read: {error!r}") from error


def _pulled(folder: Path) -> Pulled:
    return Pulled(folder.parent.name, folder.name, folder, _source(folder), (folder / MANIFEST).stat().st_mtime_ns)


def _source(folder: Path) -> Source | None:
    try:
        given = json.loads((folder / SOURCE).read_text())
        return Source(str(given["repo"]), str(given["revision"]), str(given["commit"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
