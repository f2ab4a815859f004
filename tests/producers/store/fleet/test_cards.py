"""The card that stands when workers announce a model and operators publish it, in whatever order."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store.fleet import cards

FILES = {"tokenizer.json": b"{}"}


def card(version: str, **more: Any) -> dict[str, Any]:
    return {"v": 1, "name": "m", "version": version, "context_length": 1000, "files": {"tokenizer.json": "aa"}, **more}


def worker(store: Redis, version: str, **more: Any) -> dict[str, Any]:
    """A worker of this version comes up. Returns the card that stands."""
    return cards.announce(store, card(version, **more), keys.Pool("m", version, "f"), FILES)


def standing(store: Redis) -> dict[str, Any]:
    found = cards.read(store, "m")
    assert found is not None
    return found


class TestWhoseVersionStands:
    def test_without_publishing_the_last_worker_that_came_up(self, valkey: Redis) -> None:
        assert [worker(valkey, version)["version"] for version in ("a", "b", "a")] == ["a", "b", "a"]

    def test_a_worker_of_another_version_leaves_a_published_card_and_has_its_pool(self, valkey: Redis) -> None:
        cards.publish(valkey, card("a"), FILES)
        assert worker(valkey, "b")["version"] == standing(valkey)["version"] == "a"
        assert valkey.hkeys(keys.POOLS) == [b"penstock:queue:m@b.f"]

    def test_publishing_replaces_whatever_stands(self, valkey: Redis) -> None:
        worker(valkey, "a")
        assert cards.publish(valkey, card("b"), FILES)["version"] == "b"
        assert cards.publish(valkey, card("c"), FILES)["version"] == "c"

    def test_publishing_over_a_version_leaves_any_other(self, valkey: Redis) -> None:
        cards.publish(valkey, card("a"), FILES)
        assert cards.publish(valkey, card("c"), FILES, over="b")["version"] == "a"
        assert cards.publish(valkey, card("c"), FILES, over="a")["version"] == "c"
        assert cards.publish(valkey, card("c"), FILES, over="a")["version"] == "c", "done before"

    def test_a_card_stays_published_when_its_own_worker_comes_up(self, valkey: Redis) -> None:
        published = cards.publish(valkey, card("a"), FILES)["published"]
        assert worker(valkey, "a")["published"] == published

    @pytest.mark.parametrize("publisher", ["up:elsewhere.7.ab", "rollout:me@here"])
    def test_a_withdrawn_card_is_of_any_workers_version_and_stays_published_of_its_own(
        self, valkey: Redis, publisher: str
    ) -> None:
        def withdraw() -> None:
            cards.publish(valkey, card("a"), FILES, publisher=publisher)
            (raw, found) = cards.all_of(valkey)["m"]
            assert run(valkey, cards.withdraw(raw, found))

        withdraw()
        again = worker(valkey, "a")
        assert (again["publisher"], "published" in again, "withdrawn" in again) == (publisher, True, False)
        withdraw()
        assert cards.takes_new(standing(valkey), "b")
        other = worker(valkey, "b")
        assert (other["version"], *(name in other for name in ("published", "withdrawn"))) == ("b", False, False)
        assert worker(valkey, "c")["version"] == "c", "as after any worker's card"

    @pytest.mark.parametrize("garbage", ["{", "[1]", "{}", '{"published": 1}', b"\xff"])
    def test_what_is_no_card_counts_as_none_and_is_replaced(self, valkey: Redis, garbage: str | bytes) -> None:
        valkey.hset(keys.MODELS, "m", garbage)
        found = cards.read(valkey, "m")
        assert found is None
        assert cards.takes_new(found, "a")
        assert worker(valkey, "a")["version"] == standing(valkey)["version"] == "a"

    def test_a_race_leaves_a_published_card(self, valkey: Redis, valkey_url: str) -> None:
        """Whoever comes second saw the first, or writes again: no worker's card replaces a published one."""

        def start(what: Any, *args: Any) -> threading.Thread:
            def run() -> None:
                with Redis.from_url(valkey_url) as store:
                    for _ in range(20):
                        what(store, *args)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        threads = [start(worker, "a"), start(worker, "b"), start(cards.publish, card("a"), FILES)]
        threads.append(start(cards.publish, card("b"), FILES))
        for thread in threads:
            thread.join()
        assert "published" in standing(valkey)


class TestWhatOnlyWorkersKnow:
    def test_is_unknown_until_one_was_up_and_kept_when_the_version_is_published_again(self, valkey: Redis) -> None:
        assert "kv_capacity" not in cards.publish(valkey, card("a"), FILES)
        assert worker(valkey, "a", kv_capacity=300, context_length=500)["kv_capacity"] == 300
        again = cards.publish(valkey, card("a"), FILES)
        assert (again["kv_capacity"], again["context_length"]) == (300, 500)

    def test_is_the_largest_capacity_of_a_versions_workers(self, valkey: Redis) -> None:
        cards.publish(valkey, card("a"), FILES)
        assert [worker(valkey, "a", kv_capacity=room)["kv_capacity"] for room in (300, 200, 400)] == [300, 300, 400]
        assert "kv_capacity" not in worker(valkey, "a")

    def test_is_kept_of_a_card_that_only_workers_wrote(self, valkey: Redis) -> None:
        worker(valkey, "a", kv_capacity=300)
        assert cards.publish(valkey, card("a"), FILES)["kv_capacity"] == 300

    @pytest.mark.parametrize(("told", "known"), [({"kv_capacity": 300}, 300), ({}, None)])
    def test_is_learnt_from_workers_that_came_up_before_their_version_was_published(
        self, valkey: Redis, told: dict[str, Any], known: int | None
    ) -> None:
        cards.publish(valkey, card("a"), FILES)
        worker(valkey, "b", **told)
        assert cards.publish(valkey, card("b"), FILES).get("kv_capacity") == known
        assert worker(valkey, "b", kv_capacity=200).get("kv_capacity") == known

    def test_is_not_that_of_another_version(self, valkey: Redis) -> None:
        worker(valkey, "a", kv_capacity=300)
        assert "kv_capacity" not in cards.publish(valkey, card("b"), FILES)


def test_files_are_there_as_long_as_the_card_names_them(valkey: Redis) -> None:
    cards.publish(valkey, card("a"), FILES)
    assert valkey.get(keys.blob("aa")) == b"{}"
    assert json.loads(valkey.hget(keys.MODELS, "m") or "")["files"] == {"tokenizer.json": "aa"}
