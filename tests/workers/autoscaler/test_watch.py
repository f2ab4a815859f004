"""Signals of a pool: what counts for it, the middle of what workers say, and no number out of a lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from producers.admin.fleet import Fleet, Pool, Scaling
from producers.contract import keys, levels
from producers.contract.profile import Profile
from workers.autoscaler import watch
from workers.autoscaler.pools import PoolSettings

NAN = float("nan")


def pool(name: str, *workers: dict[str, Any], **fields: Any) -> Pool:
    queued = dict.fromkeys(keys.TIERS, 0) | fields.pop("queued", {})
    return Pool(name, "tiny", queued=queued, workers=list(workers), **fields)


FLEET = Fleet(
    [
        pool("tiny", queued={"default": 1}),
        pool("tiny@1", queued={"default": 2, "flex": 1}, oldest_s={"default": 3.0}),
        pool("tiny@1.cpu", {"worker": "a", "running": 2, "patient": 1}, in_flight=3),
        pool("tiny@12", queued={"default": 50}),
        pool("tiny@2", queued={"default": 4}, oldest_s={"default": 9.0}, delayed=1),
    ],
    at=100.0,
    versions={"tiny": "1"},
)


def test_tasks_of_a_version_that_no_worker_serves_are_told_where_others_are_up() -> None:
    said = "tasks wait for version 12, 2, and the workers that are up serve 1: start workers of the version that"
    assert watch.stranded(FLEET, PoolSettings("tiny")).startswith(said)
    assert watch.stranded(FLEET, PoolSettings("tiny", "2")) == "", "its workers come"
    empty = Fleet([replace(queue, workers=[]) for queue in FLEET.pools], at=100.0, versions={"tiny": "1"})
    assert watch.stranded(empty, PoolSettings("tiny")) == "", "nor do those of any: they are started"


@pytest.mark.parametrize(
    ("told", "share"),
    [
        *(((0.5, 1.0), 0.75), ((0.5, None), 0.75), ((0.5, "much"), 0.75), ((7.0, -3.0), 1.0)),
        *(((1e-9,), watch.LEAST_SHARE), ((0.0,), watch.LEAST_SHARE)),
    ],
)
def test_what_workers_say_of_their_turns_counts_within_bounds(told: tuple[Any, ...], share: float) -> None:
    leases = [{"worker": str(number), "turn_share": value} for number, value in enumerate(told)]
    fleet = Fleet([pool("tiny@1", *leases)], at=100.0, versions={"tiny": "1"})
    assert watch.signals(fleet, PoolSettings("tiny")).turn_share == pytest.approx(share)


def test_a_pool_of_a_version_has_its_queues_and_that_of_plain_senders_if_it_is_the_cards() -> None:
    one, other = (watch.signals(FLEET, PoolSettings("tiny", version)) for version in ("1", "2"))
    assert (one.queued, one.in_flight, one.patient, one.ready, one.tiers["default"].oldest_s) == (4, 3, 1, 1, 3.0)
    assert (other.queued, other.in_flight, other.ready) == (4, 0, 0)
    assert watch.signals(FLEET, PoolSettings("tiny")).queued == 58
    assert [watch.remaining_tasks(FLEET, PoolSettings("tiny", version)) for version in ("1", "2", "3")] == [7, 5, 0]


def test_tasks_that_not_every_release_can_do_are_told_by_level_with_who_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEVEL", 2)
    busy = {"level": 1, "tasks": 3, "patient": 1}
    fleet = Fleet(
        [
            pool("tiny@1", queued={"default": 2}),
            pool("tiny@1+1", queued={"default": 4, "flex": 1}),
            pool("tiny@1+2", queued={"default": 1}),
            pool("tiny@1+3", queued={"default": 7}),
            pool("tiny@1.cpu", {"worker": "a"}, {"worker": "b", **busy}, {"worker": "c", "level": 1, "draining": True}),
        ],
        versions={"tiny": "1"},
    )
    seen = watch.signals(fleet, PoolSettings("tiny"))
    assert [(one.level, one.waiting["default"], one.waiting["flex"]) for one in seen.levels] == [(1, 5, 1), (2, 1, 0)]
    assert [(one.below, one.able, one.in_flight) for one in seen.levels] == [(1, 1, 2), (2, 0, 0)]
    assert (seen.queued, seen.aside, seen.ready) == (8, 7, 2)


def test_numbers_that_lie_are_missing_and_never_zero() -> None:
    lying = [
        pool("tiny@1", queued={"default": -1, "batch": NAN}, oldest_s={"default": NAN}, in_flight="many"),
        pool("tiny@1.cpu", {"worker": "a", "running": -3, "kv_blocks_total": 10, "kv_blocks_used": 11}),
    ]
    seen = watch.signals(Fleet(lying, versions={"tiny": "1"}), PoolSettings("tiny"))
    assert set(seen.missing) == {"queued", "in_flight", "running"}
    assert (seen.kv_used, seen.tiers["default"].oldest_s) == (None, None)
    assert watch.remaining_tasks(Fleet(lying), PoolSettings("tiny")) is None
    assert watch.signals(Fleet([]), PoolSettings("tiny")).missing == ("queued", "in_flight", "card")


def test_numbers_too_large_to_be_added_are_missing() -> None:
    most = sys.float_info.max
    huge = {"profile": {"duty": most, "knee": most}, "kv_blocks_total": most, "kv_blocks_used": most}
    fleet = Fleet([pool("tiny@1", {"worker": "a", **huge}, {"worker": "b", **huge})], versions={"tiny": "1"})
    seen = watch.signals(fleet, PoolSettings("tiny"))
    assert (seen.kv_used, seen.profile.duty, seen.profile.knee) == (None, None, None)


def test_what_was_kept_goes_before_what_workers_say_but_for_this_moments_figures() -> None:
    """Workers merge their measurements into what is kept, and know which of them to believe."""
    kept = Profile(knee=4.0, tokens_per_s=50.0, ttft_p95=9.0, duty=1.0, cold_start={"total": 3.0})
    said = [{"knee": 8, "ttft_p95": 0.2, "duty": 0.0}, {"knee": 100, "ttft_p95": 0.4, "duty": 1.0}, {"knee": 10}]
    workers = [{"worker": str(number), "profile": one} for number, one in enumerate(said)]
    ends = [{"worker": "z", "draining": True, "profile": {"knee": 1}}]

    def profile(*leases: dict[str, Any], profiles: dict[str, Profile]) -> Profile:
        fleet = Fleet([pool("tiny@1.cpu", *leases)], versions={"tiny": "1"}, scaling=Scaling(profiles=profiles))
        return watch.signals(fleet, PoolSettings("tiny")).profile

    there = {"tiny@1": kept}
    assert profile(*workers, *ends, profiles=there) == replace(kept, ttft_p95=0.4, duty=0.5)
    assert profile(*workers, *ends, profiles={}) == Profile(knee=10.0, ttft_p95=0.4, duty=0.5)
    assert profile(profiles=there) == replace(kept, ttft_p95=None, duty=None)


def test_who_should_go_first() -> None:
    workers = [
        {"worker": "busy", "running": 5},
        {"worker": "odd", "running": "x"},
        {"worker": "idle"},
        {"worker": "taking", "running": 0, "tasks": 1},
        {"worker": "broken", "running": 2, "unready": ["its GPU is lost"]},
        {"worker": "ending", "draining": True},
    ]
    fleet = Fleet([pool("tiny@1.cpu", *workers)])
    assert watch.victims(fleet, PoolSettings("tiny")) == ["ending", "broken", "idle", "taking", "busy", "odd"]
