from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from producers import AsyncClient, AsyncHandle, End, Event, Prompt, TaskNotFound, Token
from producers.client import reader
from producers.client.hub import BACKLOG
from producers.client.reader import Cursor, Entries, read_entries, read_messages
from producers.connection.connect import POOL, SMALL_POOL
from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import PROMPT_PIECE, decode, encode_rows, encode_token
from producers.contract.task import Task
from producers.errors import BrokenRecord
from producers.store import protocol
from tests.histories import examples
from tests.producers.conftest import QUEUE, subscribers
from tests.producers.fake_worker import FakeWorker
from tests.producers.proxy import Proxy
from tests.waiting import PATIENCE_S, auntil


@pytest.fixture
def never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader is helped by reading the stream after a silence: what it gets, it gets from the channel or on doubt."""
    monkeypatch.setattr(reader, "SILENCE_S", 3600.0)


def whole(count: int) -> list[Event]:
    """The events of `count` one-character tokens and the terminal entry."""
    tokens = [decode(k, json.loads(encode_token(0, k, k, chr(97 + k % 26)))) for k in range(count)]
    usage = {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": count}
    return [event for event in tokens if event] + [End(count, "completed", ("stop",), usage)]


def entry(event: Event) -> str:
    if isinstance(event, Token):
        return encode_token(event.choice, event.index, event.token_id, event.text)
    return json.dumps({"end": event.status, "reasons": event.reasons, "usage": event.usage, "error": None})


@settings(max_examples=examples(25, 100), deadline=None)
@given(st.data())
def test_whatever_comes_on_the_two_ways_each_event_is_given_once_in_order(data: st.DataObject) -> None:
    events = whole(data.draw(st.integers(0, 12)))
    start = data.draw(st.integers(0, len(events) + 1))
    cursor = Cursor("t", start)
    given_: list[Event] = []
    written = 0
    pending: list[bytes] = []
    for _ in range(60):
        match data.draw(st.sampled_from(["write", "lose", "deliver", "pass", "read", "again"])):
            case "write" if written < len(events):
                until = data.draw(st.integers(written + 1, len(events)))
                pending.append(f"[{written},{','.join(map(entry, events[written:until]))}]".encode())
                written = until
            case "lose" if pending:
                pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            case "deliver" if pending and not cursor.behind:
                given_ += cursor.live(read_messages([pending.pop(0)]))
            case "pass" if pending and not (cursor.behind or cursor.ended):
                if (tokens := cursor.next_tokens(pending[0])) is not None:
                    pending.pop(0)
                    given_ += tokens
            case "again" if pending and not cursor.behind:
                given_ += cursor.live(read_messages([pending[0]]))
            case "read":
                given_ += cursor.replay(*answer(cursor, events[:written]))
        assert given_ == events[start : start + len(given_)]
    written = len(events)
    while not cursor.ended:
        given_ += cursor.replay(*answer(cursor, events))
    assert given_ == events[start:]
    assert cursor.live(read_messages([b'[0,{"end":"completed","reasons":[],"usage":{},"error":null}]'])) == []


def answer(cursor: Cursor, events: list[Event]) -> tuple[tuple[bytes, bytes | None], Entries, bool]:
    """What the store answers to the cursor's query when `events` are written."""
    _, xrange, _ = cursor.query().commands
    first = int(str(xrange[2]).partition("-")[0]) - 1
    end = b"completed" if events and isinstance(events[-1], End) else None
    found = [(f"{e.position + 1}-0".encode(), {b"e": entry(e).encode()}) for e in events[first:]]
    return (b"in_progress", end), read_entries(found), False


@pytest.mark.parametrize(
    "message",
    [
        b'[1,[0,1,7,"a"]]',  # a gap before it
        b"[0]",
        b'[0,[0,0,7,"a"],{"end":"completed","reasons":[],"usage":{},"error":null}]',
        b'[0,[0,0,7,"a",[-0.5,[]]]]',
        b'[0,[0,0,7,"a",null,"stop"]]',
        b'[0,{"note":1}]',
        b"[0,",
        b"0",
        b'[0,[0,0,7,"\xff"]]',
    ],
)
def test_what_is_no_mere_token_that_comes_next_passes_no_reader(message: bytes) -> None:
    cursor = Cursor("t", 0)
    assert cursor.next_tokens(message) is None
    assert cursor.position == 0


def test_a_task_that_ends_before_the_start_ends_the_stream() -> None:
    cursor = Cursor("t", 100)
    assert cursor.live(read_messages([b'[0,{"end":"completed","reasons":[],"usage":{},"error":null}]'])) == []
    assert cursor.ended


def test_an_entry_of_a_later_kind_is_passed_over() -> None:
    cursor = Cursor("t", 0)
    cursor.behind = False
    events = cursor.live(read_messages([b'[0,[0,0,7,"a"],{"note":1}]', b'[2,[0,1,8,"b"]]']))
    assert [event.position for event in events] == [0, 2]


def write(
    worker: FakeWorker, task_id: str, count: int, started: threading.Event, sizes: Callable[[], int]
) -> threading.Thread:
    """On a thread: tokens 0 to `count`, `sizes()` of them at a time, then the end."""

    def body() -> None:
        done = 0
        while done < count:
            step = min(sizes(), count - done)
            assert worker.append(task_id, done, [chr(97 + k % 26) for k in range(done, done + step)])[0] == "ok"
            done += step
            started.set()
        worker.finish(task_id, [count])
        worker.settle(task_id)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


@pytest.mark.usefixtures("never_silent")
async def test_readers_that_join_while_tokens_are_made_miss_none(aclient: AsyncClient, worker: FakeWorker) -> None:
    count = 3000  # three chunks of replay
    handle = await aclient.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    rng = random.Random(5)
    started = threading.Event()
    thread = write(worker, handle.id, count, started, lambda: rng.randint(1, 9))
    await asyncio.to_thread(started.wait)
    expected = whole(count)

    async def join(after: float, start: int) -> None:
        await asyncio.sleep(after)
        assert [event async for event in handle.stream(start)] == expected[start:]

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for k in range(20):
            group.create_task(join(k * 0.02, rng.choice([0, 1, 500, 2999, 3000])))
    thread.join()


@pytest.mark.usefixtures("never_silent")
async def test_choices_interleave_as_they_were_written(aclient: AsyncClient, worker: FakeWorker) -> None:
    handle = await aclient.submit(model="tiny", prompt="x", n=3)
    worker.claim(handle.id)
    stream = handle.stream()
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.1)
    order = [2, 0, 0, 1, 2, 1, 0]
    nexts = [0, 0, 0]
    for choice in order:
        worker.append(handle.id, nexts[choice], ["x"], choice=choice)
        nexts[choice] += 1
    worker.finish(handle.id, nexts)
    events = [await first] + [event async for event in stream]
    assert [e.choice for e in events if isinstance(e, Token)] == order
    for choice in range(3):
        indexes = [e.index for e in events if isinstance(e, Token) and e.choice == choice]
        assert indexes == list(range(nexts[choice]))


class Following:
    """A reader at work in the background."""

    def __init__(self, handle: AsyncHandle) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read(handle))

    async def _read(self, handle: AsyncHandle) -> None:
        async for event in handle.stream():
            self.events.append(event)
            self._news.set()

    async def have(self, count: int) -> list[Event]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < count:
                await self._news.wait()
                self._news.clear()
        return self.events

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def end(self) -> list[Event]:
        async with asyncio.timeout(PATIENCE_S):
            await self._task
        return self.events


async def followed(client: AsyncClient, valkey: Redis, worker: FakeWorker) -> tuple[AsyncHandle, Following]:
    """A running task with one token, and a reader that has it and follows the channel."""
    handle = await client.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a"])
    following = Following(handle)
    await following.have(1)
    await auntil(lambda: subscribers(valkey, handle.id) == 1)
    worker.append(handle.id, 1, ["b"])
    await following.have(2)
    return handle, following


@pytest.mark.usefixtures("never_silent")
async def test_a_gap_is_filled_from_the_stream(aclient: AsyncClient, valkey: Redis, worker: FakeWorker) -> None:
    handle, following = await followed(aclient, valkey, worker)
    # Tokens 2 and 3 are in the stream but never published, as when the server dropped this connection's output.
    valkey.xadd(keys.stream(handle.id), {"e": encode_token(0, 2, 2, "c")}, id="3-0")
    valkey.xadd(keys.stream(handle.id), {"e": encode_token(0, 3, 3, "d")}, id="4-0")
    valkey.hset(keys.task(handle.id), "next:0", 4)
    worker.append(handle.id, 4, ["e"])
    worker.finish(handle.id, [5])
    assert await following.end() == whole(5)


@pytest.mark.usefixtures("never_silent")
@pytest.mark.parametrize("broken", ["the subscription", "all connections"])
async def test_what_was_made_during_a_reconnect_is_not_missed(
    proxy: Proxy, valkey: Redis, model: str, worker: FakeWorker, broken: str
) -> None:
    async with AsyncClient(proxy.url) as client:
        handle, following = await followed(client, valkey, worker)
        for k in range(2, 12):
            if broken == "all connections":
                proxy.cut()
            else:
                valkey.client_kill_filter(_type="pubsub")
            worker.append(handle.id, k, [chr(97 + k)])  # nobody hears it
            await following.have(k + 1)
        worker.finish(handle.id, [12])
        assert await following.end() == whole(12)


async def test_after_a_silence_the_stream_is_read(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SILENCE_S", 0.05)
    handle, following = await followed(aclient, valkey, worker)
    valkey.xadd(keys.stream(handle.id), {"e": encode_token(0, 2, 2, "c")}, id="3-0")  # and nothing is published
    assert (await following.have(3))[2] == whole(3)[2]
    valkey.delete(keys.task(handle.id), keys.stream(handle.id))
    with pytest.raises(TaskNotFound):
        await following.end()


async def test_readers_live_without_pub_sub(
    valkey: Redis, valkey_url: str, model: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "SILENCE_S", 0.05)
    valkey.acl_setuser(
        "mute", enabled=True, passwords=["+pw"], categories=["+@all"], keys=["*"], commands=["-subscribe"]
    )
    try:
        async with AsyncClient(valkey_url.replace("redis://", "redis://mute:pw@")) as client:
            handle = await client.submit(model=model, prompt="x")
            worker.claim(handle.id)
            following = Following(handle)
            for k in range(3):
                worker.append(handle.id, k, [chr(97 + k)])
                await following.have(k + 1)
            worker.finish(handle.id, [3])
            assert await following.end() == whole(3)
    finally:
        valkey.acl_deluser("mute")


@pytest.mark.usefixtures("never_silent")
async def test_a_slow_reader_loses_nothing_and_holds_up_nobody(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle, quick = await followed(aclient, valkey, worker)
    slow = aclient.reader(handle.id)
    events = await slow.next()
    events += await slow.next() if len(events) < 2 else []
    following = asyncio.create_task(slow.next())  # it follows the channel from here on, and then is not asked again
    await asyncio.sleep(0.1)
    count = 2 + 2 * BACKLOG
    for k in range(2, count):
        worker.append(handle.id, k, [chr(97 + k % 26)])
        if k % 100 == 0:
            await asyncio.sleep(0)
    worker.finish(handle.id, [count])
    assert await quick.end() == whole(count)
    assert slow._subscription is not None
    assert len(slow._subscription._inbox) <= BACKLOG
    events += await following
    while some := await slow.next():
        events += some
    slow.close()
    assert events == whole(count)


@pytest.mark.usefixtures("never_silent")
async def test_all_streams_share_one_connection(aclient: AsyncClient, valkey: Redis, worker: FakeWorker) -> None:
    others = {c["id"] for c in valkey.client_list()}
    handles = [await aclient.submit(model="tiny", prompt="x") for _ in range(200)]
    followings = [Following(handle) for handle in handles]
    await auntil(lambda: len(valkey.pubsub_channels()) == 200 + 1)
    clients = [c for c in valkey.client_list() if c["id"] not in others]
    assert [int(c["sub"]) for c in clients if int(c["sub"])] == [200 + 1]
    assert len(clients) <= 1 + POOL + SMALL_POOL
    for handle in handles:
        worker.serve(handle.id, ["a", "b"])
    for following in followings:
        assert await following.end() == whole(2)
    await auntil(lambda: [*map(is_a_process_s, valkey.pubsub_channels())] == [True])


def is_a_process_s(channel: bytes) -> bool:
    return channel.startswith(keys.process_channel("").encode())


def on_own_channel(valkey: Redis, *task_ids: str) -> int:
    """How many of these tasks' own channels have a listener."""
    return sum(count for _, count in valkey.pubsub_numsub(*map(keys.channel, task_ids)))


def publish_as_before(valkey: Redis, task_id: str, index: int, text: str) -> None:
    """A token by a worker of the release before, which knows the task's own channel alone."""
    entry = encode_token(0, index, index, text)
    valkey.xadd(keys.stream(task_id), {"e": entry}, id=f"{index + 1}-0")
    valkey.hset(keys.task(task_id), "next:0", index + 1)
    valkey.publish(keys.channel(task_id), f"[{index},{entry}]")


@pytest.mark.usefixtures("never_silent")
async def test_a_process_hears_of_all_its_tasks_on_one_channel(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    pairs = [await followed(aclient, valkey, worker) for _ in range(3)]
    ids = [handle.id for handle, _ in pairs]
    await auntil(lambda: all(valkey.hexists(keys.task(task_id), "followers") for task_id in ids))
    for task_id in ids:
        worker.append(task_id, 2, ["c"])
    for _, following in pairs:
        await following.have(3)
    await auntil(lambda: not on_own_channel(valkey, *ids))
    await pairs[0][1].leave()
    await auntil(lambda: not valkey.hexists(keys.task(ids[0]), "followers"))
    for task_id in ids:
        worker.append(task_id, 3, ["d"])
        worker.finish(task_id, [4])
    for _, following in pairs[1:]:
        assert await following.end() == whole(4)


@pytest.mark.usefixtures("never_silent")
async def test_a_worker_of_the_release_before_is_heard_before_and_after_one_of_this(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle, following = await followed(aclient, valkey, worker)
    await auntil(lambda: valkey.hexists(keys.task(handle.id), "followers"))
    worker.append(handle.id, 2, ["c"])
    await auntil(lambda: not on_own_channel(valkey, handle.id))
    assert run(valkey, protocol.release(handle.id, worker.claims[handle.id])) == 1
    await auntil(lambda: on_own_channel(valkey, handle.id))
    for index in range(3, 6):
        publish_as_before(valkey, handle.id, index, chr(97 + index))
        await following.have(index + 1)
    worker.claim(handle.id)
    worker.append(handle.id, 6, ["g"])
    worker.finish(handle.id, [7])
    assert await following.end() == whole(7)


@pytest.mark.usefixtures("never_silent")
@pytest.mark.parametrize("before", [False, True], ids=["this release", "the release before"])
async def test_a_reader_that_expects_its_task_reads_no_stream(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    assert aclient.reader("t").expect() is None, "its process hears nothing yet"
    _, other = await followed(aclient, valkey, worker)
    expecting = aclient.reader("t")
    follower = expecting.expect()
    assert follower is not None
    await auntil(lambda: on_own_channel(valkey, "t"))
    await auntil(lambda: expecting._subscription and expecting._subscription.stale)
    expecting.submits()
    task = Task(model="tiny", prompt="x")
    await aclient.admit(task, "t", {"followers": follower})
    worker.claim("t")
    if before:
        for index, text in enumerate("ab"):
            publish_as_before(valkey, "t", index, text)
    else:
        worker.append("t", 0, ["a"])
        await auntil(lambda: not on_own_channel(valkey, "t"))
        worker.append("t", 1, ["b"])
    worker.finish("t", [2])
    monkeypatch.setattr(reader.Reader, "_read", None)
    events: list[Event] = []
    async for batch in aclient.get("t").batches(reader=expecting):
        events += batch
    assert events == whole(2)
    monkeypatch.undo()
    await other.leave()


@pytest.mark.usefixtures("never_silent")
async def test_a_large_end_is_read_from_the_stream(aclient: AsyncClient, valkey: Redis, worker: FakeWorker) -> None:
    handle, following = await followed(aclient, valkey, worker)
    await auntil(lambda: valkey.hexists(keys.task(handle.id), "followers"))
    worker.append(handle.id, 2, ["c"])
    await auntil(lambda: not on_own_channel(valkey, handle.id))
    worker.finish(handle.id, [3], result=encode_rows([[0.5] * 20_000]))
    *tokens, end = await following.end()
    assert tokens == whole(3)[:3]
    assert isinstance(end, End)
    assert end.result is not None


async def test_after_a_silence_the_task_s_own_channel_is_heard_again(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, following = await followed(aclient, valkey, worker)
    await auntil(lambda: valkey.hexists(keys.task(handle.id), "followers"))
    monkeypatch.setattr(reader, "SILENCE_S", 0.05)
    worker.append(handle.id, 2, ["c"])
    await following.have(3)
    valkey.hdel(keys.task(handle.id), "followers")  # as a failover would lose it
    await auntil(lambda: on_own_channel(valkey, handle.id) and valkey.hexists(keys.task(handle.id), "followers"))
    monkeypatch.setattr(reader, "SILENCE_S", 3600.0)
    publish_as_before(valkey, handle.id, 3, "d")
    worker.append(handle.id, 4, ["e"])
    worker.finish(handle.id, [5])
    assert await following.end() == whole(5)


@pytest.mark.usefixtures("never_silent")
async def test_streams_of_a_channel_that_the_server_cut_go_on_without_loss(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    """A process that takes nothing for a while: its output buffer has more than the server keeps."""
    pairs = [await followed(aclient, valkey, worker) for _ in range(20)]
    before = valkey.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
    valkey.config_set("client-output-buffer-limit", "pubsub 100kb 100kb 1")
    try:
        (channel,) = filter(is_a_process_s, valkey.pubsub_channels())
        index, text = 2, "x" * 2000
        while valkey.pubsub_numsub(channel)[0][1]:  # the reader's event loop is this one, so that it does not run
            for handle, _ in pairs:
                worker.append(handle.id, index, [text])
            index += 1
        for handle, following in pairs:
            await following.have(index)
            worker.append(handle.id, index, ["z"])
            worker.finish(handle.id, [index + 1])
        for _, following in pairs:
            tokens = [event for event in await following.end() if isinstance(event, Token)]
            assert [token.index for token in tokens] == list(range(index + 1))
    finally:
        valkey.config_set("client-output-buffer-limit", before)


@pytest.mark.usefixtures("never_silent")
async def test_two_readers_of_a_task_do_not_disturb_each_other(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle, first = await followed(aclient, valkey, worker)
    leaving, second = Following(handle), Following(handle)
    worker.append(handle.id, 2, ["c"])
    for one in (leaving, second):
        await one.have(3)
    await leaving.leave()
    worker.append(handle.id, 3, ["d"])
    worker.finish(handle.id, [4])
    assert await first.end() == await second.end() == whole(4)


async def test_a_finished_stream_is_read_without_subscribing(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle = await aclient.submit(model="tiny", prompt="x")
    worker.serve(worker.take(QUEUE) or "", ["a", "b"])
    assert [event async for event in handle.stream()] == whole(2)
    assert [c for c in valkey.client_list() if int(c["sub"])] == []


@pytest.mark.parametrize("live", [False, True])
async def test_what_is_large_is_parsed_off_the_event_loop(
    aclient: AsyncClient, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    threads: dict[int, set[threading.Thread]] = {}
    reads = 0

    def noted(position: int, entry: Any) -> Event | None:
        threads.setdefault(position, set()).add(threading.current_thread())
        return decode(position, entry)

    def counted(found: Any) -> Entries:
        nonlocal reads
        reads += 1
        return read_entries(found)

    monkeypatch.setattr(reader, "decode", noted)
    monkeypatch.setattr(reader, "read_entries", counted)
    ids, scores = list(range(500)), [None, *[(-1.0, tuple((k, -0.5) for k in range(20)))] * 499]
    handle = await aclient.submit(model="tiny", prompt=ids, prompt_logprobs=20, max_tokens=1)
    worker.claim(handle.id)
    if live:
        following = Following(handle)
        await auntil(lambda: reads >= 2)  # at first, and when it had subscribed: now it follows the channel
        worker.prompt(handle.id, ids, scores)
    else:
        worker.prompt(handle.id, ids, scores)
        following = Following(handle)
    await following.have(1)
    worker.append(handle.id, 0, ["a"])
    worker.finish(handle.id, [1])
    prompt, *_ = await following.end()
    assert isinstance(prompt, Prompt)
    assert list(prompt.logprobs) == scores
    assert threading.main_thread() not in threads[0]
    assert len(following.events) == 3


async def test_a_cancelled_wait_is_cancelled_at_whatever_point(aclient: AsyncClient, worker: FakeWorker) -> None:
    handle = await aclient.submit(model="tiny", prompt="x")
    for ticks in range(40):
        waiting = asyncio.create_task(handle.result())
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([waiting])
        assert waiting.cancelled()
    worker.serve(handle.id, ["a"])
    assert (await handle.result(PATIENCE_S)).text == "a"  # and the connections are good


async def test_a_long_past_comes_in_slices_whatever_its_entries_are(aclient: AsyncClient, worker: FakeWorker) -> None:
    """The first ones, whose size nobody knows yet, are few; then as many are read as make about a slice."""
    handle = await aclient.submit(model="tiny", prompt=[1] * 9, prompt_logprobs=20)
    worker.claim(handle.id)
    scores = (-0.125, tuple((k, -k / 8) for k in range(20)))
    worker.prompt(handle.id, [1] * 5000, [None, *[scores] * 4999])
    for index in range(0, 3000, 500):
        worker.append(handle.id, index, ["ab"] * 500)
    worker.finish(handle.id, [3000])
    sizes: list[int] = []
    async with aclosing(handle.batches()) as batches:
        async for events in batches:
            sizes.append(len(events))
    pieces = -(-5000 // PROMPT_PIECE)
    assert sum(sizes) == pieces + 3000 + 1
    assert sizes[:pieces] == [1] * pieces, "each piece of the prompt's scores is more than a slice"
    assert max(sizes) < 500, "so is what five hundred tokens are"
    assert len(sizes) < pieces + 3000 // 100, "and what a hundred are is much less"


async def test_readers_of_the_past_leave_connections_to_others(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    handle = await aclient.submit(model="tiny", prompt="x")
    worker.claim(handle.id)
    for index in range(0, 6000, 500):
        worker.append(handle.id, index, ["abcdefgh"] * 500)
    worker.finish(handle.id, [6000])
    others = {c["id"] for c in valkey.client_list()}
    found = await asyncio.gather(*(Following(handle).end() for _ in range(15)))
    assert {len(events) for events in found} == {6001}
    mine = [c for c in valkey.client_list() if c["id"] not in others]
    assert len(mine) <= SMALL_POOL


@pytest.mark.parametrize("entry", ["{", "[0,7,5]"])
async def test_a_stream_with_what_no_script_wrote_is_broken_by_name(
    aclient: AsyncClient, valkey: Redis, model: str, entry: str
) -> None:
    handle = await aclient.submit(model=model, prompt=[1])
    valkey.xadd(keys.stream(handle.id), {"e": entry}, id="1000000-0")
    with pytest.raises(BrokenRecord, match=f"{handle.id} cannot be read: its field stream"):
        await handle.result(PATIENCE_S)
