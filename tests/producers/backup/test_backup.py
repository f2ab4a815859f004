"""A backup of a system and a system of the backup: what is there again, what comes again, and what does not."""

from __future__ import annotations

import asyncio
import json
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.admin import keys as api_keys_admin
from producers.backup import journal as journals
from producers.backup import restore, sealed, take
from producers.backup.archive import Archive, Manifest, check
from producers.backup.restore import Choices, NotRestored, Servers
from producers.backup.sealed import Damaged
from producers.backup.take import NotTaken
from producers.broker.connect import check_broker
from producers.broker.redis import keys as broker_keys
from producers.client.leases import lead
from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.sealing import Keyring, new_key
from producers.contract.stream import encode_rows
from producers.contract.task import Task
from producers.store import batches, epoch, files, outbox, protocol, shadows
from producers.store.access import api_keys
from producers.store.access.audit import Actor
from producers.store.blobs import Blobs, FolderBlobs, open_blobs
from producers.store.chunks import chunk_id
from producers.store.usage.ledger import fold
from producers.sweeper import tasks
from producers.sweeper.compact import Offload, compact
from producers.sweeper.retention import erase
from producers.sweeper.shadows import Shadows
from producers.sweeper.sweeper import ForeignWorkers, SweeperSettings
from producers.sweeper.sweeper import lead as sweep_as_leader
from tests.aws import Aws
from tests.producers.backup.conftest import Systems
from tests.producers.conftest import CARD, POOL, QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.receiver import Receiver
from tests.waiting import auntil, until
from tests.webhooks_process import WebhooksProcess

WEBHOOK = {"url": "https://example.com/hook"}


async def submit(systems: Systems, **task: Any) -> str:
    return (await systems.old.submit(model="tiny", **{"prompt": [1, 2], "max_tokens": 8, **task})).id


def entries(redis: Redis, task_id: str) -> list[Any]:
    return [json.loads(fields[b"e"]) for _, fields in redis.xrange(keys.stream(task_id))]


def counts(redis: Redis) -> dict[bytes, Any]:
    """What waits, by its own counts."""
    names = (keys.WAITING, keys.WAITING_TOKENS, keys.WAITING_TENANTS, keys.WAITING_KEYS)
    return {name: redis.hgetall(name) for name in names}


async def test_each_task_goes_on_where_it_was(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    waits = await submit(systems, tenant="a")
    runs = await submit(systems, tenant="b")
    worker.claim(runs)
    worker.append(runs, 0, ["x", "y"])
    done = await submit(systems, tenant="a", ttl=3600)
    worker.serve(done, ["p", "q"])
    unsettled = await submit(systems)
    worker.claim(unsettled)
    worker.finish(unsettled, [0])
    cancelled = await submit(systems)
    worker.claim(cancelled)
    await systems.old.get(cancelled).cancel()
    before = counts(valkey)
    manifest = await systems.back_up()
    assert manifest.counts["task"] == 5
    await systems.restore()
    assert counts(elsewhere) == before
    assert elsewhere.hget(keys.EPOCH, "state") == b"open"
    assert not elsewhere.exists(keys.RESTORE)
    # What had ended is there, with its own time to live; nothing of it is sent.
    assert entries(elsewhere, done) == entries(valkey, done)
    assert 3500 < elsewhere.ttl(keys.task(done)) <= 3600
    assert elsewhere.zscore(keys.SETTLED, done) == float(valkey.hget(keys.task(done), "settled"))
    assert elsewhere.zscore(keys.UNSETTLED, unsettled) is not None
    assert elsewhere.hget(keys.task(unsettled), "owner") is None
    # What had not is sent, and goes on behind its tokens, with no death counted.
    sent = await tasks.send_unsent(systems.new)
    assert (sent.sent, sent.failed) == (3, 0)
    other = FakeWorker(elsewhere, "other")
    assert {other.take(QUEUE) for _ in range(3)} == {waits, runs, cancelled}
    claimed = other.claim(runs)
    assert claimed.answer == "go"
    assert claimed.record is not None
    assert (claimed.record.nexts, claimed.record.deaths) == ([2], 0)
    assert other.append(runs, 2, ["z"]) == ("ok", 3)
    assert other.finish(runs, [3])[0] == "won"
    assert [entry[3] for entry in entries(elsewhere, runs)[:-1]] == ["x", "y", "z"]
    assert other.claim(waits).answer == "go"
    settled = other.claim(cancelled)
    assert settled.answer == "settle"
    assert settled.record is not None
    assert settled.record.status == "cancelled"
    # The old worker's late calls change nothing here.
    append = protocol.append([protocol.Append(runs, worker.claims[runs], 0, 3, ['[0,3,9,"?"]'])])
    assert protocol.read_append(run(elsewhere, append))[0][0] in ("other", "gone")
    # Lists and tenants are apart.
    assert {text(name) for name in elsewhere.zrange(keys.tasks("a"), 0, -1)} == {waits, done}
    assert {text(name) for name in elsewhere.zrange(keys.tasks("b"), 0, -1)} == {runs}
    assert elsewhere.smembers(keys.TENANTS) == {b"a", b"b"}


async def test_a_copy_for_another_version_is_in_no_list_and_goes(
    systems: Systems, valkey: Redis, elsewhere: Redis
) -> None:
    task_id = await submit(systems)
    copy, now = shadows.copy_id(task_id), int(valkey.time()[0]) * 1000
    fields = {"task": "{}", "model": "tiny", "queue": QUEUE, "tier": "batch", "n": 1, "tokens": 9}
    run(valkey, protocol.admit(copy, "n", now, {**fields, **shadows.COPY, "shadow_of": task_id}))
    await systems.back_up()
    await systems.restore()
    assert elsewhere.exists(keys.task(copy))
    assert elsewhere.zscore(keys.REQUESTS, copy) is None
    elsewhere.hincrby(keys.task(copy), "created", -3_600_000)
    await Shadows(systems.new).sweep()
    assert not elsewhere.exists(keys.task(copy), keys.SHADOW_COPIES)
    assert elsewhere.exists(keys.task(task_id))


async def test_a_task_in_chunks_goes_on_and_a_deleted_one_is_gone_with_its_chunks(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    embedder = {**CARD, "capabilities": ["embed"], "pooling": {"dimensions": 1}}
    valkey.hset(keys.MODELS, "tiny", json.dumps(embedder))
    await systems.journal().keep()
    task = {"kind": "embed", "input": ["x"] * 300, "prompt": None, "max_tokens": None}
    goes_on, deleted = [await submit(systems, **task) for _ in range(2)]
    first, second = (chunk_id(goes_on, number) for number in range(2))
    worker.claim(first)
    worker.finish(first, [0], result=encode_rows([[1.0]] * 256))
    await systems.back_up()
    await systems.old.get(deleted).delete()
    await systems.journal().keep()
    await systems.restore(with_journal=True)
    assert not elsewhere.exists(*(keys.task(chunk_id(deleted, number)) for number in range(2)))
    assert await tasks.send_unsent(systems.new) == tasks.Swept(sent=1)
    assert {text(name) for name in elsewhere.zrange(keys.TASKS, 0, -1)} == {goes_on}
    assert elsewhere.zrange(keys.REQUESTS, 0, -1) == []
    assert [text(name) for name in elsewhere.zrange(keys.PARENTS, 0, -1)] == [goes_on]
    other = FakeWorker(elsewhere, "other")
    assert other.take(QUEUE) == second
    assert other.claim(second).answer == "go"
    other.finish(second, [0], result=encode_rows([[2.0]] * 44))
    rows = (await systems.new.get(goes_on).result()).rows
    assert [row.tolist() for row in rows or ()] == [[1.0]] * 256 + [[2.0]] * 44


async def test_a_task_in_chunks_that_ends_during_the_backup_is_whole(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks were read before they ended, or are not among the names; it is read afterwards."""
    embedder = {**CARD, "capabilities": ["embed"], "pooling": {"dimensions": 1}}
    valkey.hset(keys.MODELS, "tiny", json.dumps(embedder))
    parent = await submit(systems, kind="embed", input=["x"] * 300, prompt=None, max_tokens=None)
    first, second = (chunk_id(parent, number) for number in range(2))
    scan = take.Backup._scan

    async def with_work(self: take.Backup, pattern: str, keep: Any) -> None:
        if pattern != keys.task("*"):
            return await scan(self, pattern, keep)
        await keep([keys.task(first)])
        for number, name in enumerate((first, second)):
            worker.claim(name)
            worker.finish(name, [0], result=encode_rows([[1.0 + number]] * (256, 44)[number]))
        await keep([keys.task(parent)])

    monkeypatch.setattr(take.Backup, "_scan", with_work)
    await systems.back_up()
    await systems.restore()
    result = await systems.new.get(parent).result()
    assert [row.tolist() for row in result.rows or ()] == [[1.0]] * 256 + [[2.0]] * 44
    assert {elsewhere.hget(keys.task(name), "status") for name in (first, second)} == {b"completed"}


async def test_a_task_whose_caller_waited_is_cancelled(systems: Systems, elsewhere: Redis) -> None:
    task = Task.parse({"model": "tiny", "prompt": [1], "max_tokens": 4})
    waited_for = await systems.old.admit(task, str(uuid.uuid4()), {})
    await systems.back_up()
    await systems.restore()
    over = elsewhere.zscore(keys.READERS, waited_for.id)
    assert over is not None
    await tasks.send_unsent(systems.new)
    assert run(elsewhere, protocol.unread(waited_for.id, int(over)))[2] == b"cancelled"


@pytest.mark.parametrize("deadlines", ["shift", "keep"])
async def test_deadlines_move_or_stay(systems: Systems, valkey: Redis, elsewhere: Redis, deadlines: str) -> None:
    task_id = await submit(systems, timeout=600)
    await systems.back_up()
    deadline = int(valkey.hget(keys.task(task_id), "deadline"))
    run_ = await systems.restore(deadlines=deadlines)
    moved = int(elsewhere.hget(keys.task(task_id), "deadline"))
    assert moved == deadline + (run_.plan.shift if deadlines == "shift" else 0)
    assert run_.plan.shift > 0 if deadlines == "shift" else run_.plan.shift == 0
    assert elsewhere.zscore(keys.DEADLINES, task_id) == moved


async def test_a_celery_task_that_had_begun_fails_unless_the_broker_has_its_message(
    systems: Systems, worker: FakeWorker, elsewhere: Redis, elsewhere_url: str
) -> None:
    plain = protocol.claim(
        "plain", "c", worker.incarnation, POOL, plain={"model": "tiny", "queue": QUEUE, "n": 1, "task": "{}"}
    )
    run(worker.redis, plain)
    worker.redis.lpush(keys.model_queue("tiny"), "{}")
    manifest = await systems.back_up()
    assert manifest.celery == {keys.model_queue("tiny"): 1}
    await systems.restore()
    record = elsewhere.hgetall(keys.task("plain"))
    assert record[b"status"] == b"failed"
    assert json.loads(record[b"error"])["code"] == "restored"
    assert elsewhere.zscore(keys.UNSETTLED, "plain") is not None
    elsewhere.flushall()
    await systems.restore(broker_kept=True, stopped=True)
    assert elsewhere.hget(keys.task("plain"), "status") == b"queued"
    assert elsewhere.zscore(keys.SUBMITTING, "plain") is None
    again = protocol.claim("plain", "c2", FakeWorker(elsewhere, "w2").incarnation, POOL, plain={})
    assert protocol.read_claim("plain", run(elsewhere, again)).answer == "go"


async def test_events_come_again_with_their_ids_and_say_so(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    told, later, runs = [await submit(systems, webhook=WEBHOOK) for _ in range(3)]
    for task_id in (told, later):
        worker.serve(task_id)
    (first, *_) = outbox.read_take(run(valkey, outbox.take("h", 1, 60_000))).rows
    run(valkey, outbox.delivered(first, "h", outbox.Attempt(1, 1, 200)))
    await systems.back_up()
    # After the backup the second event is delivered, and the third task ends.
    worker.serve(runs)
    at_old = {row.object: row for row in outbox.read_take(run(valkey, outbox.take("h", 9, 60_000))).rows}
    await systems.restore()
    assert elsewhere.hgetall(keys.WEBHOOKS_WAITING) == {b"": b"1"}
    assert elsewhere.zcard(keys.WEBHOOKS_DELIVERED) == 1
    (again,) = outbox.read_take(run(elsewhere, outbox.take("h", 9, 60_000))).rows
    assert {first.object, again.object} == {told, later}
    assert again.restored
    assert again.webhook_id == at_old[again.object].webhook_id
    await tasks.send_unsent(systems.new)
    FakeWorker(elsewhere, "other").serve(runs)
    (ended,) = outbox.read_take(run(elsewhere, outbox.take("h", 9, 60_000))).rows
    assert (ended.object, ended.webhook_id, ended.restored) == (runs, at_old[runs].webhook_id, True)


async def test_a_receiver_is_told_that_an_event_comes_again(
    systems: Systems, worker: FakeWorker, elsewhere: Redis, elsewhere_url: str
) -> None:
    with Receiver() as receiver:
        task_id = await submit(systems, webhook={"url": f"{receiver.url}/ok"})
        worker.serve(task_id)
        await systems.back_up()
        await systems.restore()
        with WebhooksProcess(elsewhere_url):
            until(lambda: receiver.events)
            (event,) = receiver.events
    assert event.headers["penstock-restored"] == "1"
    assert event.headers["webhook-id"].startswith("evt_")


async def test_an_event_of_what_has_not_happened_is_dropped(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task ends between the reading of the record and that of the row."""
    task_id = await submit(systems, webhook=WEBHOOK)
    stages_of = take.Backup._stages

    def stages(self: take.Backup) -> Any:
        async def end() -> None:
            worker.serve(task_id)

        all_of = list(stages_of(self))
        return (*all_of[:3], end, *all_of[3:])

    monkeypatch.setattr(take.Backup, "_stages", stages)
    manifest = await systems.back_up()
    assert manifest.counts["row"] == 1
    await systems.restore()
    assert elsewhere.zcard(keys.WEBHOOKS_DUE) == 0
    assert not elsewhere.xlen(keys.LEDGER)  # its end counts once: when it ends again
    await tasks.send_unsent(systems.new)
    FakeWorker(elsewhere, "other").serve(task_id)
    assert elsewhere.zcard(keys.WEBHOOKS_DUE) == 1
    assert elsewhere.xlen(keys.LEDGER) == 1


# ---- the journal ---------------------------------------------------------------------------------------------------


async def make_key(systems: Systems, tenant: str = "a", **more: Any) -> api_keys.Key:
    key, _ = await api_keys_admin.create(systems.old.store, {"tenant": tenant, **more}, Actor("test"))
    return key


async def key_states(systems: Systems) -> dict[str, str]:
    return {key.id: key.state(0) for key in await api_keys.every(systems.new.store)}


async def test_what_was_revoked_deleted_and_spent_since_stays_so(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    journal = systems.journal()
    await journal.keep()
    kept, revoked, later = [await make_key(systems) for _ in range(3)]
    deleted, stays, ends = [await submit(systems, tenant="a") for _ in range(3)]
    worker.serve(stays)
    await systems.back_up()
    await api_keys_admin.turn(systems.old.store, revoked.id, "revoke", Actor("test"))
    made = await make_key(systems)
    await systems.old.get(deleted).delete()
    worker.serve(ends)
    spent_later = await submit(systems, tenant="a")
    worker.serve(spent_later)
    await journal.keep()
    run_ = await systems.restore(with_journal=True)
    assert run_.plan.confirmed
    assert await key_states(systems) == {
        kept.id: "active",
        later.id: "active",
        revoked.id: "revoked",
        made.id: "active",
    }
    assert not elsewhere.exists(keys.task(deleted))
    late = protocol.admit(deleted, "n", 2**52, {"task": "{}", "model": "tiny"})
    assert text(run(elsewhere, late)) == "erased"
    rows = [fields[b"id"].decode() for _, fields in elsewhere.xrange(keys.LEDGER)]
    # Of what runs again (`ends`) its next end counts; of what was accepted later, what it used.
    assert sorted(rows) == sorted([stays, spent_later, deleted])


async def test_without_a_journal_keys_let_nobody_in_until_they_are_confirmed(
    systems: Systems, elsewhere: Redis
) -> None:
    active, disabled = await make_key(systems), await make_key(systems)
    await api_keys_admin.turn(systems.old.store, disabled.id, "disable", Actor("test"))
    await systems.back_up()
    run_ = await systems.restore()
    assert not run_.plan.confirmed
    assert await key_states(systems) == {active.id: "disabled", disabled.id: "disabled"}
    for key in (active, disabled):
        await api_keys_admin.turn(systems.new.store, key.id, "confirm", Actor("test"))
    assert await key_states(systems) == {active.id: "active", disabled.id: "disabled"}


async def test_a_journal_with_a_gap_confirms_nothing(systems: Systems, worker: FakeWorker, valkey: Redis) -> None:
    key = await make_key(systems)
    await systems.journal().keep()
    await systems.back_up()
    worker.serve(await submit(systems))
    run(valkey, fold(0))  # by a sweeper that keeps no journal
    await systems.journal().keep()
    run_ = await systems.restore(with_journal=True)
    assert run_.plan.since is not None
    assert run_.plan.since.gaps
    assert await key_states(systems) == {key.id: "disabled"}


async def test_a_journal_that_began_after_the_backup_confirms_nothing(systems: Systems) -> None:
    key = await make_key(systems)
    await systems.back_up()
    await systems.journal().keep()
    await systems.restore(with_journal=True)
    assert await key_states(systems) == {key.id: "disabled"}


async def test_a_pruned_journal_still_has_all_that_a_kept_backup_needs(
    systems: Systems, monkeypatch: pytest.MonkeyPatch, elsewhere: Redis
) -> None:
    """What was revoked and deleted since stays so, as before; what was before is in the backup."""
    journal, blobs = systems.journal(), open_blobs(str(systems.folder / "journal"))
    before, since = [await make_key(systems) for _ in range(2)]
    gone, deleted = [await submit(systems) for _ in range(2)]
    now = journals.ms
    with monkeypatch.context() as long_ago:
        long_ago.setattr(journals, "ms", lambda time: now(time) - 3_600_000)
        await journal.keep()
        await api_keys_admin.turn(systems.old.store, before.id, "revoke", Actor("test"))
        await systems.old.get(gone).delete()
        await journal.keep()
    old = set(blobs.names(journals.PREFIX))
    await make_key(systems)
    await journal.keep()
    manifest = await systems.back_up()
    await api_keys_admin.turn(systems.old.store, since.id, "revoke", Actor("test"))
    await systems.old.get(deleted).delete()
    await journal.keep()
    assert journals.prune(blobs, [manifest], dry_run=True).removed == len(old) == 2
    assert old <= set(blobs.names(journals.PREFIX))
    pruned = journals.prune(blobs, [manifest])
    assert (pruned.removed, pruned.remaining) == (2, 2)
    assert not old & set(blobs.names(journals.PREFIX))
    run_ = await systems.restore(with_journal=True)
    assert run_.plan.confirmed
    states = await key_states(systems)
    assert (states[before.id], states[since.id]) == ("revoked", "revoked")
    assert not elsewhere.exists(keys.task(deleted), keys.task(gone))


def written(blobs: Blobs, *files: tuple[str, int]) -> None:
    """Files of a journal, by epoch and time."""
    for epoch_id, at in files:
        sealed.write(blobs, f"{journals.PREFIX}{epoch_id}-{at:013d}-aa", [], Keyring())


def times(blobs: Blobs) -> set[tuple[str, int]]:
    return {
        (name.split("-")[1], int(name.split("-")[2])) for name in blobs.names(journals.PREFIX) if "junk" not in name
    }


@pytest.mark.parametrize(
    ("kept", "left"),
    [
        # (epoch, beginning, has ended) of each backup
        ([("", 500, True)], {("0", 380), ("0", 600), ("e2", 700), ("e2", 800)}),
        ([("", 500, True), ("", 300, True)], {("0", 200), ("0", 380), ("0", 600), ("e2", 700), ("e2", 800)}),
        ([("", 500, True), ("", 300, False)], {("0", 200), ("0", 380), ("0", 600), ("e2", 700), ("e2", 800)}),
        ([("e2", 900, True)], {("e2", 800)}),
        ([("e2", 900, True), ("", 500, True)], {("0", 380), ("0", 600), ("e2", 800)}),
        ([("e2", 900, False), ("", 500, True)], {("0", 380), ("0", 600), ("e2", 700), ("e2", 800)}),
    ],
)
def test_a_journal_is_kept_for_every_backup_that_is_kept(
    tmp_path: Path, kept: list[tuple[str, int, bool]], left: set[tuple[str, int]]
) -> None:
    """From two minutes before each began on, in the epoch of each; and what no whole backup can have."""
    blobs, minute = open_blobs(str(tmp_path)), 600
    scale = journals.MARGIN_MS // 120
    files = [("0", 100), ("0", 200), ("0", 380), ("0", 600), ("e2", 700), ("e2", 800)]
    written(blobs, *((epoch_id, at * scale) for epoch_id, at in files))
    sealed.write(blobs, f"{journals.PREFIX}junk", [], Keyring())
    manifests = [
        Manifest("b", began * scale, "s", "b", "v", epoch=epoch_id, ended=began * scale + minute if ended else 0)
        for epoch_id, began, ended in kept
    ]
    pruned = journals.prune(blobs, manifests)
    assert {(epoch_id, at // scale) for epoch_id, at in times(blobs)} == left
    assert (pruned.removed, pruned.remaining) == (len(files) - len(left), len(left))
    assert journals.prune(blobs, manifests).removed == 0
    assert f"{journals.PREFIX}junk" in blobs.names(journals.PREFIX)


def test_no_journal_is_pruned_before_a_backup_has_ended(tmp_path: Path) -> None:
    blobs = open_blobs(str(tmp_path))
    written(blobs, ("0", 1))
    with pytest.raises(ValueError, match="none of the backups that are kept has ended"):
        journals.prune(blobs, [Manifest("b", 10**9, "s", "b", "v")])
    assert times(blobs) == {("0", 1)}


async def test_an_erasure_leaves_the_store_once_it_is_in_the_journal(systems: Systems, valkey: Redis) -> None:
    await systems.journal().keep()
    task_id = await submit(systems)
    await systems.old.get(task_id).delete()
    valkey.zadd(keys.ERASING, {task_id: 1})
    await erase(systems.old)  # by a sweeper without one
    assert valkey.zscore(keys.ERASING, task_id) is not None
    await erase(systems.old, systems.journal())
    assert valkey.zscore(keys.ERASING, task_id) is None
    assert any(b"erased" in b"".join(_plain(path)) for path in (systems.folder / "journal").iterdir() if path.is_file())


def _plain(path: Any) -> Iterator[bytes]:
    yield from sealed.read(FolderBlobs(path.parent), path.name, Keyring())


async def test_a_budget_is_what_was_spent_less_what_runs_again(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    journal = systems.journal()
    await journal.keep()
    account = keys.account("k1")
    reserved = json.dumps({"accounts": [account], "estimate": 9, "tokens": 40, "money": "0"})
    ids = [await submit(systems) for _ in range(2)]
    for task_id in ids:
        valkey.hset(keys.task(task_id), mapping={"key": "k1", "reserved": reserved})
    month = 12 * (int(valkey.time()[0]) // 31556952)  # any month: set by the first end
    valkey.hset(account, mapping={"open": 2, "reserved": 80, "pledged": 0, "spent": 0, "paid": 0, "month": month})
    await systems.back_up()
    worker.serve(ids[0], ["a", "b"])
    await journal.keep()
    assert int(valkey.hget(account, "spent")) == 5  # 3 of the prompt, 2 of the output
    await systems.restore(with_journal=True)
    found = {text(name): int(value) for name, value in elsewhere.hgetall(account).items()}
    assert (found["spent"], found["open"], found["reserved"]) == (0, 2, 80)
    await tasks.send_unsent(systems.new)
    FakeWorker(elsewhere, "other").serve(ids[0], ["a", "b"])
    assert int(elsewhere.hget(account, "spent")) == 5


# ---- results, files and batches -------------------------------------------------------------------------------------


async def test_files_and_moved_results_are_copied(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    task_id = await submit(systems, ttl=3600)
    worker.serve(task_id, ["x"] * 50)
    moved = await compact(systems.old, -1, Offload(systems.files, 1))
    assert moved.moved == 1
    file_id = files.new_id(1)
    await files.note(systems.old.store, file_id)
    with systems.files.writer(file_id) as writer:
        writer.write(b"content")
        writer.commit()
    run(valkey, files.file_made(files.File(file_id, 7, "x", "batch", 1, tenant="a")))
    await systems.back_up()
    await systems.restore()
    assert systems.new_files.read(file_id, 0, 99) == b"content"
    assert [one.id for one in await files.listed(systems.new.store, tenant="a", limit=9)] == [file_id]
    (systems.folder / "files").rename(systems.folder / "gone")
    result = await systems.new.get(task_id).result()
    assert result.choices[0].text == "x" * 50


def make_batch(systems: Systems, valkey: Redis, total: int, expanded: int) -> str:
    """A batch with an input of `total` lines, of which some are tasks."""
    file_id, batch_id = files.new_id(1), batches.new_id(int(valkey.time()[0]) * 1000)
    lines = [json.dumps({"custom_id": str(k), "body": {}}).encode() + b"\n" for k in range(total)]
    lines.insert(1, b"\n")  # a blank one is none
    with systems.files.writer(file_id) as writer:
        writer.write(b"".join(lines))
        writer.commit()
    valkey.zadd(keys.FILE_NOTES, {file_id: 9})
    run(valkey, files.file_made(files.File(file_id, 1, "x", "batch", 1, tenant="a")))
    about = {"endpoint": "/v1/completions", "input_file": file_id, "completion_window": "24h", "tenant": "a"}
    run(valkey, batches.create(batch_id, 86400, about))
    run(valkey, batches.begin(batch_id, total))
    expand(valkey, batch_id, [line for line in lines if line.strip()], 0, expanded)
    return batch_id


def offset(lines: list[bytes], line: int) -> int:
    """Behind so many lines of the input of `make_batch`, which has a blank one behind the first."""
    return sum(map(len, lines[:line])) + (line > 1)


def expand(valkey: Redis, batch_id: str, lines: list[bytes], first: int, count: int) -> None:
    fields = {
        "task": "{}",
        "model": "tiny",
        "version": POOL.version,
        "queue": QUEUE,
        "tier": "batch",
        "n": 1,
        "tokens": 4,
    }
    entries = [
        batches.Entry(offset(lines, line + 1), batches.task_id(batch_id, line), {**fields, "line": line})
        for line in range(first, first + count)
    ]
    run(
        valkey,
        batches.expand(batch_id, batches.Block(first, entries), {"origin": "batch", "batch": batch_id, "tenant": "a"}),
    )


async def test_a_batch_is_made_whole_whenever_its_lines_were_read(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = make_batch(systems, valkey, 10, 6)
    lines = [json.dumps({"custom_id": str(k), "body": {}}).encode() + b"\n" for k in range(10)]
    ids = [batches.task_id(batch_id, line) for line in range(10)]
    for line in (0, 1, 2):
        worker.serve(ids[line])
    stages = take.Backup._stages

    def with_work(self: take.Backup) -> Any:
        async def between() -> None:
            """Lines 0 and 1 are written, and 6 and 7 are made and run, after the tasks were read."""
            run(valkey, batches.begin_parts(batch_id, ["part-1"]))
            with systems.files.writer("part-1") as writer:
                writer.write(b"results\n")
                writer.commit()
            part = batches.Part("output", "part-1", 8)
            run(valkey, batches.written(batch_id, batches.Written(0, 2, offset(lines, 2), 2, 0, 0, [part])))
            expand(valkey, batch_id, lines, 6, 2)
            worker.serve(ids[6])

        all_of = list(stages(self))
        return (*all_of[:3], between, *all_of[3:])

    monkeypatch.setattr(take.Backup, "_stages", with_work)
    await systems.back_up()
    await systems.restore()
    batch = await batches.read(systems.new.store, batch_id)
    assert batch is not None
    assert (batch.status, batch.count("written"), batch.count("line")) == ("in_progress", 2, 6)
    assert batch.count("offset") == offset(lines, 6)
    assert (batch.count("completed"), batch.count("failed")) == (3, 0)  # 0 and 1 in the part, and 2
    assert systems.new_files.read("part-1", 0, 99) == b"results\n"
    assert {text(name) for name in elsewhere.keys(keys.task("*"))} == {keys.task(ids[line]) for line in range(2, 6)}
    assert elsewhere.smembers(keys.open_batches("a")) == {batch_id.encode()}
    # The next lines are made where the cursor is.
    expand(elsewhere, batch_id, lines, 6, 4)
    assert elsewhere.exists(keys.task(ids[9]))
    counted = elsewhere.hgetall(keys.WAITING)
    assert counted[b"line"] == b"7"  # 3, 4, 5 and 6 to 9


async def test_backup_and_journal_may_be_in_a_bucket_encrypted(
    systems: Systems, worker: FakeWorker, aws: Aws, elsewhere: Redis
) -> None:
    aws.client("s3").create_bucket(Bucket="backups")
    systems.bucket = f"region=us-east-1&endpoint_url={aws.url}"
    file = systems.folder / "backup.key"
    file.write_text(new_key())
    systems.ring = sealed.read_keys(file)
    await systems.journal().keep()
    done, deleted = [await submit(systems, metadata={"a": "legible"}) for _ in range(2)]
    worker.serve(done, ["legible"])
    await systems.back_up()
    await systems.old.get(deleted).delete()
    await systems.journal().keep()
    objects = aws.client("s3").list_objects_v2(Bucket="backups")["Contents"]
    assert {each["Key"].partition("/")[0] for each in objects} == {"backup", "journal"}
    for each in objects:
        body = aws.client("s3").get_object(Bucket="backups", Key=each["Key"])["Body"].read()
        assert body.startswith(b"penstock-backup 1 ")
        assert zlib.compress(b"legible")[2:6] not in body
        assert b"legible" not in body
    with pytest.raises(Damaged, match="is encrypted with the key"):
        Archive(systems.place, Keyring()).read_manifest()
    await systems.restore(with_journal=True)
    assert entries(elsewhere, done)
    assert not elsewhere.exists(keys.task(deleted))


@pytest.mark.exhaustive  # the queues of two prefixes take long to make
async def test_tasks_on_sqs_are_sent_again_under_another_prefix(
    aws: Aws, valkey_url: str, valkey: Redis, elsewhere_url: str, elsewhere: Redis, model: str, tmp_path: Path
) -> None:
    valkey.hset(keys.POOLS, POOL.queue, json.dumps(asdict(POOL)))
    old_url, new_url = aws.broker("old-"), aws.broker("new-")
    async with AsyncClient(old_url, valkey_url) as old, AsyncClient(new_url, elsewhere_url) as new:
        for url, store in ((old_url, valkey_url), (new_url, elsewhere_url)):
            check_broker(url, store, POOL.queues[1:], make=True)
        task_id = (await old.submit(model="tiny", prompt=[1], max_tokens=4)).id
        archive, files = Archive(str(tmp_path / "backup"), Keyring()), FolderBlobs(tmp_path / "files")
        await take.Backup(old, archive, files, valkey_url, old_url).run()
        same = Servers(elsewhere_url, old_url)
        new_files = FolderBlobs(tmp_path / "new-files")
        with pytest.raises(NotRestored, match="its workers would take this one's tasks"):
            await restore.begin(new, archive, new_files, same, Choices(), Keyring())
        run_ = await restore.begin(new, archive, new_files, Servers(elsewhere_url, new_url), Choices(), Keyring())
        await run_.run()
        assert (await tasks.send_unsent(new)).sent == 1
        queues = aws.client("sqs").list_queues(QueueNamePrefix="new-")["QueueUrls"]
        found = [
            json.loads(message["Body"])["headers"]["id"]
            for queue in queues
            for message in aws.client("sqs").receive_message(QueueUrl=queue).get("Messages", ())
        ]
        assert found == [task_id]


# ---- damage, interruption, refusal -----------------------------------------------------------------------------------


async def test_a_damaged_backup_is_refused_and_nothing_is_written(systems: Systems, elsewhere: Redis) -> None:
    for _ in range(3):
        await submit(systems)
    await systems.back_up()
    for name in ("segment-000001", "manifest"):
        path = systems.folder / "backup" / name
        whole = path.read_bytes()
        for damaged in (whole[:-40], whole[:60] + bytes([whole[60] ^ 255]) + whole[61:]):
            path.write_bytes(damaged)
            with pytest.raises(Damaged):
                await systems.begin()
        path.unlink()
        with pytest.raises(Damaged):
            await systems.begin()
        path.write_bytes(whole)
    assert elsewhere.dbsize() == 0
    await systems.begin()


class Stop(Exception):
    """The process is killed here."""


async def test_a_backup_that_was_killed_goes_on(
    systems: Systems, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, elsewhere: Redis
) -> None:
    monkeypatch.setattr(take, "SEGMENT", 2000)
    monkeypatch.setattr(take, "SCAN", 3)
    ids = [await submit(systems) for _ in range(30)]
    put, writes = Archive.put, [0]

    def dying(self: Archive, name: str, chunks: Any) -> Any:
        writes[0] += 1
        if writes[0] % 3 == 0:
            raise Stop
        return put(self, name, chunks)

    monkeypatch.setattr(Archive, "put", dying)
    for _ in range(100):
        try:
            manifest = await systems.back_up()
            break
        except Stop:
            with pytest.raises(Damaged, match="has not ended"):
                systems.archive.read_manifest()
    assert writes[0] > 6
    monkeypatch.setattr(Archive, "put", put)
    with pytest.raises(NotTaken, match="whole backup already"):
        await systems.back_up()
    assert len(manifest.segments) > 3
    await systems.restore()
    assert {text(name) for name in elsewhere.zrange(keys.SUBMITTING, 0, -1)} == {*ids}
    assert not (systems.folder / "backup" / "progress").exists()


async def test_a_restore_that_was_killed_goes_on(
    systems: Systems,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    valkey: Redis,
    elsewhere: Redis,
    elsewhere_url: str,
) -> None:
    monkeypatch.setattr(take, "SEGMENT", 2000)
    monkeypatch.setattr(take, "SCAN", 3)
    ids = [await submit(systems, tenant="a") for _ in range(30)]
    for task_id in ids[:10]:
        worker.serve(task_id)
    await systems.back_up()
    ask, calls, after = restore.aexecute_many, [0], [4]

    async def dying(redis: Any, commands: Any) -> Any:
        calls[0] += 1
        if calls[0] > after[0]:
            raise Stop
        return await ask(redis, commands)

    monkeypatch.setattr(restore, "aexecute_many", dying)
    with pytest.raises(Stop):
        await systems.restore()
    assert elsewhere.hget(keys.EPOCH, "state") == b"restoring"
    assert run(elsewhere, lead("s", 1000)) == -1
    calls[0] = 0
    with pytest.raises(NotRestored, match="other options"):
        await systems.begin(deadlines="keep")
    deaths = 0
    while True:
        calls[0] = 0
        try:
            done = await systems.restore()
            break
        except Stop:
            deaths += 1
            after[0] += 1
    assert deaths > 3
    assert counts(elsewhere) == counts(valkey)
    assert {text(name) for name in elsewhere.zrange(keys.SUBMITTING, 0, -1)} == {*ids[10:]}
    assert elsewhere.xlen(keys.LEDGER) == 10
    assert text(elsewhere.hget(keys.EPOCH, "id")) == done.epoch
    assert elsewhere.hgetall(keys.kept("a")).keys() == valkey.hgetall(keys.kept("a")).keys()
    assert elsewhere.hgetall(keys.kept("a")) == valkey.hgetall(keys.kept("a"))


async def test_what_lives_where_a_backup_should_go_is_left_alone(
    systems: Systems, worker: FakeWorker, valkey: Redis, elsewhere: Redis
) -> None:
    await submit(systems)
    await systems.back_up()
    elsewhere.hset(keys.MODELS, "m", "{}")
    with pytest.raises(NotRestored, match="not empty"):
        await systems.begin()
    elsewhere.flushall()
    with systems.new_files.writer("file-1") as writer:
        writer.commit()
    with pytest.raises(NotRestored, match="place of files"):
        await systems.begin()
    systems.new_files.delete("file-1")
    with pytest.raises(NotRestored, match=r"workers hold leases.*fake"):
        await systems.begin(old=systems.old_url)
    worker.die()
    await systems.begin(old=systems.old_url)
    with pytest.raises(NotRestored, match="say --old-stopped"):
        await systems.begin(old="redis://127.0.0.1:1/0")
    elsewhere.hset(broker_keys.INCARNATIONS, "w", QUEUE)
    elsewhere.set(keys.lease("w"), "{}")
    with pytest.raises(NotRestored, match="workers hold leases"):
        await systems.begin()
    elsewhere.flushall()
    elsewhere.execute_command("SELECT", 3)
    elsewhere.hset(keys.MODELS, "m", "{}")
    elsewhere.execute_command("SELECT", 0)
    with pytest.raises(NotRestored, match="database 3"):
        await systems.begin()


async def test_who_began_in_another_epoch_gets_no_lease(elsewhere: Redis) -> None:
    lease = protocol.lease("w", "q", "{}", 60_000, take=True)
    assert run(elsewhere, lease) == 1
    assert run(elsewhere, lead("s", 60_000)) == 0
    elsewhere.hset(keys.EPOCH, mapping={"id": "e1", "state": "open"})
    assert run(elsewhere, lease) == epoch.OTHER
    assert run(elsewhere, lead("s", 60_000)) == epoch.OTHER
    assert run(elsewhere, protocol.lease("w", "q", "{}", 60_000, take=True, epoch="e1")) == 1
    assert run(elsewhere, lead("s", 60_000, epoch="e1")) == 0
    elsewhere.hset(keys.EPOCH, "state", "restoring")
    assert run(elsewhere, lead("s", 60_000, epoch="e1")) == epoch.OTHER


async def test_of_two_backups_to_one_place_the_later_goes_on(systems: Systems, monkeypatch: pytest.MonkeyPatch) -> None:
    await submit(systems)
    done, first = take.Backup._done, [True]

    async def with_another(self: take.Backup, stage: int, cursor: int) -> None:
        if first[0]:
            first[0] = False
            await systems.back_up()
        await done(self, stage, cursor)

    monkeypatch.setattr(take.Backup, "_done", with_another)
    with pytest.raises(NotTaken, match="another `penstock backup` writes to"):
        await systems.back_up()
    assert check(systems.archive).counts["task"] == 1


async def test_a_restored_systems_sweeper_does_not_lead_while_others_workers_live_at_its_broker(
    valkey_url: str, valkey: Redis, elsewhere_url: str, elsewhere: Redis, model: str
) -> None:
    """Broker and store are two servers, and the broker is the old system's, too."""
    settings = SweeperSettings(valkey_url, elsewhere_url, lease=0.1)
    valkey.hset(broker_keys.INCARNATIONS, mapping={"theirs": QUEUE, "ours": QUEUE})
    for name in ("theirs", "ours"):
        valkey.set(keys.lease(name), "{}")
    elsewhere.set(keys.lease("ours"), "{}")
    elsewhere.hset(keys.EPOCH, mapping={"id": "e1", "state": "open"})
    async with AsyncClient(valkey_url, elsewhere_url) as client:
        with pytest.raises(ForeignWorkers, match="broker: theirs"):
            await sweep_as_leader(client, settings)
        valkey.delete(keys.lease("theirs"))
        leading = asyncio.create_task(sweep_as_leader(client, settings))
        await auntil(lambda: elsewhere.get(keys.SWEEPER))
        leading.cancel()
        await asyncio.wait((leading,))
