"""Which version a new task goes to: aliases, split and rules, and what becomes of a change that others make at once."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from redis import Redis

from producers.admin import routes
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import protocol
from producers.store.fleet import cards, routing
from producers.store.fleet.routing import Routing, RoutingError, Rule, Selection
from producers.sweeper.queues import RetiredPools
from producers.sweeper.retention import Stale
from tests.histories import SEED, examples

FILES = {"tokenizer.json": b"{}"}
MANY = [f"user-{number}" for number in range(10_000)]


def card(version: str, **more: Any) -> dict[str, Any]:
    files = {"tokenizer.json": f"{ord(version[0]):064x}"}
    return {"v": 1, "name": "m", "version": version, "context_length": 1000, "files": files, **more}


@pytest.fixture
def two(valkey: Redis) -> Redis:
    """A store with a model of two versions: `a` is published, and a worker of `b` is up."""
    cards.publish(valkey, card("a"), FILES)
    cards.announce(valkey, card("b", kv_capacity=500), keys.Pool("m", "b", "f"), FILES)
    return valkey


def parts(ranges: Sequence[tuple[str, int]]) -> Counter[str]:
    widths = Counter[str]()
    begin = 0
    for target, end in ranges:
        widths[target] += end - begin
        begin = end
    return widths


def target_at(ranges: Sequence[tuple[str, int]], point: int) -> str:
    return next(target for target, end in ranges if point < end)


def shares(state: Routing) -> dict[str, str]:
    return {key: state.target(Selection(sticky=key)) for key in MANY}


class TestSplit:
    def test_each_target_gets_its_part_and_a_key_stays(self) -> None:
        state = Routing("m", 1, "a", {"candidate": "b"}, {"candidate": 5, "c": 20})
        parts = Counter(shares(state).values())
        assert parts["candidate"] == pytest.approx(500, abs=75)
        assert parts["c"] == pytest.approx(2000, abs=150)
        assert shares(state) == shares(state)

    @pytest.mark.parametrize("others", [{}, {"c": 30}, {"c": 10, "d": 20, "e": 5}])
    def test_a_change_of_percent_moves_few_keys(self, others: dict[str, float]) -> None:
        before = Routing("m", 1, "a", {}, {"b": 20, **others})
        new_state = replace(before, split={"b": 25, **others})
        old, new = shares(before), shares(new_state)
        moved = [key for key in MANY if old[key] != new[key]]
        assert 450 <= len(moved) <= 550
        assert {(old[key], new[key]) for key in moved} == {("default", "b")}, "none moves between the others"
        assert shares(Routing.of("m", new_state.to_json()) or before) == new
        assert shares(replace(new_state, split=before.split)) == old, "and back"

    def test_however_often_it_is_changed_no_more_keys_move_than_parts_change(self) -> None:
        draw, ranges = random.Random(SEED), routing.ranges_of({"a": 10})
        for _ in range(examples(60, 2000)):
            weights = [draw.expovariate(1) for _ in range(draw.randint(2, routing.MOST + 1))]
            split = {f"t{n}": 100 * weight / sum(weights) for n, weight in enumerate(weights[1:])}
            if draw.random() < 0.1:
                split[next(iter(split))] += 100 - sum(split.values())
            after = routing.ranges_of(split, ranges)
            assert routing.ranges_of(split, after) == after
            old, new = parts(ranges), parts(after)
            for target, percent in split.items():
                assert new[target] == pytest.approx(percent * routing.WHOLE / 100, abs=2)
            moved = sum(abs(old[target] - new[target]) for target in {*old, *new}) // 2
            ends = sorted({0, *(end for _, end in (*ranges, *after))})
            changed = [(a, b) for a, b in pairwise(ends) if target_at(ranges, a) != target_at(after, a)]
            assert sum(b - a for a, b in changed) == moved, (ranges, split)
            ranges = after
        assert len(ranges) <= routing.MOST_RANGES

    @pytest.mark.parametrize("ranges", [[["b", 5]], [["b", 0], ["c", routing.WHOLE]], [["b"]], "b", [[1, "b"]]])
    def test_ranges_that_make_no_sense_are_no_routing(self, ranges: Any) -> None:
        state = json.loads(Routing("m", 1, "a", {}, {"b": 20}).to_json())
        assert Routing.of("m", json.dumps({**state, "ranges": ranges})) is None

    def test_tasks_without_a_key_are_spread_and_a_tenant_can_be_the_key(self) -> None:
        state = Routing("m", 1, "a", {}, {"b": 50})
        assert {state.target(Selection()) for _ in range(100)} == {"b", "default"}
        state = replace(state, sticky="tenant")
        assert len({state.target(Selection(sticky=key, tenant="acme")) for key in MANY[:100]}) == 1

    def test_a_rule_goes_before_the_split_and_what_a_task_names_before_all(self) -> None:
        rules = (Rule("b", tenant="acme"), Rule("c", header="X-Beta: yes"), Rule("d", tier="batch"))
        state = Routing("m", 1, "a", {}, {"e": 100}, rules)
        assert state.target(Selection(tenant="acme", tier="batch")) == "b"
        assert state.target(Selection(headers={"x-beta": "yes"})) == "c"
        assert state.target(Selection(tier="batch", headers={"x-beta": "no"})) == "d"
        assert state.target(Selection("f", tenant="acme")) == "f"
        assert state.target(Selection()) == "e"


class TestChanges:
    def test_an_alias_leads_to_a_version_and_the_default_is_the_card(self, two: Redis) -> None:
        first = routes.set_aliases(two, "m", {"candidate": "b"})
        assert (first.generation, first.default, first.aliases) == (1, "a", {"candidate": "b"})
        second = routes.set_aliases(two, "m", {"default": "candidate"})
        assert (second.generation, second.default) == (2, "b")
        standing = cards.read(two, "m")
        assert standing is not None
        assert (standing["version"], standing["kv_capacity"], standing["served"]) == ("b", 500, True)
        assert cards.of_version(two, "m", "a") is not None
        back = routes.restore(two, "m", 1)
        assert (back.generation, back.default) == (3, "a")
        assert [state.generation for state in routing.history(two, "m")] == [3, 2, 1]
        audit = [json.loads(fields[b"e"])["did"] for _, fields in two.xrange(keys.AUDIT)]
        assert audit.count("model.route") == 3

    def test_a_worker_that_starts_takes_the_default_of_a_model_with_a_routing_over_from_nobody(
        self, valkey: Redis
    ) -> None:
        for version in ("a", "b"):
            cards.announce(valkey, card(version), keys.Pool("m", version, "f"), FILES)
        routes.set_aliases(valkey, "m", {"candidate": "a"})
        cards.announce(valkey, card("a"), keys.Pool("m", "a", "f"), FILES)
        assert routes.current(valkey, "m").default == "b"

    def test_publishing_is_a_change_of_the_default(self, two: Redis) -> None:
        routes.set_split(two, "m", {"b": 10})
        cards.publish(two, card("c"), FILES)
        state = routing.read(two, "m")
        assert state is not None
        assert (state.generation, state.default, state.split) == (2, "c", {"b": 10})

    @pytest.mark.parametrize("by", ["routing", "publishing"])
    def test_a_card_of_an_earlier_release_is_kept_for_the_way_back(self, two: Redis, by: str) -> None:
        two.hdel(keys.VERSIONS, "m@a")  # which it does not know
        if by == "routing":
            routes.set_aliases(two, "m", {"default": "b"})
        else:
            cards.publish(two, card("c"), FILES)
        assert routes.set_aliases(two, "m", {"default": "a"}).default == "a"

    def test_what_is_left_of_a_removed_models_routing_does_not_keep_it_away(self, two: Redis) -> None:
        routes.set_split(two, "m", {"b": 10})
        two.hdel(keys.MODELS, "m")  # and `remove` dies
        cards.publish(two, card("c"), FILES)
        standing = cards.read(two, "m")
        assert standing is not None
        assert standing["version"] == "c"
        assert routing.read(two, "m") is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda store: routes.set_split(store, "m", {"b": 70, "a": 40}), "110 percent together"),
            (lambda store: routes.set_split(store, "m", {"b": 0}), "above 0"),
            (lambda store: routes.set_split(store, "m", {"b": float("nan")}), "above 0"),
            (lambda store: routes.set_split(store, "m", {"default": 10}), "the others leave"),
            (lambda store: routes.set_split(store, "m", {"b": 10}, "weather"), "caller or tenant"),
            (lambda store: routes.set_aliases(store, "m", {"candidate": "zzz"}), "'zzz' is no alias of m"),
            (lambda store: routes.set_aliases(store, "m", {"9": "b"}), "cannot be an alias"),
            (lambda store: routes.set_aliases(store, "m", {"b": "a"}), "'b' is a version of m"),
            (lambda store: routes.set_aliases(store, "m", {}, ["gone"]), "has no alias 'gone'"),
            (lambda store: routes.add_rule(store, "m", Rule("b")), "looks at one of"),
            (lambda store: routes.add_rule(store, "m", Rule("b", tenant="")), "looks at one of"),
            (lambda store: routes.add_rule(store, "m", Rule("b", header="X")), "`Name: value`"),
            (lambda store: routes.add_rule(store, "m", Rule("zzz", tenant="t")), "'zzz' is no alias"),
            (lambda store: routes.restore(store, "m", 9), "generation 9 of m is not kept"),
            (lambda store: routes.current(store, "other"), "there is no model 'other'; there are m"),
        ],
    )
    def test_what_makes_no_sense_is_refused_and_changes_nothing(self, two: Redis, change: Any, message: str) -> None:
        with pytest.raises(RoutingError, match=message):
            change(two)
        assert routing.read(two, "m") is None

    def test_an_alias_that_the_split_names_is_not_removed(self, two: Redis) -> None:
        routes.set_aliases(two, "m", {"candidate": "b"})
        routes.set_split(two, "m", {"candidate": 10})
        with pytest.raises(RoutingError, match="the split of m leads to the alias 'candidate': end that first"):
            routes.set_aliases(two, "m", {}, ["candidate"])

    def test_two_people_change_it_at_once_and_neither_change_is_lost(self, two: Redis, valkey_url: str) -> None:
        def add(prefix: str) -> None:
            with Redis.from_url(valkey_url) as store:
                for number in range(6):
                    routes.set_aliases(store, "m", {f"{prefix}{number}": "b"})

        threads = [threading.Thread(target=add, args=(prefix,)) for prefix in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        state = routing.read(two, "m")
        assert state is not None
        assert (state.generation, len(state.aliases)) == (12, 12)

    def test_a_reply_that_was_lost_does_it_once(self, two: Redis) -> None:
        state = routes.current(two, "m").changed("me", aliases={"x": "b"})
        assert [run(two, routing.route(state, None)) for _ in range(2)] == [1, 1]
        assert not run(two, routing.route(replace(state, at=1), None)), "another one of the same generation"


class TestStages:
    def test_each_has_who_and_why_in_the_audit_log_and_outlives_a_way_back(self, two: Redis) -> None:
        routes.set_aliases(two, "m", {"candidate": "b"})
        state = routes.set_stages(two, "m", {"candidate": "approved", "a": "staging"}, "evaluated")
        assert (state.stages, state.stage("c")) == ({"b": "approved", "a": "staging"}, "none")
        assert routes.restore(two, "m", 1).stages == state.stages
        assert routes.set_stages(two, "m", {"a": "none"}).stages == {"b": "approved"}
        audit = [json.loads(fields[b"e"]) for _, fields in two.xrange(keys.AUDIT)]
        (entry, _) = [change for change in audit if change["did"] == "model.stage"]
        assert entry["what"] == "m: candidate approved, a staging: evaluated"
        assert entry["by"].startswith("cli:")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda store: routes.set_stages(store, "m", {"a": "archived"}), "the default leads to a of m"),
            (lambda store: routes.set_stages(store, "m", {"b": "done"}), "'done' is no stage"),
            (lambda store: routes.set_stages(store, "m", {"zzz": "staging"}), "'zzz' is no alias of m"),
            (lambda store: routes.set_aliases(store, "m", {"old": "x"}), "x of m is archived, and the alias 'old'"),
            (lambda store: routes.set_aliases(store, "m", {"default": "x"}), "x of m is archived, and the default"),
            (lambda store: routes.set_split(store, "m", {"x": 5}), "x of m is archived, and the split"),
            (lambda store: routes.add_rule(store, "m", Rule("x", tenant="t")), "x of m is archived, and a rule"),
            (lambda store: cards.publish(store, card("x"), FILES), "x of m is archived, and the default"),
            (lambda store: cards.check_default(store, "m", "x"), "x of m is archived"),
        ],
    )
    def test_nothing_leads_to_an_archived_version(self, two: Redis, change: Any, message: str) -> None:
        cards.add_version(two, card("x"), FILES)
        before = routes.set_stages(two, "m", {"x": "archived"})
        with pytest.raises(RoutingError, match=message):
            change(two)
        assert routes.current(two, "m") == before

    def test_where_approval_is_demanded_only_approved_versions_get_what_names_none(self, two: Redis) -> None:
        with pytest.raises(RoutingError, match="a of m is not approved"):
            routes.set_approval(two, "m", required=True)
        routes.set_stages(two, "m", {"a": "approved", "b": "staging"})
        routes.set_approval(two, "m", required=True)
        assert routes.set_aliases(two, "m", {"candidate": "b"}).aliases == {"candidate": "b"}
        for change in (
            lambda: routes.set_split(two, "m", {"candidate": 5}),
            lambda: cards.publish(two, card("b"), FILES),
            lambda: routes.set_stages(two, "m", {"a": "none"}),
        ):
            with pytest.raises(RoutingError, match="is not approved"):
                change()
        routes.set_stages(two, "m", {"b": "approved"})
        assert routes.set_split(two, "m", {"candidate": 5}).split == {"candidate": 5}

    def test_a_worker_does_not_take_an_approved_default_over(self, two: Redis) -> None:
        routes.set_stages(two, "m", {"a": "approved"})
        routes.set_approval(two, "m", required=True)
        current = cards.all_of(two)["m"]
        assert run(two, cards.withdraw(*current))
        cards.announce(two, card("b"), keys.Pool("m", "b", "f"), FILES)
        assert routes.current(two, "m").default == "a"


async def test_the_sweeper_keeps_what_a_routing_names(two: Redis, aclient: Any) -> None:
    for version in "cdefghijklmnop":
        cards.add_version(two, card(version), FILES)
    routes.set_aliases(two, "m", {"old": "c"})
    await Stale(aclient, unneeded_s=0.0).sweep()
    left = {text(field).partition("@")[2] for field in two.hkeys(keys.VERSIONS)}
    assert {"a", "b", "c"} <= left
    assert left == {*"abcdefghijklmnop"}, "all of them have a pool"
    for queue in [name for name, entry in two.hgetall(keys.POOLS).items() if json.loads(entry)["version"] not in "abc"]:
        two.hdel(keys.POOLS, queue)
    await Stale(aclient, unneeded_s=0.0).sweep()
    left = {text(field).partition("@")[2] for field in two.hkeys(keys.VERSIONS)}
    assert {"a", "b", "c"} <= left
    assert len(left) == 3 + cards.KEPT_VERSIONS
    sweeper = RetiredPools(aclient, retire_after_s=0.0)
    for _ in range(2):
        await sweeper.sweep()
    assert "c" in {json.loads(entry)["version"] for entry in two.hvals(keys.POOLS)}
    two.delete(keys.MODELS, keys.POOLS, keys.routing("m"))
    await Stale(aclient, unneeded_s=0.0).sweep()
    assert not two.exists(keys.VERSIONS), "the model was removed"


class TestPlainCelery:
    """Plain senders name the model alone, or `model@alias`; CLAIM decides, by the task's id."""

    def claim(self, store: Redis, task_id: str, version: str, **fields: str) -> protocol.Claimed:
        store.set(keys.lease("w"), "{}")
        pool = keys.Pool("m", version, "f")
        plain = {"model": "m", "queue": pool.version_queue, "tier": "default", "n": 1, "task": "{}", **fields}
        answer = run(store, protocol.claim(task_id, f"c-{task_id}", "w", pool, plain=plain))
        return protocol.read_claim(task_id, answer)

    def test_the_split_is_that_of_clients(self, two: Redis) -> None:
        cards.add_version(two, card("c"), FILES)
        for split in ({"b": 10}, {"b": 40, "c": 30}, {"b": 40, "c": 5}):
            routes.set_split(two, "m", split)
        state = routes.set_split(two, "m", {"b": 40})
        assert len(state.ranges) > 2
        two.sadd("penstock:workers:penstock:queue:m@b.f", "w")
        for task_id in MANY[:60]:
            claimed = self.claim(two, task_id, "a")
            if state.target(Selection(sticky=task_id)) == "default":
                assert claimed.answer == "go"
            else:
                assert (claimed.answer, claimed.queue) == ("elsewhere", "penstock:queue:m@b")
                assert not two.exists(keys.task(task_id))
                there = self.claim(two, task_id, "b")
                assert there.record is not None
                assert (there.answer, there.record.fields["generation"]) == ("go", "4")

    def test_a_version_without_a_worker_gets_none(self, two: Redis) -> None:
        routes.set_split(two, "m", {"b": 100})
        assert self.claim(two, "t", "a").answer == "go"

    def test_a_message_that_names_an_alias_goes_there_and_waits(self, two: Redis) -> None:
        routes.set_aliases(two, "m", {"candidate": "b"})
        claimed = self.claim(two, "t", "a", alias="candidate")
        assert (claimed.answer, claimed.queue) == ("elsewhere", "penstock:queue:m@b")
        assert self.claim(two, "t", "b", alias="candidate").answer == "go"

    @pytest.mark.parametrize("worker", ["a", "b"])
    def test_a_message_that_names_an_archived_version_fails(self, two: Redis, worker: str) -> None:
        routes.set_stages(two, "m", {"b": "archived"})
        claimed = self.claim(two, "t", worker, alias="b")
        assert claimed.record is not None
        assert (claimed.answer, claimed.record.json("error")["code"]) == ("settle", "model_not_found")

    @pytest.mark.parametrize("alias", ["nothing", "b"])
    def test_one_that_names_nothing_or_what_nobody_looks_after_fails(self, two: Redis, alias: str) -> None:
        two.hdel(keys.POOLS, "penstock:queue:m@b.f")
        claimed = self.claim(two, "t", "a", alias=alias)
        assert claimed.record is not None
        assert (claimed.answer, claimed.record.json("error")["code"]) == ("settle", "model_not_found")
