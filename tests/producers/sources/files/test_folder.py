"""A watched folder: what is taken, what comes out, and what is refused as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import run
from producers.contract import keys
from producers.sources.files.folder import Folder, FolderSettings, Looks
from producers.sources.files.work import Replaced, Work
from producers.sources.source import Context
from producers.store import inbox
from producers.store.blobs import BlobWriter, FolderBlobs
from producers.store.inbox import InboxObject
from tests.chaos.batching import BAD, GOOD, URL, Serving, lines
from tests.chaos.sourcing import SourcesProcess, Watched, free_leases
from tests.chaos.sweeping import Sweeper
from tests.producers.conftest import QUEUE
from tests.waiting import within


def waiting(valkey: Redis) -> int:
    """Messages of tasks that no worker has taken."""
    return sum(valkey.llen(name) for name in valkey.keys(f"{QUEUE}*"))


def became(valkey: Redis, outcome: str) -> int:
    """How many files became this, as /metrics counts them."""
    return int(valkey.hget(keys.METRICS_SOURCES, f"source_items files {outcome} n") or -1)  # type: ignore[arg-type]


def opened(path: Path) -> Folder:
    folder = Folder(path, moves=True)
    folder.open()
    return folder


async def begun(client: AsyncClient, watched: Watched, blobs: Path) -> tuple[Work, str, inbox.Entry]:
    """Work on a folder with a file that is open there and not yet taken; the folder's name, and the file's entry."""
    place = opened(watched.root)
    settings = FolderSettings(type="folder", folder=str(watched.root))
    work = Work("files", Context(client, "", "one", ""), place, FolderBlobs(blobs), settings)
    watched.put("a.jsonl", [GOOD])
    (found,) = place.files()
    await work.open(found)
    ((entry, status),) = await inbox.open_entries(client.store, place.name)
    assert status is None
    return work, place.name, entry


@pytest.mark.usefixtures("sweeper")
def test_a_file_becomes_a_batch_while_no_worker_is_there(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    watched = Watched(valkey, tmp_path, tenant="acme", metadata={"team": "a"}, completion_window="2h")
    name = "2026/Maß 東京 +1"
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        watched.put(f"{name}.jsonl", [BAD, *[GOOD] * 6])
        assert within(lambda: waiting(valkey) == 6), "its lines wait for workers"
        with Serving(valkey):
            assert within(lambda: watched.delivered(name))
    assert watched.lines(f"{name}.jsonl").keys() == {f"r{number}" for number in range(1, 7)}
    assert watched.lines(f"{name}.errors.jsonl")["r0"]["response"]["status_code"] == 400
    (batch,) = watched.batches()
    assert (batch.tenant, batch.fields["completion_window"], batch.endpoint) == ("acme", "2h", URL)
    assert batch.metadata == {"team": "a", "source": str(watched.inbox / f"{name}.jsonl")}
    assert (watched.done / f"{name}.jsonl").read_bytes() == b"".join(lines([BAD, *[GOOD] * 6]))
    assert not (watched.inbox / f"{name}.jsonl").exists()
    assert waiting(valkey) == 0


REFUSED: dict[str, tuple[bytes, str, int | None]] = {
    "no JSON": (b"".join(lines([GOOD])) + b"{]\n", "invalid_json_line", 2),
    "no UTF-8": (b"\xff\xfe\n", "invalid_json_line", 1),
    "no such model": (b"".join(lines([GOOD | {"model": "huge"}])), "model_not_found", 1),
    "two endpoints": (b"".join(lines([GOOD])) + b"".join(lines([GOOD], "/v1/responses")), "url_mismatch", 2),
    "no endpoint": (b"".join(lines([GOOD], "/v1/images/generations")), "url_mismatch", 1),
    "an id twice": (2 * b"".join(lines([GOOD])), "duplicate_custom_id", 2),
    "empty": (b"", "empty_file", None),
    "blank": (b"\n \r\n", "empty_file", None),
    "a long line": (b"".join(lines([GOOD])) + b'{"custom_id": "' + b"x" * (5 << 20) + b"\n", "invalid_request", 2),
    "too large": (b"".join(lines([GOOD | {"user": "x" * (6 << 20)}])), "file_too_large", None),
}


@pytest.mark.usefixtures("sweeper")
def test_what_is_refused_as_a_whole_says_why(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    watched = Watched(valkey, tmp_path, max_file=(5 << 20) + 1000)
    for name, (content, _, _) in REFUSED.items():
        watched.put_bytes(f"{name}.jsonl", content)
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        assert within(lambda: all((watched.done / f"{name}.jsonl").exists() for name in REFUSED))
        assert within(lambda: not watched.open())
        assert within(lambda: became(valkey, "refused") == len(REFUSED)), "/metrics counts them"
    for name, (_, code, line) in REFUSED.items():
        (refused,) = [json.loads(each) for each in (watched.outbox / f"{name}.errors.jsonl").read_bytes().splitlines()]
        assert (refused["error"]["code"], refused["error"]["line"]) == (code, line), name
        assert (refused["custom_id"], refused["response"]) == (None, None)
        assert refused["error"]["message"]
        assert (watched.outbox / f"{name}.jsonl").read_bytes() == b""
    assert waiting(valkey) == 0, "nothing of them runs"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sweeper")
def test_a_moved_file_may_come_again(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    watched = Watched(valkey, tmp_path)
    with Serving(valkey), SourcesProcess(valkey_url, tmp_path, watched.table):
        watched.put("a.jsonl", [GOOD])
        assert within(lambda: watched.delivered("a"))
        (watched.outbox / "a.jsonl").unlink()
        os.rename(watched.done / "a.jsonl", watched.inbox / "a.jsonl")
        assert within(lambda: watched.delivered("a"))
    assert len(watched.batches()) == 2


@pytest.mark.usefixtures("sweeper")
def test_a_file_that_is_left_runs_once_for_each_content(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    watched = Watched(valkey, tmp_path, after="leave")
    with Serving(valkey):
        watched.put("a.jsonl", [GOOD])
        for after in ("b", "c"):
            with SourcesProcess(valkey_url, tmp_path, watched.table):
                assert within(lambda: watched.delivered("a"))
                watched.put(f"{after}.jsonl", [GOOD])  # when it is delivered, the inbox was looked through
                assert within(lambda after=after: watched.delivered(after))
        assert len(watched.batches()) == 3
        with SourcesProcess(valkey_url, tmp_path, watched.table):
            watched.put("a.jsonl", [GOOD, GOOD])
            assert within(lambda: len(watched.batches()) == 4 and watched.delivered("a"))
    assert len(watched.lines("a.jsonl")) == 2


def test_results_of_an_older_content_do_not_replace_those_of_a_newer_one(
    valkey: Redis, valkey_url: str, tmp_path: Path, sweeper: Sweeper
) -> None:
    watched = Watched(valkey, tmp_path, after="leave")
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        watched.put("a.jsonl", [GOOD])
        assert within(lambda: len(watched.batches()) == 1)
        watched.put("a.jsonl", [GOOD, GOOD])
        assert within(lambda: len(watched.batches()) == 2)
        with Serving(valkey):
            assert within(lambda: watched.delivered("a"))
    older = min(watched.batches(), key=lambda batch: batch.time("created") or 0)
    assert len(watched.lines("a.jsonl")) == 2
    assert len(watched.lines(f"a.{older.id}.jsonl")) == 1


@pytest.mark.usefixtures("sweeper")
def test_two_processes_make_one_batch_of_each_file(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    watched = Watched(valkey, tmp_path)
    names = [f"f{number}" for number in range(12)]
    with (
        Serving(valkey),
        SourcesProcess(valkey_url, tmp_path, watched.table),
        SourcesProcess(valkey_url, tmp_path, watched.table),
    ):
        for name in names:
            watched.put(f"{name}.jsonl", [GOOD] * 2)
        assert within(lambda: all(watched.delivered(name) for name in names))
        assert within(lambda: became(valkey, "done") == 12)
    assert len(watched.batches()) == 12
    assert became(valkey, "refused") == became(valkey, "missed") == 0
    assert all(len(watched.lines(f"{name}.jsonl")) == 2 for name in names)


@pytest.mark.usefixtures("sweeper")
def test_results_that_are_gone_are_told_of(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """They expired before a process of sources came back."""
    watched = Watched(valkey, tmp_path)
    watched.put("a.jsonl", [GOOD, BAD])
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        assert within(lambda: waiting(valkey) == 1)
    with Serving(valkey):
        assert within(lambda: watched.batches()[0].ended)
    (batch,) = watched.batches()
    valkey.delete(keys.file(batch.fields["output_file"]))
    free_leases(valkey)
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        assert within(lambda: watched.delivered("a"))
    told = [json.loads(line) for line in (watched.outbox / "a.errors.jsonl").read_bytes().splitlines()]
    assert [(line["custom_id"], (line["error"] or {}).get("code")) for line in told] == [
        (None, "file_gone"),
        ("r1", None),
    ]
    assert (watched.outbox / "a.jsonl").read_bytes() == b""


def test_a_file_is_taken_once_it_is_unchanged_for_long_enough() -> None:
    looks, first, second = Looks(5.0, 60.0), InboxObject("a.jsonl", "1", 1), InboxObject("a.jsonl", "2", 2)
    assert looks.settled([first], 100) == []
    assert looks.settled([second], 104) == [], "it has grown"
    assert looks.settled([second], 108.9) == []
    assert looks.settled([second], 109) == [second]
    assert looks.settled([second], 110) == []
    assert looks.settled([], 111) == []
    assert looks.settled([second], 112) == [], "it came again"
    assert looks.settled([second], 117) == [second]
    assert looks.settled([second], 177) == [second], "lest the store forgets it"


def test_a_file_that_changes_while_it_is_copied_is_not_taken(tmp_path: Path) -> None:
    folder, blobs = opened(tmp_path), FolderBlobs(tmp_path / "blobs")
    (tmp_path / "inbox" / "a.jsonl").write_bytes(b"1\n" * 10)
    (found,) = folder.files()

    class Meanwhile(FolderBlobs):
        def writer(self, name: str) -> Any:
            os.utime(tmp_path / "inbox" / "a.jsonl", ns=(1, 1))
            return super().writer(name)

    with pytest.raises(Replaced):
        folder.copy(found, Meanwhile(tmp_path / "blobs"), "b", lambda: False)
    (tmp_path / "inbox" / "a.jsonl").unlink()
    with pytest.raises(Replaced):
        folder.copy(found, blobs, "b", lambda: False)
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []


def test_what_is_nobodys_is_left_alone(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    inbox = tmp_path / "inbox"
    for name in ("a.jsonl", "b.txt", ".hidden.jsonl", "c.errors.jsonl", ".jsonl", "sub/d.jsonl", ".tmp/e.jsonl"):
        (inbox / name).parent.mkdir(exist_ok=True)
        (inbox / name).touch()
    (inbox / "link.jsonl").symlink_to("/etc/passwd")
    (inbox / "folder.jsonl").mkdir()
    with open(os.fsencode(inbox) + b"/\xff.jsonl", "wb"):
        pass
    assert [found.name for found in folder.files()] == ["a.jsonl", "sub/d.jsonl"]
    assert folder.refusal("x" * 195 + ".jsonl") is None
    assert folder.refusal("x" * 250 + ".jsonl") is not None


def test_a_result_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = opened(tmp_path)

    def broken() -> Iterator[bytes]:
        yield b"half"
        raise OSError("the store is away")

    folder.write("a/b.jsonl", [b"old"])
    with pytest.raises(OSError, match="away"):
        folder.write("a/b.jsonl", broken())
    assert (tmp_path / "outbox" / "a" / "b.jsonl").read_bytes() == b"old"
    killed: BlobWriter = FolderBlobs(tmp_path / "outbox").writer("x")
    killed.write(b"half")
    assert folder.clean(3600) == 0
    assert folder.clean(-1) == 1


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder that lies further down than Python calls within calls: pytest could not remove it."""
    (inbox := tmp_path / "inbox").mkdir()
    at = os.open(inbox, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        above, at = at, os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(above)
    os.close(at)
    yield tmp_path
    subprocess.run(["rm", "-rf", inbox / "d"], check=True)


def test_folders_may_lie_deep_and_a_link_that_takes_a_files_place_is_not_read(deep: Path) -> None:
    folder = opened(deep)
    (deep / "inbox" / "a.jsonl").write_bytes(b"1\n")
    (found,) = folder.files()
    (deep / "secret").write_bytes(b"2\n")
    (deep / "inbox" / "a.jsonl").unlink()
    (deep / "inbox" / "a.jsonl").symlink_to(deep / "secret")
    with pytest.raises(Replaced):
        folder.read(found, 0, 2)


def test_processes_know_a_folder_by_the_same_name(tmp_path: Path) -> None:
    names = [opened(tmp_path / name).name for name in ("a", "a", "b")]
    assert names[0] == names[1] != names[2]
    os.rename(tmp_path / "a", tmp_path / "mounted elsewhere")
    assert opened(tmp_path / "mounted elsewhere").name == names[0]


async def test_what_another_process_has_finished_is_not_written_again(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """It was open when this process looked; then it was delivered, and its results were fetched and deleted."""
    watched = Watched(valkey, tmp_path)
    async with AsyncClient(valkey_url) as client:
        work, name, entry = await begun(client, watched, tmp_path / "files")
        run(valkey, inbox.done(name, entry, forget=True))
        await work.take_forward(entry, lambda: False)
    assert watched.batches() == []


async def test_what_held_an_object_up_is_over_once_another_process_has_finished_it(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    watched = Watched(valkey, tmp_path)
    full = tmp_path / "files"
    full.touch()  # no folder: nothing can be written there
    async with AsyncClient(valkey_url) as client:
        work, name, entry = await begun(client, watched, full)
        running = asyncio.create_task(work.run(0.01))
        while not work.trouble:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        run(valkey, inbox.done(name, entry, forget=True))
        while work.trouble:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.usefixtures("sweeper")
def test_a_disk_that_is_not_mounted_gets_no_results(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """An empty folder is in its place; then the disk is there again."""
    watched, away = Watched(valkey, tmp_path), tmp_path / "away"
    with SourcesProcess(valkey_url, tmp_path, watched.table):
        watched.put("a.jsonl", [GOOD])
        assert within(lambda: waiting(valkey) == 1)
        os.rename(watched.root, away)
        watched.root.mkdir()
        with Serving(valkey):
            assert within(lambda: watched.batches()[0].ended)
        assert within((watched.root / "inbox").exists), "it is served as a folder of its own"
        assert watched.open()
        assert list(watched.outbox.rglob("*.jsonl")) == []
        os.rename(watched.root, tmp_path / "below")
        os.rename(away, watched.root)
        assert within(lambda: watched.delivered("a"))
    assert len(watched.lines("a.jsonl")) == 1
