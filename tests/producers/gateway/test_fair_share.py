"""While a gateway's loop is behind, callers who use most of its time wait, and nobody else does."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Final

import httpx
import pytest

from producers.contract.stream import Event
from producers.gateway import fair_share as module
from producers.gateway.fair_share import (
    BUSY,
    DEPTH_S,
    FIRST,
    IDLE_TALK,
    KEPT_S,
    LOOK_S,
    MOST_CALLERS,
    MOST_WAITING,
    SHARE,
    SHARED,
    SOON_S,
    FairShare,
    Share,
    charge_to,
    in_thread,
    measured,
    turn,
)
from producers.gateway.http import connection
from producers.gateway.http.connection import CONNECTED_S, Connection
from producers.gateway.tasks.foreground import merged
from tests.processes import guarded
from tests.producers.gateway.conftest import Door, Make, Open
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.waiting import PATIENCE_S, auntil, until

LATE: Final = {"late": 0.05, "load": 0.9}
WELL: Final = {"late": 0.0, "load": 0.9}
NOTHING: Final[Mapping[str, float]] = {}
PREFLIGHT: Final = (
    b"OPTIONS /v1/tasks HTTP/1.1\r\nhost: here\r\norigin: http://there\r\naccess-control-request-method: POST\r\n\r\n"
)
NOWHERE: Final = b"GET /nowhere HTTP/1.1\r\nhost: here\r\n\r\n"


class Loop:
    """A loop that is looked at again and again, and its callers."""

    def __init__(self, *callers: str) -> None:
        self.now = time.monotonic()
        self.fair = FairShare()
        self.shares = {caller: self.asks(caller) for caller in callers}

    def asks(self, caller: str, probes: bool = False) -> Share:
        if not probes:
            self.fair.note_request(caller, self.now)
        return self.fair.of(caller)

    def looks(self, seconds: float = 2, uses: Mapping[str, float] = NOTHING, **shown: float) -> Loop:
        """Look for some seconds, in each of which callers use some."""
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            for caller, used in uses.items():
                self.shares[caller].used += used * LOOK_S
            self.fair.look(now=self.now, **shown)
        return self

    def may(self, caller: str) -> bool:
        return self.fair.may(self.shares[caller], self.now)


def test_who_uses_more_than_the_cap_waits_until_that_is_paid_off_and_others_do_not() -> None:
    loop = Loop("much", "little").looks(uses={"much": 0.9, "little": 0.05}, **LATE)
    assert loop.fair.cap == pytest.approx(SHARED - 0.05, rel=0.01)
    assert (loop.may("much"), loop.may("little")) == (False, True)
    loop.now += 10
    assert loop.may("much")


def test_a_flood_is_told_within_half_a_second() -> None:
    loop = Loop("much", "little").looks(0.5, uses={"much": 0.9, "little": 0.05}, **LATE)
    assert (loop.may("much"), loop.may("little")) == (False, True)


def test_nobody_waits_while_the_loop_keeps_up_or_others_have_the_processor() -> None:
    for late, load in ((0.0, 0.9), (0.5, 0.1)):
        loop = Loop("much", "little").looks(late=late, load=load, uses={"much": 0.9, "little": 0.05})
        assert loop.fair.cap is None
        assert loop.may("much")


def test_callers_who_all_use_much_do_not_wait_for_each_other() -> None:
    loop = Loop("one", "two").looks(5, uses={"one": 0.5, "two": 0.45}, **LATE)
    assert loop.fair.cap is None


def test_a_caller_who_is_alone_never_waits() -> None:
    loop = Loop("alone")
    loop.shares["prober"] = loop.asks("prober", probes=True)
    assert loop.looks(uses={"alone": 0.9, "prober": 0.01}, **LATE).fair.cap is None
    loop.shares["another"] = loop.asks("another")
    assert loop.looks(**LATE).fair.cap is not None
    assert loop.looks(KEPT_S + 1, **LATE).fair.cap is None  # both are forgotten


def test_who_floods_with_probes_is_a_caller() -> None:
    loop = Loop("one")
    loop.shares["prober"] = loop.asks("prober", probes=True)
    loop.looks(uses={"prober": 0.9}, **LATE)
    assert (loop.may("prober"), loop.may("one")) == (False, True)


def test_who_has_a_request_under_way_is_a_caller_and_a_prober_is_forgotten() -> None:
    loop = Loop("alone")
    loop.asks("prober", probes=True)
    stream = loop.fair.of("reads a stream")
    stream.open += 1
    assert loop.looks(KEPT_S - 1, uses={"alone": 0.9}, **LATE).fair.cap is not None
    stream.open -= 1
    assert loop.looks(4, uses={"alone": 0.9}, **LATE).fair.cap is None


def test_the_cap_is_no_less_than_an_equal_part_and_ends_when_the_loop_keeps_up() -> None:
    much = [str(at) for at in range(4)]
    loop = Loop("little", *much).looks(6, uses={"little": 0.02, **dict.fromkeys(much, 0.2)}, **LATE)
    assert loop.fair.cap == pytest.approx((SHARED - 0.02) / 4, rel=0.01)
    for caller in loop.shares:
        loop.asks(caller)
    assert loop.looks(8, **WELL).fair.cap is None


def test_callers_are_not_told_apart_without_bound() -> None:
    loop = Loop(*map(str, range(MOST_CALLERS + 2)))
    assert loop.shares[str(MOST_CALLERS)] is loop.shares[str(MOST_CALLERS + 1)]
    assert loop.fair.of(("tenant", "acme")) is not loop.fair.of(("tenant", "other"))


def test_addresses_do_not_make_the_part_of_a_tenant_small() -> None:
    loop = Loop(*map(str, range(300)))
    for tenant in ("acme", "other"):
        loop.fair.note_request(("tenant", tenant), loop.now)
    loop.shares["acme"] = loop.fair.of(("tenant", "acme"))
    assert loop.looks(5, uses={"acme": 0.5}, **LATE).fair.cap == SHARED
    flood = dict.fromkeys(map(str, range(300)), 0.01)
    assert loop.looks(5, uses={"acme": 0.5, **flood}, **LATE).fair.cap == pytest.approx(SHARED / 3)


async def test_steps_threads_and_further_tasks_are_charged_to_the_caller() -> None:
    share = Share(FairShare())
    SHARE.set(share)

    async def works(fails: bool) -> int:
        await asyncio.sleep(0)
        if fails:
            raise KeyError
        await asyncio.sleep(3600)
        return 1

    seen = [share.used]
    assert await measured(asyncio.sleep, 0, 5) == 5
    seen.append(share.used)
    with pytest.raises(KeyError):
        await measured(works, True)
    seen.append(share.used)
    task = asyncio.create_task(measured(works, False))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    seen.append(share.used)
    assert await in_thread(int, "7") == 7
    seen.append(share.used)
    assert seen == sorted(set(seen))


async def test_what_reads_a_requests_tasks_is_charged_to_its_caller() -> None:
    share = Share(FairShare())
    SHARE.set(share)

    async def events() -> AsyncGenerator[list[Event]]:
        yield []

    assert [batch async for batch in merged([events(), events()])] == []
    assert share.used > 0


@pytest.fixture
def crowded() -> Iterator[None]:
    """This thread and three processes that compute share a core."""
    cores = os.sched_getaffinity(0)
    spins = f"import os; os.sched_setaffinity(0, {{{min(cores)}}})\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(3):
            stack.callback(stack.enter_context(subprocess.Popen(guarded(sys.executable, "-c", spins))).kill)
        os.sched_setaffinity(0, {min(cores)})
        stack.callback(os.sched_setaffinity, 0, cores)
        yield


async def test_a_loop_that_shares_its_core_with_others_is_seen_to_compute(
    crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They left it a quarter of the time: no flood was held back there."""
    fair, looks = FairShare(), list[float]()
    monkeypatch.setattr(fair, "look", lambda late, load, now: looks.append(load))
    running = asyncio.create_task(fair.run())
    while len(looks) < 10:
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            pass
        await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert sorted(looks)[5] > BUSY


async def test_a_line_is_served_in_its_order_and_is_bounded() -> None:
    fair = FairShare()
    share, fair.cap = Share(fair), FIRST
    share.used = 60.0
    SHARE.set(share)
    places: list[Any] = [fair.wait(share) for _ in range(MOST_WAITING)]
    assert fair.wait(share) is None
    await turn()  # amid its work, a request goes on rather than to fail
    places[1].set_result(False)  # its client has left
    assert fair.wait(share) is not None, "its place is free"
    assert fair.wait(share) is None
    order: list[int] = []
    for at in (0, 2, 3):
        places[at].add_done_callback(lambda _, at=at: order.append(at))
    fair.cap = None
    await asyncio.wait_for(places[3], PATIENCE_S)
    await asyncio.sleep(0)
    assert order == [0, 2, 3]


async def test_a_line_of_clients_that_have_all_left_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fair, looks = FairShare(), []
    share, fair.cap = Share(fair), FIRST
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda after, *_: looks.append(after))
    for _ in range(MOST_WAITING):
        place = fair.wait(share)
        assert place is not None
        place.set_result(False)
    assert fair.wait(share) is not None
    assert len(looks) == 1, "by the same timer"


async def test_requests_that_wait_for_their_tasks_or_use_much_do_not_lock_their_caller_out() -> None:
    fair = FairShare()
    share, fair.cap = Share(fair), FIRST
    share.running, share.first = 500, 0.1
    SHARE.set(share)
    await asyncio.wait_for(turn(), PATIENCE_S)  # it is one of them


async def test_a_line_goes_on_as_fast_as_its_caller_may_and_at_once_without_a_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fair, looks = FairShare(), []
    share, fair.cap = Share(fair), FIRST
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda after, *_: looks.append(after))
    places = [fair.wait(share) for _ in range(100)]
    share.debt, share.first, share.at = -DEPTH_S, 0.001, time.monotonic()
    fair._next(share)
    assert 10 <= sum(place.done() for place in places if place) <= 32
    share.used = 1e9
    assert not fair.may(share, time.monotonic())
    fair.cap = None
    assert fair.may(share, time.monotonic())
    while share.line:
        fair._next(share)
        assert looks[-1] == SOON_S
    assert len(looks) < 10


def test_who_is_not_told_apart_pays_nothing_for_the_time_without_a_cap() -> None:
    loop = Loop(*map(str, range(MOST_CALLERS)))
    others = loop.shares["late"] = loop.fair.of("late")
    others.used = 1e6
    assert loop.looks(**LATE).fair.cap is not None
    assert loop.may("late")


@pytest.fixture
def capped(open_door: Open, monkeypatch: pytest.MonkeyPatch) -> Door:
    """A gateway whose callers by address have to wait."""
    monkeypatch.setattr(FairShare, "look", lambda *_: None)
    door = open_door(cors_origins=["http://there"])
    share = door.app.state.fair_share.of("127.0.0.1")
    share.used = share.debt = 1e9
    door.app.state.fair_share.cap = 0.001
    return door


def line_of(door: Door) -> list[asyncio.Future[bool]]:
    return [place for place in door.app.state.fair_share.of("127.0.0.1").line if not place.done()]


def test_requests_wait_in_line_and_those_whose_clients_left_are_not_handled(capped: Door) -> None:
    with ExitStack() as stack:
        assert httpx.get(f"{capped.url}/livez", timeout=PATIENCE_S).is_success  # a probe has a line of its own
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", capped.port), timeout=PATIENCE_S))
            for _ in range(3)
        ]
        for client, request in zip(clients, (NOWHERE, NOWHERE, PREFLIGHT), strict=True):
            client.sendall(request)
        assert until(lambda: len(line_of(capped)) == 3)
        clients[1].close()
        assert until(lambda: len(line_of(capped)) == 2)
        capped.app.state.fair_share.cap = None
        assert clients[0].recv(1 << 16).startswith(b"HTTP/1.1 404")
        assert clients[2].recv(1 << 16).startswith(b"HTTP/1.1 200")
    answered = capped.app.state.metrics.registry.get_sample_value
    labels = {"method": "GET", "route": "unmatched", "status": "404"}
    assert answered("penstock_gateway_requests_total", labels) == 1


def test_more_waiting_requests_than_a_line_has_are_refused(capped: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 0)
    answer = httpx.get(f"{capped.url}/nowhere", timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_waiting")
    assert "x-request-id" in answer.headers


def test_connections_are_charged_to_their_address(open_door: Open) -> None:
    door = open_door()
    share = door.app.state.fair_share.of("127.0.0.1")
    before = share.used
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S):
            pass
    assert until(lambda: share.used >= before + 5 * CONNECTED_S)


def test_what_comes_first_is_put_off_while_the_gateway_is_behind_so_that_who_leaves_at_once_costs_little(
    open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairShare, "look", lambda *_: None)
    monkeypatch.setattr(connection, "MOMENT_S", 5.0)
    door = open_door()
    door.app.state.fair_share.cap, left = 0.5, []
    monkeypatch.setattr(Connection, "connection_lost", lambda self, exc: (left.append(self), lost(self, exc)))
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as client:
        client.sendall(NOWHERE)
    assert until(lambda: left)
    monkeypatch.setattr(connection, "MOMENT_S", 0.01)
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as client:
        client.sendall(NOWHERE[:20])
        client.sendall(NOWHERE[20:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 404")
    answered = door.app.state.metrics.registry.get_sample_value
    assert answered("penstock_gateway_requests_total", {"method": "GET", "route": "unmatched", "status": "404"}) == 1


def test_refusals_probes_and_pages_count_more_than_once(open_door: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    learn = Share.learn
    monkeypatch.setattr(
        Share, "learn", lambda self, used, counts=1: (counted.append(counts), learn(self, used, counts))
    )
    http = open_door().http
    paths = ("/v1/models", "/nowhere", "/readyz", "/openapi.json", "/docs/assets/favicon.png")
    assert [http.get(path).status_code for path in paths] == [200, 404, 200, 200, 200]
    assert until(lambda: len(counted) == len(paths))
    assert counted == [1, *[IDLE_TALK] * 4]
    share = Share(FairShare())
    share.learn(0.1, IDLE_TALK)
    assert share.used == pytest.approx(0.1 * (IDLE_TALK - 1)), "beside what its steps were charged already"


async def test_a_line_lets_as_many_go_on_as_parts_of_streams_cost() -> None:
    """A stream learns what it uses from turn to turn, not at its end."""
    share = Share(FairShare())
    SHARE.set(share)

    def work() -> None:
        time.sleep(0.002)

    async def stream() -> None:
        for _ in range(100):
            work()
            await asyncio.sleep(0)
            await turn()

    await measured(stream)
    assert share.first >= 0.0015


async def test_a_step_that_may_go_on_counts_until_the_next_one_or_the_end() -> None:
    """What it will use is charged afterwards; a whole line would go on meanwhile."""
    share, may, steps = Share(FairShare()), asyncio.Event(), list[int]()
    SHARE.set(share)

    async def stream() -> None:
        for step in range(2):
            await turn()
            steps.append(step)
            await may.wait()
            may.clear()

    ends, breaks = (asyncio.create_task(measured(stream)) for _ in range(2))
    await asyncio.sleep(0)
    assert share.running == 2
    breaks.cancel()
    await asyncio.wait([breaks])
    assert share.running == 1
    may.set()
    await auntil(lambda: 1 in steps)
    assert (share.running, ends.done()) == (1, False), "in its second step"
    may.set()
    await ends
    assert share.running == 0


async def test_a_request_is_charged_to_its_tenant_as_soon_as_that_is_known() -> None:
    """Else who makes many at once would be two callers: an address, and a tenant."""
    fair = FairShare()
    SHARE.set(fair.of("address"))

    async def request() -> None:
        charge_to(("tenant", "acme"))
        await turn()
        assert fair.of(("tenant", "acme")).running == 1
        await asyncio.sleep(0.01)
        assert fair.of(("tenant", "acme")).step is not None

    await measured(request)
    for caller, uses in (("address", False), (("tenant", "acme"), True)):
        share = fair.of(caller)
        assert (share.used > 0, share.step, share.running) == (uses, None, 0)


def test_a_stream_by_a_new_key_is_charged_to_its_tenant(open_door: Open, model: str, make: Make) -> None:
    door = open_door(auth="keys")
    task = {"model": model, "prompt": [1, 2, 3]}
    answer = httpx.post(f"{door.url}/v1/tasks", json=task, headers=as_caller(make()), timeout=PATIENCE_S)
    share = door.app.state.fair_share.of(("tenant", "acme"))
    before = share.used
    url = f"{door.url}/v1/tasks/{answer.json()['id']}/events"
    with httpx.stream("GET", url, headers=as_caller(make()), timeout=PATIENCE_S):
        assert until(lambda: share.used > before)


on_body, lost = Connection.on_body, Connection.connection_lost
HEAD: Final = b"POST /v1/tasks HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def test_a_body_is_read_when_it_is_its_callers_turn(capped: Door) -> None:
    """And whole: a request that waits, and a body that waits, do not forget each other."""
    fair = capped.app.state.fair_share
    with socket.create_connection(("127.0.0.1", capped.port), timeout=PATIENCE_S) as client:
        client.sendall(HEAD % 4_000_000)
        assert until(lambda: len(line_of(capped)) == 1)
        client.sendall(b" " * 1000)
        assert until(lambda: len(line_of(capped)) == 2)
        fair.cap = None
        client.sendall(b" " * 3_999_000)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_a_body_that_waits_in_line_is_not_read_by_its_handler(capped: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    fair, share, read = capped.app.state.fair_share, capped.app.state.fair_share.of("127.0.0.1"), []
    monkeypatch.setattr(Connection, "on_body", lambda self, body: (read.append(len(body)), on_body(self, body)))
    with socket.create_connection(("127.0.0.1", capped.port), timeout=PATIENCE_S) as client:
        fair.cap = None
        client.sendall(HEAD % 4_000_000 + b" " * 1000)
        assert until(lambda: share.running == 1)
        share.debt, fair.cap = 1e9, 0.001
        client.sendall(b" " * 500_000)
        assert until(lambda: line_of(capped))
        capped.run(asyncio.sleep(0.2))  # its handler asks for more
        client.settimeout(0.2)
        with suppress(TimeoutError):
            client.sendall(b" " * 3_499_000)
        assert sum(read) < 501_000
        assert len(line_of(capped)) == 1


def test_a_body_does_not_wait_in_the_line_of_who_had_its_connection_before(
    capped: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy's connection carries requests of many."""
    fair = capped.app.state.fair_share
    monkeypatch.setattr("producers.gateway.http.edge.caller_of", lambda scope: dict(scope["headers"])[b"who"])
    head = HEAD.replace(b"\r\n\r\n", b"\r\nwho: %b\r\n\r\n")
    with socket.create_connection(("127.0.0.1", capped.port), timeout=PATIENCE_S) as client:
        for who in (b"one", b"another"):
            client.sendall(head % (2, who) + b"{")
            assert until(lambda who=who: fair.of(who).running == 1)
            client.sendall(b"}")
            answer = client.recv(1 << 16)
            while not answer.endswith(b"}}"):  # head and body come apart
                answer += client.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 4")
            share = fair.of(b"one")
            share.used = share.debt = 1e9
            assert not share.line
