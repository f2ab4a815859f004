"""Pulls models and adapters from the Hugging Face Hub, or from a server of its API at HF_ENDPOINT.

huggingface_hub makes the requests, with HF_TOKEN; its cache (HF_HOME) is used first. Files are downloaded straight into
the local model folder. A broken download is resumed there, also by another process (huggingface_hub's own cache
discards partial files). Each file is compared with the hub's checksum: SHA-256 for large files, git's object name for
others.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Self
from urllib.parse import urlsplit

from workers.errors import Refused
from workers.library.download import check_room, disk_errors, download
from workers.library.local_models import INDEX, KEPT, MODULE_FILE, LocalModels, Pulled, Source, needed, sha256_of

_REFERENCE: Final = re.compile(
    r"hf://(?:([\w\-.]+/[\w\-.]+)/((?:[\w\-.]+/)*[\w\-.]+\.gguf)|((?:[\w\-.]+/)?[\w\-.]+))(?:@([\w\-./]+))?", re.ASCII
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
MAIN: Final = "main"
#: The folder of the local model folder in which adapters are collected. Its dot hides it from the list of models.
ADAPTERS: Final = ".adapters"
#: Most bytes of an index of weights; the largest checkpoints have some 10 MB.
LONGEST_INDEX: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository on a hub, and a branch, tag or commit of it; or one GGUF file there."""

    repo: str
    revision: str
    file: str | None = None
    """The path of a GGUF file in the repository, or of one part. None for the model in the repository's root."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse hf://OWNER/NAME[/FILE.gguf][@REVISION]. Raises Refused."""
        match = _REFERENCE.fullmatch(text)
        if match is None or ".." in (match[2] or "").split("/"):
            raise Refused(
                f"{text!r} is not a hub's model; it must be hf://OWNER/NAME, hf://OWNER/NAME@REVISION or "
                "hf://OWNER/NAME/FILE.gguf"
            )
        return cls(match[1] or match[3], match[4] or MAIN, match[2])

    @property
    def name(self) -> str:
        """The model's default name."""
        from engine.text.gguf import model_name

        return self.repo.rpartition("/")[2] if self.file is None else model_name(Path(self.file))

    def __str__(self) -> str:
        path = "" if self.file is None else f"/{self.file}"
        return f"hf://{self.repo}{path}" + ("" if self.revision == MAIN else f"@{self.revision}")


class _Away(Refused):
    """The hub cannot be reached."""


def pull(model: HubModel, models: LocalModels, name: str, say: Callable[[str], None], *, quiet: bool = False) -> Pulled:
    """Download a model into the local model folder, unless the same commit is there under this name. `quiet`: show no
    progress.

    If the hub cannot be reached, this returns the revision that was pulled last. Raises Refused: no such repository or
    revision, no access, hub unreachable, disk full, or a damaged file.
    """
    try:
        files, commit = _look(model)
    except _Away as away:
        old = _here(models, name, model, lambda source: model.revision in (source.revision, source.commit))
        if old is None:
            raise
        say(f"{away}; using {name} {old.version}, which was pulled before")
        return old
    key = commit if model.file is None else f"{commit}.{Path(model.file).name}"
    with models.workplace(name, key, lambda: say(f"another process is pulling {model}: waiting for it")) as folder:
        old = _here(models, name, model, lambda source: source.commit == commit)
        if old is not None:
            shutil.rmtree(folder)
            say(f"{model} is here already: {name} {old.version}")
            return old
        if model.file is None:
            names = needed(str(model), set(files), _index(models, model, files, commit, folder))
        else:
            names = _gguf_files(model, set(files))
        digests = _download_all(models, model, [files[name] for name in names], commit, folder, say, quiet)
        with _refusals(model):
            pulled = models.finish(folder, digests, Source(model.repo, model.revision, commit))
    say(f"{name} {pulled.version} is in {pulled.folder}")
    return pulled


@contextmanager
def pulled_adapter(
    adapter: HubModel, models: LocalModels, max_bytes: int, say: Callable[[str], None], *, quiet: bool = False
) -> Iterator[Path]:
    """Download a LoRA adapter into a folder of the local model folder, which goes at the end of the context. A broken
    download stays there and is resumed. `max_bytes`: the most that its files have. `quiet`: show no progress.

    Raises Refused as `pull` does, and for a repository that holds no adapter, or a larger one.
    """
    from engine.text.adapter import CONFIG, WEIGHTS

    if adapter.file is not None:
        raise Refused(f"{adapter} is one file; an adapter is a repository: hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    files, commit = _look(adapter)
    for name in (CONFIG, WEIGHTS):
        if name not in files:
            other = "; its adapter_model.bin can run code" if "adapter_model.bin" in files else ""
            raise Refused(f"{adapter} has no {name}: it holds no adapter that PEFT saved as safetensors{other}")
    downloads = [files[CONFIG], files[WEIGHTS]]
    size = sum(file.size for file in downloads)
    if size > max_bytes:
        raise Refused(f"{adapter} has {size} bytes; at most {max_bytes} of an adapter are kept in a store")
    key = f"{adapter.repo.replace('/', '--')}.{commit}"
    waiting = f"another process is pulling {adapter}: waiting for it"
    with models.workplace(ADAPTERS, key, lambda: say(waiting)) as folder:
        _download_all(models, adapter, downloads, commit, folder, say, quiet)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _index(models: LocalModels, model: HubModel, files: dict[str, _File], commit: str, folder: Path) -> bytes | None:
    """The index of the weights, which names the other files that are needed; None without one."""
    if INDEX not in files:
        return None
    if files[INDEX].size > LONGEST_INDEX:
        raise Refused(f"{INDEX} of {model} has {files[INDEX].size} bytes; at most {LONGEST_INDEX} are read")
    check_room(model, {INDEX: files[INDEX].size}, folder)
    _fetch(models, model, files[INDEX], commit, folder)
    return (folder / INDEX).read_bytes()


def _gguf_files(model: HubModel, names: set[str]) -> list[str]:
    """The parts of the model's GGUF file among a repository's files, and what the repository says of its licence.

    Raises Refused naming what is missing.
    """
    from engine.text.gguf.header import part_names

    assert model.file is not None
    folder = PurePosixPath(model.file).parent
    parts = [str(folder / part) for part in part_names(Path(model.file))]
    missing = [part for part in parts if part not in names]
    if missing:
        others = sorted(name for name in names if name.endswith(".gguf"))
        has = f"; it has {', '.join(others[:5])}" if others else ""
        raise Refused(f"hf://{model.repo} has no {missing[0]}{has}")
    return parts + sorted(name for name in names if KEPT.fullmatch(name) and not name.endswith((".json", ".jinja")))


def _here(models: LocalModels, name: str, model: HubModel, fits: Callable[[Source], bool]) -> Pulled | None:
    """The last pulled version of the repository, or of its file, whose source fits; None without one."""
    file = "config.json" if model.file is None else Path(model.file).name
    for pulled in models.all():
        source = pulled.source
        if pulled.name != name or source is None or source.repo != model.repo or not fits(source):
            continue
        if (pulled.folder / file).is_file():
            return pulled
    return None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    """Its path in the repository."""
    size: int
    git_sha1: str
    """git's object name of the content, or of the pointer to it."""
    sha256: str | None
    """SHA-256 in hex; only large files have one."""

    @property
    def local(self) -> str:
        """Its name in the local model folder."""
        return self.name if MODULE_FILE.fullmatch(self.name) else self.name.rpartition("/")[2]


def _look(model: HubModel) -> tuple[dict[str, _File], str]:
    """The files at the repository's root, those of modules, and GGUF files, by path; and the commit. Raises Refused."""
    from huggingface_hub import HfApi

    with _refusals(model):
        info = HfApi(endpoint=_endpoint()).model_info(model.repo, revision=model.revision, files_metadata=True)
    files = {}
    for entry in info.siblings or ():
        name = entry.rfilename
        here = "/" not in name or name.endswith(".gguf") or MODULE_FILE.fullmatch(name)
        if here and entry.size is not None and entry.blob_id is not None:
            sha256 = entry.lfs.sha256 if entry.lfs is not None else None
            files[entry.rfilename] = _File(entry.rfilename, entry.size, entry.blob_id, sha256)
    # The commit becomes part of a path, so a server's answer is checked.
    if not files or not info.sha or not _COMMIT.fullmatch(info.sha):
        raise Refused(f"{_endpoint()} lists no files of {model.repo}; is HF_ENDPOINT a hub's address?")
    return files, info.sha


def _download_all(
    models: LocalModels,
    model: HubModel,
    files: list[_File],
    commit: str,
    folder: Path,
    say: Callable[[str], None],
    quiet: bool,
) -> dict[str, str]:
    """Download files of a commit. Returns the SHA-256 in hex of each, by its name in the folder."""
    by_name = {file.local: file for file in files}
    return download(
        f"{model} at commit {commit[:12]}",
        {name: file.size for name, file in by_name.items()},
        folder,
        lambda name: _fetch(models, model, by_name[name], commit, folder),
        say,
        quiet=quiet,
    )


def _fetch(models: LocalModels, model: HubModel, file: _File, commit: str, folder: Path) -> str:
    """Download one file, or the rest of it, unless huggingface_hub's cache or another version has it.

    Returns its SHA-256 in hex. Raises Refused if the checksum differs.
    """
    from huggingface_hub import try_to_load_from_cache

    path = folder / file.local
    with _refusals(model):
        path.parent.mkdir(exist_ok=True)
        if path.exists() and path.stat().st_nlink > 1:
            # A killed run linked it from the cache, so nothing may be written to it.
            if (digest := _checked(path, file)) is not None:
                return digest
            path.unlink()
        cached = None if path.exists() else try_to_load_from_cache(model.repo, file.name, revision=commit)
        if isinstance(cached, str) and (digest := _take(Path(cached), path, file)) is not None:
            return digest
        held = None if path.exists() or file.sha256 is None else models.holding(file.sha256)
        if held is not None and (digest := _take(held, path, file)) is not None:
            return digest
        _download(model, file, commit, path)
        digest = _checked(path, file)
    if digest is None:
        path.unlink()
        raise Refused(
            f"{file.name} of {model} came damaged: its checksum is not the hub's. It was removed; run this again"
        )
    return digest


def _checked(path: Path, file: _File) -> str | None:
    """The file's SHA-256 in hex; None if the hub's checksum differs."""
    digest = sha256_of(path)
    if file.sha256 is not None:
        return digest if digest == file.sha256 else None
    # git names contents by SHA-1; no other checksum is available.
    named = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            named.update(chunk)
    return digest if named.hexdigest() == file.git_sha1 else None


def _download(model: HubModel, file: _File, commit: str, path: Path) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    url = hf_hub_url(model.repo, file.name, revision=commit, endpoint=_endpoint())
    location = get_hf_file_metadata(url, endpoint=_endpoint()).location
    headers = build_hf_headers()
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for its storage server
    disable_progress_bars()  # `pull` has one of all files
    with path.open("ab") as partial:
        if partial.tell() > file.size:
            partial.truncate(0)
            partial.seek(0)
        http_get(
            location,
            partial,
            resume_size=partial.tell(),
            headers=headers,
            expected_size=file.size,
            displayed_filename=file.name,
        )


def _take(cached: Path, path: Path, file: _File) -> str | None:
    """Take a file from huggingface_hub's cache, or another version, whose files never change: by hard link, or by copy.

    Returns its SHA-256 in hex; None if the cached file's checksum differs from the hub's.
    """
    digest = _checked(cached, file)
    if digest is None:
        return None
    try:
        os.link(cached.resolve(), path)
    except OSError:
        shutil.copyfile(cached, path)
        digest = _checked(path, file)
        if digest is None:
            path.unlink()
    return digest


@contextmanager
def _refusals(model: HubModel) -> Iterator[None]:
    """Turns huggingface_hub's errors into Refused, with what to do about them."""
    import httpx2
    from huggingface_hub import errors

    endpoint = _endpoint()
    with disk_errors(f"download {model}"):
        try:
            yield
        except errors.GatedRepoError as error:
            raise Refused(
                f"{model.repo} is gated: accept its terms at {endpoint}/{model.repo}, then set HF_TOKEN to a token of "
                "yours"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise Refused(
                f"{endpoint} has no model {model.repo!r}, or it is private: check the spelling, or set HF_TOKEN"
            ) from error
        except errors.HFValidationError as error:
            raise Refused(f"{model.repo!r} is not a repository's name: {error}") from error
        except errors.RevisionNotFoundError as error:
            raise Refused(f"{model.repo} has no branch, tag or commit {model.revision!r}") from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            message = " ".join(str(error.server_message or error.response.reason_phrase).split())[:200]
            kind = _Away if status >= 500 else Refused
            raise kind(f"{endpoint} answered {status} {message!r} for {model.repo}") from error
        except (httpx2.TransportError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
            raise _Away(f"cannot reach {endpoint} for {model} ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """The error's first cause, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


def _endpoint() -> str:
    endpoint: str = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return endpoint.rstrip("/")
