"""A compacted stream that is moved to a file is read as before, and its file goes when it goes."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.stream import BLOCK
from producers.errors import ResultUnavailable, TaskNotFound
from producers.store import files, protocol
from producers.store.blobs import Blobs, open_blobs
from producers.store.references import Reference
from producers.sweeper.compact import Compacted, Offload, compact
from producers.sweeper.retention import remove_files
from tests.aws import Aws
from tests.exhaustive import few
from tests.processes import free_port
from tests.processes import valkey as own_valkey
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker
from tests.producers.store.test_s3 import bucket_of, put
from tests.producers.sweeper.test_compact import events, made, squeeze


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "files")
    aws: Aws = request.getfixturevalue("aws")
    return bucket_of(aws)


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return open_blobs(tmp_path / "files")


async def moved(client: AsyncClient, blobs: Blobs, least: int = 1) -> Compacted:
    return await compact(client, 0, Offload(blobs, least))


def reference(valkey: Redis, task_id: str) -> Reference:
    return Reference.parse(text(valkey.hget(keys.result(task_id), "blob") or b""))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("count", "n"), few([(5, 2), (BLOCK - 1, 1), (BLOCK + 7, 1), (2 * BLOCK + 7, 1)], (5, 2), (BLOCK + 7, 1))
)
def test_every_client_reads_it_from_every_position(
    client: Face, worker: FakeWorker, valkey: Redis, valkey_url: str, place: str, count: int, n: int
) -> None:
    task_id = made(client, worker, count, n=n)
    handle = client.get(task_id)
    whole, result = list(handle.stream()), handle.result()
    assert squeeze(valkey_url, Offload(open_blobs(place), 1)).moved == 1
    assert not valkey.exists(keys.stream(task_id))
    assert valkey.hkeys(keys.result(task_id)) == [b"blob"], "the store has the reference alone"
    assert handle.result() == result
    for start in sorted({0, 1, BLOCK - 1, BLOCK, count, len(whole), len(whole) + BLOCK}):
        assert list(handle.stream(start)) == whole[start:]


async def test_small_results_stay_in_the_store(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, blobs: Blobs
) -> None:
    small, large = made(aclient, worker, 3), made(aclient, worker, BLOCK)
    done = await moved(aclient, blobs, least=2000)
    assert (done.streams, done.moved) == (2, 1)
    assert valkey.hkeys(keys.result(small)) == [b"0"]
    assert valkey.hkeys(keys.result(large)) == [b"blob"]


async def test_the_file_goes_with_the_record_and_not_before(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, blobs: Blobs, tmp_path: Path
) -> None:
    task_id = made(aclient, worker, 3)
    await moved(aclient, blobs)
    name = reference(valkey, task_id).name
    assert (await remove_files(aclient.store, blobs)).left == 0
    due = valkey.zscore(keys.FILE_NOTES, name) + files.NOTED_S  # type: ignore[operator]
    assert 0 < due - (time.time() + valkey.ttl(keys.result(task_id))) < 70
    valkey.zadd(keys.FILE_NOTES, {name: int(time.time()) - files.NOTED_S})  # the time has passed
    assert (await remove_files(aclient.store, blobs)).left == 1
    assert names(tmp_path / "files") == set()
    assert not valkey.exists(keys.FILE_NOTES)


@pytest.mark.parametrize("how", ["deleted", "used anew", "written with its batch"])
async def test_the_file_of_a_task_that_is_removed_goes_at_once(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, blobs: Blobs, tmp_path: Path, how: str
) -> None:
    task_id = made(aclient, worker, 3)
    await moved(aclient, blobs)
    if how == "deleted":
        run(valkey, protocol.delete(task_id, "x"))
    elif how == "used anew":
        valkey.delete(keys.task(task_id))
        run(valkey, protocol.admit(task_id, "n", int(valkey.time()[0]) * 1000, {"task": "{}", "n": 1}))
    else:
        valkey.hset(keys.task(task_id), "batch", "batch_1")
        run(valkey, batches_drop("batch_1", task_id))
    assert not valkey.exists(keys.result(task_id))
    assert (await remove_files(aclient.store, blobs)).left == 1
    assert names(tmp_path / "files") == set()


def batches_drop(batch_id: str, task_id: str) -> Any:
    from producers.store import batches

    return batches.drop(batch_id, [task_id])


async def test_two_sweepers_at_once_leave_one_file_each(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, blobs: Blobs, tmp_path: Path
) -> None:
    ids = [made(aclient, worker, 20) for _ in range(30)]
    whole = [await events(aclient, task_id) for task_id in ids]
    await asyncio.gather(moved(aclient, blobs), moved(aclient, blobs))
    assert names(tmp_path / "files") == {reference(valkey, task_id).name for task_id in ids}
    assert [await events(aclient, task_id) for task_id in ids] == whole


async def test_a_sweeper_that_dies_before_compact_leaves_the_stream_and_a_note(
    aclient: AsyncClient,
    worker: FakeWorker,
    valkey: Redis,
    blobs: Blobs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    task_id = made(aclient, worker, 3)
    whole = await events(aclient, task_id)

    class Killed(BaseException):
        pass

    def die(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(protocol, "compact", die)
        with pytest.raises(Killed):
            await moved(aclient, blobs)
    (dead,) = names(tmp_path / "files")
    assert valkey.zrange(keys.FILE_NOTES, 0, -1) == [dead.encode()]
    assert (await moved(aclient, blobs)).moved == 1
    valkey.zadd(keys.FILE_NOTES, {dead: int(time.time()) - files.NOTED_S})
    assert (await remove_files(aclient.store, blobs)).left == 1
    assert names(tmp_path / "files") == {reference(valkey, task_id).name}
    assert await events(aclient, task_id) == whole


async def test_compact_refuses_a_file_that_is_to_be_deleted(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    """Its writer slept for hours."""
    task_id = made(aclient, worker, 3)
    settled = int(valkey.hget(keys.task(task_id), "settled") or 0)  # type: ignore[arg-type]
    call = protocol.compact(task_id, settled, 4, [], Reference("/f", "result-1", (9,)))
    assert run(valkey, call) == b"late"
    valkey.zadd(keys.FILE_NOTES, {"result-1": 0})
    assert run(valkey, call) == b"late"
    assert valkey.exists(keys.stream(task_id))
    valkey.zadd(keys.FILE_NOTES, {"result-1": 5})
    assert [run(valkey, call) for _ in range(2)] == [b"done", b"done"]
    assert run(valkey, protocol.compact(task_id, settled, 4, [], Reference("/f", "result-2", (9,)))) == b"other"


async def test_a_blob_that_was_noted_anew_is_not_removed(aclient: AsyncClient, valkey: Redis, blobs: Blobs) -> None:
    """A sweeper had found it due, and then slept."""
    put(blobs, "result-1")
    valkey.zadd(keys.FILE_NOTES, {"result-1": int(time.time())})
    assert not await files.remove_left_behind(aclient.store, blobs, "result-1")
    assert blobs.size("result-1") == 0


async def test_a_bucket_that_is_away_or_a_full_store_keeps_results_in_the_store(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    task_id = made(aclient, worker, 3)
    whole = await events(aclient, task_id)
    away = open_blobs(f"s3://files?region=us-east-1&endpoint_url=http://127.0.0.1:{free_port()}")
    done = await moved(aclient, away)
    assert (done.streams, done.moved) == (1, 0)
    assert await events(aclient, task_id) == whole


async def test_where_the_store_has_no_memory_left_compacting_makes_some(tmp_path: Path) -> None:
    with own_valkey() as (url, redis):
        raw = Redis.from_url(url)
        async with AsyncClient(url) as client:
            task_id = made(client, FakeWorker(raw), BLOCK)
            run(raw, protocol.compact("none", 0, 0, []))  # the script is known
            redis.config_set("maxmemory-policy", "noeviction")
            redis.config_set(
                "maxmemory", redis.info("memory")["used_memory"] // 2
            )  # it has none however much buffers shrink
            done = await moved(client, open_blobs(tmp_path))
            assert (done.streams, done.moved) == (1, 0)
            assert not raw.exists(keys.stream(task_id))


async def test_a_client_that_cannot_reach_the_file_is_told_where_it_is(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, valkey_url: str, blobs: Blobs, tmp_path: Path
) -> None:
    task_id = made(aclient, worker, 3)
    whole = await events(aclient, task_id)
    await moved(aclient, blobs)
    shutil.move(tmp_path / "files", elsewhere := tmp_path / "mounted")
    with pytest.raises(ResultUnavailable, match=f"is in {tmp_path}/files, as result-.*files_dir"):
        await events(aclient, task_id)
    async with AsyncClient(valkey_url, files_dir=str(elsewhere)) as told:
        assert await events(told, task_id) == whole
    valkey.delete(keys.task(task_id))
    with pytest.raises(TaskNotFound):
        await events(aclient, task_id)
