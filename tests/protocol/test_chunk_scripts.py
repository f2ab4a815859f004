"""CHUNKS, PARENT and the ends of chunks on a real server against their model, and the model's own promises."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.store import batches, chunks, protocol
from tests.protocol.model import chunks as model
from tests.protocol.server import Mutant, Server

PARENT, TOTAL = "p", 4
POOL = keys.Pool("m", "1", "x")
QUEUE = keys.pool_queue("m", "1", "x")
SHARED: dict[str, str | int] = {
    "model": "m",
    "version": "1",
    "queue": QUEUE,
    "tier": "default",
    "n": 1,
    "origin": "chunk",
}
IDS = [chunks.chunk_id(PARENT, number) for number in range(TOTAL)]


def test_a_task_of_chunks_ends_well_whoever_dies() -> None:
    wrong, states = model.check()
    assert not wrong
    assert states > 3000


@pytest.mark.parametrize("rule", model.RULES)
def test_every_rule_is_needed(rule: str) -> None:
    wrong, _ = model.check(model.ALL - {rule})
    assert wrong, model.RULES[rule]


def check_chunks(redis: Redis, mutant: Mutant | None = None) -> None:
    """Random histories of a parent; raises AssertionError where scripts and model part."""
    server = Server(redis, mutant)
    try:
        for seed in range(60):
            _history(server, random.Random(seed))
    finally:
        server.close()


def _history(server: Server, chance: random.Random) -> None:
    redis = server.redis
    redis.flushdb()
    redis.set(keys.lease("w"), "{}")
    fields = SHARED | {"chunks": TOTAL, "texts": 4 * TOTAL, "origin": "task", "result_bytes": 1}
    assert text(server.run(protocol.admit(PARENT, "nonce", server.now(), fields))) == "new"
    w = model.World(chunks=(None,) * TOTAL)
    error = None
    for _ in range(16):
        step = chance.random()
        if step < 0.4:
            first, count = chance.choice([w.written, w.written, 0, 1, 2]), chance.randint(1, 2)
            expected, w = model.write(w, first, count)
            own = [{"task": "{}", "tokens": 1, "offset": 4 * (first + k), "texts": 4} for k in range(count)]
            answer = server.run(chunks.write(PARENT, first, SHARED, own))
            assert (_open(answer[0]), answer[1]) == expected
            server.run(batches.queued(IDS))
        elif step < 0.75 and (waiting := [k for k, chunk in enumerate(w.chunks) if chunk == "waits"]):
            number = chance.choice(waiting)
            if w.status in model.FINAL:  # a worker finds that out, before any sweeper
                assert _claim(server, number) != "go"
                w = model._put(w, number, "cancelled")
            elif (how := chance.random()) < 0.1:
                redis.delete(keys.task(IDS[number]))
                w = model._put(w, number, "lost")
            elif how < 0.25:  # by an earlier release
                redis.hdel(keys.task(IDS[number]), "parent")
                _finish(server, number, "completed", None)
                w = model._put(w, number, "completed")
            else:
                status = chance.choice(["completed", "completed", "completed", "failed"])
                before = w.status
                w = model.ends(w, number, status)
                message = chance.choice(["input[1] has 900 tokens", "the device is gone"])
                _finish(server, number, status, None if status == "completed" else {"code": "x", "message": message})
                if before not in model.FINAL and status == "failed" == w.status:
                    at = 4 * number
                    error = f"input[{at}] to input[{at + 3}]: {message}"
                    if "[1]" in message:
                        error = message.replace("[1]", f"[{at + 1}]")
        elif step < 0.78 and w.status not in model.FINAL:
            assert server.run(protocol.cancel(PARENT)) == [1, b"cancelled"]
            w = w._replace(status="cancelled")
        else:
            interrupted, most = chance.random() < 0.1, chance.randint(1, 3)
            w = _advanced(server, w, interrupted, most)
        _compare(redis, w, error)
    while w.listed:
        w = _advanced(server, w, True, 2)
        for number, chunk in enumerate(w.chunks):
            if chunk == "waits" and w.status not in model.FINAL:
                w = model.ends(w, number, "completed")
                _finish(server, number, "completed", None)
    _compare(redis, w, error)
    if "lost" not in w.chunks:
        assert not redis.hgetall(keys.WAITING)


def _advanced(server: Server, w: model.World, interrupted: bool, most: int) -> model.World:
    """Through PARENT, which is called though nothing is listed any more, as by a sweeper that was slow."""
    if interrupted and w.status not in model.FINAL:
        server.redis.hincrby(keys.task(PARENT), "written_at", -chunks.INTERRUPTED_MS)
    call = chunks.advance(PARENT)
    call = type(call)(call.script, call.keys, (*call.args[:2], most))
    answer = server.run(call)
    expected, w = model.advance(w, interrupted, most)
    assert (_open(answer[0]), answer[1]) == expected
    return w


def _open(status: bytes | str) -> str:
    """A parent's status, as its model has it: begun or not."""
    return "queued" if text(status) == "in_progress" else text(status)


def _claim(server: Server, number: int) -> str:
    answer = server.run(protocol.claim(IDS[number], f"claim {number}", "w", POOL))
    return protocol.read_claim(IDS[number], answer).answer


def _finish(server: Server, number: int, status: str, error: dict[str, str] | None) -> None:
    assert _claim(server, number) == "go"
    reasons, shown = '["stop"]', json.dumps(error)
    server.run(protocol.finish(IDS[number], f"claim {number}", status, reasons=reasons, nexts=[0], error=shown))


def _compare(redis: Redis, w: model.World, error: str | None) -> None:
    record: dict[str, Any] = {text(k): text(v) for k, v in redis.hgetall(keys.task(PARENT)).items()}
    counts = int(record["written"]), int(record.get("tidied", 0))
    assert (_open(record["status"]), *counts) == (w.status, w.written, w.tidied)
    entries = [json.loads(fields[b"e"]) for _, fields in redis.xrange(keys.stream(PARENT))]
    assert tuple(entry["chunk"] for entry in entries if "chunk" in entry) == w.entries
    assert all(
        (e["offset"], e["texts"], e["task"]) == (4 * e["chunk"], 4, IDS[e["chunk"]]) for e in entries if "chunk" in e
    )
    assert [entry["end"] for entry in entries if "end" in entry] == ([w.status] if w.status in model.FINAL else [])
    assert (redis.zscore(keys.PARENTS, PARENT) is not None) == w.listed
    for name, chunk in zip(IDS, w.chunks, strict=True):
        status = text(redis.hget(keys.task(name), "status") or b"")
        assert status == {None: "", "lost": "", "waits": "queued"}.get(chunk, chunk)
    if error and w.status == "failed" and json.loads(record["error"]).get("code") == "x":
        assert json.loads(record["error"])["message"] == error


def test_the_scripts_answer_as_their_model(valkey: Redis) -> None:
    check_chunks(valkey)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("chunks", "tonumber(r[3]) ~= from", "false"),
        ("chunks", "FINAL[r[1]] or", ""),
        ("chunks", "or from + count > tonumber(r[2])", ""),
        ("parent", "now_ms() - tonumber(r[4]) >= tonumber(ARGV[2])", "false"),
        ("parent", "    chunks_join(task, id)\n", ""),
        ("parent", "cancel(chunk, 'penstock:stream:' .. name, name)", ""),
        ("parent", "if to >= written then", "if true then"),
        ("finish", "status == 'completed' then\n    return chunks_join(parent, id)", "false then"),
        ("finish", "elseif at == total then", "elseif at == written then"),
        ("finish", "chunks_each(id, at, written", "chunks_each(id, 0, written"),
        ("finish", "number + offset", "number"),
        ("finish", "offset + texts - 1", "offset + texts"),
        ("parent", "if not c[1] then", "if false then"),
    ],
)
def test_a_broken_script_is_noticed(name: str, old: str, new: str, valkey: Redis) -> None:
    mutant = Mutant(protocol.PACKAGE, name, old, new)
    assert mutant.text()
    with pytest.raises(AssertionError):
        check_chunks(valkey, mutant)
