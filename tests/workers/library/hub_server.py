"""A small hub: enough of the Hugging Face Hub's HTTP API for the unmodified huggingface_hub to download from.

Large files are LFS's: `resolve` redirects to a storage path, which serves ranges. Faults can be set: connections that
break, content that is not what its checksum says, repositories that are gated, answers of any status.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.workers.http_server import Handler, HttpServer

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repo:
    """One repository with one commit, known by the `revisions`."""

    files: dict[str, bytes]
    lfs: set[str] = field(default_factory=lambda: {"model.safetensors"})
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    gated: bool = False
    commit: str = COMMIT
    #: Sizes to claim, by name.
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    """What it has, what it is to do wrong, and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    #: Bytes of each large file after which the connection breaks, one for each time that it is asked for.
    breaks: list[int] = field(default_factory=list)
    #: The next large file stands still after so many bytes, and `held` says so; nothing more comes.
    hold: int | None = None
    held: threading.Event = field(default_factory=threading.Event)
    #: Content to send in place of the right one, by file name.
    wrong: dict[str, bytes] = field(default_factory=dict)
    #: A status for every answer.
    status: int | None = None
    #: (method, path, Range header, Authorization header).
    asked: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> list[str]:
        """The names of files whose content was asked for."""
        return [path.rpartition("/")[2] for method, path, *_ in self.asked if method == "GET" and "/api/" not in path]

    def ranges(self) -> list[str]:
        return [given for _, _, given, _ in self.asked if given is not None]


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """It listens while this lasts."""

    class Api(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("range"), self.headers.get("authorization")))
            if hub.status is not None:
                self.tell(hub.status, b'{"error": "the hub is having a bad day"}')
            elif match := re.fullmatch(r"/api/models/(.+)/(revision|tree)/([^/]+)", path):
                self.api(*match.groups())
            elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
                self.resolve(*match.groups())
            elif match := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
                self.storage(*match.groups())
            else:
                self.refuse(404, "EntryNotFound", "Entry not found")

        do_HEAD = do_GET

        def repo(self, name: str, revision: str) -> Repo | None:
            repo = hub.repos.get(name)
            if repo is None:
                self.refuse(404, "RepoNotFound", "Repository not found")
            elif repo.gated and self.headers.get("authorization") != "Bearer let-me-in":
                self.refuse(403, "GatedRepo", "Access to this model is restricted")
            elif revision not in repo.revisions:
                self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return repo
            return None

        def api(self, name: str, kind: str, revision: str) -> None:
            repo = self.repo(name, revision)
            if repo is None:
                return
            entries = [_entry(repo, file) for file in repo.files]
            if kind == "tree":
                self.tell(200, json.dumps([{"type": "file", "path": e["rfilename"], **e} for e in entries]).encode())
            else:
                answer = {"id": name, "modelId": name, "sha": repo.commit, "siblings": entries, "tags": []}
                self.tell(200, json.dumps({**answer, "private": False}).encode())

        def resolve(self, name: str, revision: str, file: str) -> None:
            repo = self.repo(name, revision)
            if repo is None:
                return
            entry = _entry(repo, file)
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"'}
            if file in repo.lfs:
                headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
                self.tell(302, b"", {**headers, "Location": f"{_elsewhere(hub.url)}/storage/{name}/{file}"})
            else:
                self.tell(200, hub.wrong.get(file, repo.files[file]), headers)

        def storage(self, name: str, file: str) -> None:
            content = hub.wrong.get(file, hub.repos[name].files[file])
            start = int(re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("range", "bytes=0-"))[1])  # type: ignore[index]
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("content-length", str(len(body)))
            if start:
                self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if self.command == "GET":
                hold, hub.hold = hub.hold, None
                until = hold if hold is not None else hub.breaks.pop(0) if hub.breaks else len(body)
                self.wfile.write(body[:until])
                self.close_connection = True
                if hold is not None:
                    hub.held.set()
                    self.rfile.read(1)  # until the client is gone

        def refuse(self, status: int, code: str, message: str) -> None:
            self.tell(
                status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message}
            )

    with closing(HttpServer(Api)) as server:
        hub.url = server.url
        yield hub


def _elsewhere(url: str) -> str:
    """The same server by another name: the storage is not the hub, which is not to be sent tokens."""
    return url.replace("127.0.0.1", "localhost")


def _entry(repo: Repo, file: str) -> dict[str, Any]:
    content = repo.files[file]
    sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"rfilename": file, "size": repo.sizes.get(file, len(content)), "oid": sha1, "blobId": sha1}
    if file in repo.lfs:
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": entry["size"], "pointerSize": 130}
    return entry
