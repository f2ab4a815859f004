"""The books: a delivery is put down once, and a life that is over takes all of its own along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from producers.contract.keys import Pool
from workers.flow.deliveries import Acker, Deliveries, Size
from workers.settings import WorkerSettings
from workers.state.delivery import Delivery, Incarnation
from workers.state.served import Served

AWAY = "redis://127.0.0.1:1/0"


@pytest.fixture
def aborted() -> list[str]:
    """What the engine was told to drop."""
    return []


@pytest.fixture
def books(aborted: list[str]) -> Deliveries:
    """Their acker keeps its requests: it has not been started."""
    engine: Any = SimpleNamespace(max_num_seqs=4, kv_tokens_total=400, abort=aborted.append)
    served = Served(WorkerSettings(AWAY, AWAY, "stub", name="w"), engine, {"name": "stub"}, {}, Pool("stub", "1", "x"))
    return Deliveries(served, Acker(served.connect_broker(), AWAY))


def enter(books: Deliveries, uuid: str) -> Delivery:
    delivery = Delivery(uuid, f"task-{uuid}", books.life)
    assert books.enter(delivery, Size(2, 1, 100))
    return delivery


def test_a_delivery_is_put_down_once_and_makes_room(books: Deliveries) -> None:
    told: list[int] = []
    books.on_put_down = lambda: told.append(len(books))
    delivery = enter(books, "a")
    assert books.ledger.count == 1
    books.done(delivery)
    books.give_back(delivery)
    assert (told, books.ledger.count, books.by_uuid) == ([0], 0, {})
    assert books.all_uuids() == {"a"}, "its ACK is on its way out"


def test_what_is_computed_of_many_texts_makes_room_for_the_next_ones(books: Deliveries) -> None:
    rooms: list[tuple[int, ...]] = []
    books.ledger.on_room = lambda: rooms.append(books.ledger.credit().tokens)
    delivery = enter(books, "a")  # of more tokens than count: its size is cut to 100
    delivery.prompt_tokens = 1000
    assert books.run(delivery)
    for computed in (0, 850, 950, 950, 1000):
        delivery.course.computed = computed
        books.on_step()
    assert rooms == [(400, 400, 350, 350), (400, 400, 400, 400)]
    books.done(delivery)
    assert books.ledger.credit().tokens == (400,) * 4


def test_a_stage_only_moves_on(books: Deliveries, aborted: list[str]) -> None:
    delivery = enter(books, "a")
    assert books.run(delivery)
    assert list(books.running) == ["a"]
    assert books.stop(delivery)
    assert not books.stop(delivery), "one try of Celery's, whoever else stops it"
    assert not books.run(delivery)
    assert (set(aborted), books.running, delivery.ended) == ({"a"}, {}, False)
    books.end(delivery)
    assert (delivery.ended, delivery.put_down) == (True, False)
    books.give_back(delivery)
    books.end(delivery)
    assert delivery.put_down


def test_a_life_that_is_over_drops_all_and_the_next_begins(books: Deliveries, aborted: list[str]) -> None:
    lapsed: list[tuple[Incarnation, list[str]]] = []
    books.on_lapse = lambda life, dropped: lapsed.append((life, [one.uuid for one in dropped]))
    life, runs, waits = books.life, enter(books, "a"), enter(books, "b")
    books.run(runs)
    books.life_is_over(life)
    books.life_is_over(life)
    assert lapsed == [(life, ["a", "b"])]
    assert aborted == ["a"]
    assert (books.by_uuid, books.running, books.ledger.count) == ({}, {}, 0)
    assert books.life is not life
    books.done(waits)
    assert not books.all_uuids(), "what is dropped goes back by REAP alone"
    assert not books.enter(Delivery("c", "task-c", life), Size(2, 1, 100))


def test_who_finds_the_books_empty_finds_what_was_dropped(books: Deliveries) -> None:
    """A drain that began when the lease lapsed: it lets go of what it knows to be dropped, and exits."""
    held: list[int] = []
    books.on_lapse = lambda life, dropped: held.append(len(books))
    enter(books, "a")
    books.life_is_over(books.life)
    assert held == [1]


def test_no_life_begins_during_a_drain(books: Deliveries) -> None:
    books.draining = True
    life = books.life
    books.life_is_over(life)
    assert books.life is life
    assert life.over
