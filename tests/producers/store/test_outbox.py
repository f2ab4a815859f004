"""Rows of the outbox: leased, delivered, tried again, given up, replayed, listed, trimmed; each by its holder alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.connection.script import run, text
from producers.contract import keys
from producers.store import outbox
from producers.store.outbox import Attempt, Row, State
from tests.waiting import PATIENCE_S

AT = 1_790_000_000
FAILED = Attempt(AT, 12, 500, "sorry")
FINE = Attempt(AT + 5, 3, 200)
LEASE = 60_000

Ask = Callable[[Callable[[AsyncRedis], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def ask(valkey_url: str) -> Ask:
    def ask(what: Callable[[AsyncRedis], Coroutine[Any, Any, Any]]) -> Any:
        async def go() -> Any:
            async with AsyncRedis.from_url(valkey_url) as store:
                return await what(store)

        return asyncio.run(go())

    return ask


def write(valkey: Redis, number: int, endpoint: str = "") -> str:
    """A row as the scripts write it, of event `number`, which happened at AT + number."""
    name = f"evt_{number}.{endpoint or 'own'}"
    fields = {"webhook_id": f"evt_{number}", "type": "response.completed", "object": f"t{number}", "at": AT + number}
    fields |= {"url": "https://example.com/", "state": "due"} | ({"endpoint": endpoint} if endpoint else {})
    valkey.hset(keys.webhook_row(name), mapping=fields)
    valkey.zadd(keys.WEBHOOKS_DUE, {name: (AT + number) * 1000})
    return name


def take(valkey: Redis, holder: str, n: int = 100) -> list[Row]:
    return outbox.read_take(run(valkey, outbox.take(holder, n, LEASE))).rows


def later(valkey: Redis, name: str) -> None:
    """The row's lease, or its wait, is over."""
    valkey.zadd(keys.WEBHOOKS_DUE, {name: AT * 1000})


def state(valkey: Redis, name: str) -> tuple[str, ...]:
    """The sets that name the row; its own word for it is the same."""
    found = tuple(state for state, key in outbox.STATES.items() if valkey.zscore(key, name) is not None)
    assert found == (text(valkey.hget(keys.webhook_row(name), "state")),)
    return found


class TestARow:
    def test_is_leased_oldest_first_to_one(self, valkey: Redis) -> None:
        names = [write(valkey, n) for n in range(5)]
        assert [row.name for row in take(valkey, "a", 2)] == names[:2]
        assert [row.name for row in take(valkey, "b")] == names[2:]
        assert take(valkey, "c") == []
        assert 0 < (outbox.read_take(run(valkey, outbox.take("c", 9, LEASE))).next_ms or 0) <= LEASE

    def test_comes_back_when_its_lease_is_over_and_the_late_holder_changes_nothing(self, valkey: Redis) -> None:
        name = write(valkey, 1)
        (row,) = take(valkey, "a")
        later(valkey, name)
        (again,) = take(valkey, "b")
        late = (outbox.delivered(row, "a", FINE), outbox.dead(row, "a", FINE), outbox.retry(row, "a", 0, FINE))
        assert [run(valkey, call) for call in late] == [0, 0, 0]
        assert state(valkey, name) == ("due",)
        assert take(valkey, "c") == []
        assert run(valkey, outbox.delivered(again, "b", FINE)) == 1

    @pytest.mark.parametrize("end", ["delivered", "dead"])
    def test_ends_once(self, valkey: Redis, end: State) -> None:
        name = write(valkey, 1)
        (row,) = take(valkey, "a")
        call = getattr(outbox, end)(row, "a", FINE)
        assert [run(valkey, call), run(valkey, call)] == [1, 1]
        assert state(valkey, name) == (end,)
        assert run(valkey, outbox.retry(row, "a", 0, FAILED)) == 0
        assert run(valkey, (outbox.dead if end == "delivered" else outbox.delivered)(row, "a", FINE)) == 0
        assert state(valkey, name) == (end,)

    def test_waits_for_its_next_try_and_remembers_the_last_ones(self, valkey: Redis, ask: Ask) -> None:
        name = write(valkey, 1)
        for n in range(12):
            (row,) = take(valkey, f"a{n}")
            call = outbox.retry(row, f"a{n}", 300_000, Attempt(AT + n, 12, 500, "é" * 10))
            assert [run(valkey, call), run(valkey, call)] == [1, 0]
            assert take(valkey, "b") == []
            later(valkey, name)
        row = ask(lambda store: outbox.get(store, name))
        assert (row.tries, [one.at for one in row.attempts]) == (12, [AT + n for n in range(2, 12)])

    def test_is_given_back_untried(self, valkey: Redis) -> None:
        write(valkey, 1)
        (row,) = take(valkey, "a")
        assert run(valkey, outbox.retry(row, "a", 0)) == 1
        (again,) = take(valkey, "b")
        assert (again.tries, again.attempts) == (0, ())

    @pytest.mark.parametrize("end", ["delivered", "dead"])
    def test_is_replayed_with_its_name_and_a_new_schedule(self, valkey: Redis, end: State) -> None:
        name = write(valkey, 1)
        (row,) = take(valkey, "a")
        run(valkey, getattr(outbox, end)(row, "a", FAILED))
        assert [text(run(valkey, outbox.replay(name))) for _ in range(2)] == ["replayed", "replayed"]
        assert run(valkey, outbox.delivered(row, "a", FINE)) == 0
        (again,) = take(valkey, "b")
        assert (again.name, again.webhook_id, again.tries, again.attempts) == (name, "evt_1", 0, (FAILED,))
        assert text(run(valkey, outbox.replay(name))) == "held"
        assert state(valkey, name) == ("due",)

    def test_that_waits_is_replayed_now_in_its_schedule(self, valkey: Redis) -> None:
        name = write(valkey, 1)
        (row,) = take(valkey, "a")
        run(valkey, outbox.retry(row, "a", 300_000, FAILED))
        assert text(run(valkey, outbox.replay(name))) == "replayed"
        assert [row.tries for row in take(valkey, "b")] == [1]

    def test_that_is_gone_is_nowhere(self, valkey: Redis) -> None:
        name = write(valkey, 1)
        valkey.delete(keys.webhook_row(name))
        assert text(run(valkey, outbox.replay(name))) == "gone"
        assert take(valkey, "a") == []
        assert not valkey.exists(keys.WEBHOOKS_DUE)


def test_a_process_that_waits_hears_of_what_is_due_at_once(valkey: Redis) -> None:
    name = write(valkey, 1)
    with valkey.pubsub() as channel:
        channel.subscribe(keys.WEBHOOKS_WAKE)
        channel.get_message(timeout=PATIENCE_S)
        (row,) = take(valkey, "a")
        for call in (outbox.retry(row, "a", 1000), outbox.retry(row, "a", 0), outbox.replay(name)):
            run(valkey, call)
        (row,) = take(valkey, "b")
        run(valkey, outbox.retry(row, "b", 0))
        heard = [channel.get_message(timeout=PATIENCE_S) for _ in range(2)]
    assert [one and one["type"] for one in heard] == ["message"] * 2


class TestRows:
    def test_are_listed_by_state_endpoint_and_time(self, valkey: Redis, ask: Ask) -> None:
        for n in range(2 * outbox.PAGE + 1):
            write(valkey, n, "we_1" if n % 2 else "")
        for row in take(valkey, "a", 7):
            run(valkey, outbox.dead(row, "a", FAILED))

        def listed(state: State, **which: Any) -> list[int]:
            async def go(store: AsyncRedis) -> list[int]:
                return [row.at - AT async for row in outbox.rows(store, state, **which)]

            found: list[int] = ask(go)
            return found

        assert listed("due") == list(range(2 * outbox.PAGE, 6, -1))
        assert sorted(listed("dead")) == list(range(7))
        assert sorted(listed("dead", endpoint="we_1", since=AT + 2, until=AT + 5)) == [3, 5]
        assert sorted(listed("dead", endpoint="own", until=AT + 2)) == [0, 2]
        assert listed("delivered") == []

    def test_of_one_instant_are_listed_each_once(self, valkey: Redis, ask: Ask) -> None:
        names = {write(valkey, n) for n in range(3 * outbox.PAGE)}
        valkey.zadd(keys.WEBHOOKS_DUE, dict.fromkeys(names, AT * 1000))

        async def go(store: AsyncRedis) -> list[str]:
            return [row.name async for row in outbox.rows(store, "due")]

        assert sorted(ask(go)) == sorted(names)

    def test_are_counted_and_what_is_taken_is_not_late(self, valkey: Redis, ask: Ask) -> None:
        for n in range(3):
            write(valkey, n)
        before = ask(outbox.backlog)
        (row, _, _) = take(valkey, "a")
        run(valkey, outbox.delivered(row, "a", FINE))
        after = ask(outbox.backlog)
        assert before.oldest_due_s > 0
        assert (after.rows, after.oldest_due_s) == ({"due": 2, "delivered": 1, "dead": 0}, 0)

    def test_of_a_source_that_nobody_runs_are_listed_and_counted_and_dead_at_last(
        self, valkey: Redis, ask: Ask
    ) -> None:
        name, webhook = "evt_7.reply", write(valkey, 1)
        fields = {"webhook_id": "evt_7", "type": "response.failed", "source": "jobs"}
        assert run(valkey, outbox.put(name, fields)) == 1

        async def due(store: AsyncRedis) -> list[str]:
            found = [row.name async for row in outbox.rows(store, "due")]
            assert [row.name async for row in outbox.rows(store, "due", endpoint="own")] == [webhook]
            return sorted(found)

        for end in ("it is put", "it is replayed"):
            assert ask(due) == [webhook, name], end
            assert run(valkey, outbox.untaken("jobs", 3600)) == 0
            valkey.zadd(keys.replies("jobs"), {name: 1})
            backlog = ask(outbox.backlog)
            assert (backlog.rows["due"], backlog.due["jobs"].rows) == (2, 1)
            assert backlog.due["jobs"].oldest_s > 3600
            assert [run(valkey, outbox.untaken("jobs", 3600)) for _ in range(2)] == [1, 0]
            assert state(valkey, name) == ("dead",)
            assert set(ask(outbox.backlog).due) == {None}
            assert text(run(valkey, outbox.replay(name))) == "replayed"

    @pytest.mark.parametrize(("age_s", "most", "left"), [(3600, 9, 4), (3600, 3, 3), (0, 9, 0)])
    def test_are_trimmed_by_age_and_number(self, valkey: Redis, age_s: int, most: int, left: int) -> None:
        names = [write(valkey, n) for n in range(4)]
        for row in take(valkey, "a"):
            run(valkey, outbox.delivered(row, "a", FINE))
        assert run(valkey, outbox.trim("delivered", age_s, most)) == 4 - left
        kept = {name for name in names if valkey.exists(keys.webhook_row(name))}
        assert kept == {text(name) for name in valkey.zrange(keys.WEBHOOKS_DELIVERED, 0, -1)}
        assert len(kept) == left


class TestOfATenant:
    """What is kept of a tenant's deliveries."""

    def put(self, valkey: Redis, number: int, tenant: str = "acme") -> str:
        name = f"evt_{number}.we_1"
        fields = {"webhook_id": f"evt_{number}", "type": "response.completed", "object": "t", "url": "https://e.com/"}
        assert run(valkey, outbox.put(name, fields | {"endpoint": "we_1", "tenant": tenant})) == 1
        return name

    def waiting(self, valkey: Redis) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = valkey.hgetall(keys.WEBHOOKS_WAITING)
        return found

    def test_what_is_due_is_counted_whatever_becomes_of_it(self, valkey: Redis) -> None:
        name = self.put(valkey, 1)
        assert self.waiting(valkey) == {b"acme": b"1"}
        (row,) = take(valkey, "a")
        run(valkey, outbox.retry(row, "a", 0, FAILED))
        assert self.waiting(valkey) == {b"acme": b"1"}, "it waits for its next try"
        (row,) = take(valkey, "b")
        for _ in range(2):
            run(valkey, outbox.dead(row, "b", FAILED))
        assert self.waiting(valkey) == {}
        for _ in range(2):
            run(valkey, outbox.replay(name))
        assert self.waiting(valkey) == {b"acme": b"1"}
        assert not valkey.exists(keys.webhooks_ended("dead", "acme"))
        (row,) = take(valkey, "c")
        run(valkey, outbox.delivered(row, "c", FINE))
        assert self.waiting(valkey) == {}

    def test_beyond_the_most_that_are_due_one_is_dead_untried_and_may_be_replayed(self, valkey: Redis) -> None:
        valkey.hset(keys.WEBHOOKS_WAITING, "acme", 100_000)
        name, other = self.put(valkey, 1), self.put(valkey, 2, "other")
        assert (state(valkey, name), state(valkey, other)) == (("dead",), ("due",))
        row = Row.parse(name, [part for item in valkey.hgetall(keys.webhook_row(name)).items() for part in item])
        assert "100000 of this tenant are due" in row.attempts[0].error
        run(valkey, outbox.replay(name))
        assert state(valkey, name) == ("due",)

    def test_counts_that_an_earlier_release_made_wrong_go_with_the_last_due_row(self, valkey: Redis) -> None:
        valkey.hset(keys.WEBHOOKS_WAITING, mapping={"acme": 100_000, "other": 3})
        self.put(valkey, 1, "other")
        run(valkey, outbox.trim("dead", 9, 9))
        assert self.waiting(valkey)[b"acme"] == b"100000"
        (row,) = take(valkey, "a")
        run(valkey, outbox.delivered(row, "a", FINE))
        run(valkey, outbox.trim("dead", 9, 9))
        assert self.waiting(valkey) == {}
        assert state(valkey, self.put(valkey, 2)) == ("due",)

    @pytest.mark.parametrize("end", ["delivered", "dead"])
    def test_the_oldest_that_has_ended_goes_for_a_new_one_of_its_tenant(self, valkey: Redis, end: str) -> None:
        ended = outbox.delivered if end == "delivered" else outbox.dead
        first, theirs = self.put(valkey, 1), self.put(valkey, 2, "other")
        for row in take(valkey, "a"):
            run(valkey, ended(row, "a", FINE))
        now = valkey.zscore(keys.webhooks_ended(end, "acme"), first) or 0
        valkey.zadd(keys.webhooks_ended(end, "acme"), {f"later {n}": now + 1 + n / 10**6 for n in range(9999)})
        new = self.put(valkey, 3)
        (row,) = take(valkey, "b")
        run(valkey, ended(row, "b", FINE))
        assert not valkey.exists(keys.webhook_row(first))
        assert valkey.zscore(f"penstock:webhooks:{end}", first) is None
        assert state(valkey, new) == state(valkey, theirs) == (end,)
        assert valkey.zcard(keys.webhooks_ended(end, "acme")) == 10_000
        run(valkey, outbox.trim("delivered" if end == "delivered" else "dead", 0, 0))
        assert valkey.zscore(keys.webhooks_ended(end, "acme"), new) is None
