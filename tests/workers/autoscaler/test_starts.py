"""Starts that fail: growing pauses, an end after so many, and all forgotten once one succeeds."""

from __future__ import annotations

from dataclasses import asdict

from workers.autoscaler.actuators import Actual
from workers.autoscaler.control import FIRST_PAUSE_S, GIVEN_UP_S, Starts, limit_of
from workers.autoscaler.policy import restored

LIMIT = 100.0


def after(
    one: Starts, at: float, *, ready: int = 0, wanted: int = 1, failures: int | None = None, retry: float = 0.0
) -> Starts:
    actual = None if failures is None else Actual(wanted, wanted, "no GPU", failures)
    return one.updated(at, ready, wanted, actual, limit=LIMIT, tries=3, retry=retry)


#: An actuator was looked at, of which no start failed yet.
BEGUN = after(Starts(), 0.0, wanted=0, failures=0)


def test_each_failure_doubles_the_pause_and_the_last_ends_the_tries() -> None:
    one, at, pauses = BEGUN, 0.0, []
    for failures in (1, 2, 3):
        one = after(one, at, failures=failures)
        assert one.request(4, at) == 0
        pauses.append(one.until - at)
        at = one.until
        assert one.request(4, at) == 4
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, GIVEN_UP_S]
    assert "3 tries in a row failed: no GPU (given up" in one.trouble(at - 1, 3, "tiny")
    assert (one.given_up(at - 1, 3), one.given_up(at - 1, 4), one.given_up(at, 3)) == (at - GIVEN_UP_S, None, None)
    assert after(one, at, failures=4).until == at + GIVEN_UP_S, "one more try, and again the long pause"


def test_a_worker_that_is_never_ready_fails_by_time_and_gets_longer_each_time() -> None:
    one = after(Starts(), 0.0)
    assert after(one, LIMIT).failures == 0
    one = after(one, LIMIT + 1)
    assert (one.failures, one.why) == (1, "no worker became ready for 101 s")
    begun = one.until
    one = after(after(one, begun - 1), begun)
    assert after(one, begun + 1.5 * LIMIT).failures == 1
    assert after(one, begun + 2.5 * LIMIT).failures == 2


def test_a_worker_that_becomes_ready_is_a_success_and_others_that_fail_count_anew() -> None:
    one = after(BEGUN, 0.0, wanted=2, failures=2)
    one = after(one, one.until, ready=1, wanted=2, failures=2)
    assert (one.failures, one.request(2, one.until)) == (0, 2)
    one = after(one, 100.0, ready=1, wanted=2, failures=3)
    assert one.failures == 1
    assert one.request(2, 100.0) == 1, "the one that is ready goes on"


def test_failures_outlive_a_moment_without_demand_and_a_new_actuator() -> None:
    assert after(Starts(), 0.0, failures=7).failures == 0, "what failed before anybody looked"
    one = after(BEGUN, 0.0, failures=3)
    one = after(one, 1.0, wanted=0, failures=0)
    assert one.failures == 3
    assert one.request(1, 2.0) == 0


def test_leases_that_lapsed_with_the_store_end_no_worker() -> None:
    """After an outage nobody is ready for a moment, and a worker that was restarted meanwhile has failed."""
    one = after(BEGUN, 0.0, ready=3, wanted=4, failures=0)
    one = after(one, 500.0, ready=0, wanted=4, failures=5)
    assert (one.failures, one.paused(501.0)) == (5, True)
    assert one.request(4, 501.0) == 3
    for at in range(510, 580, 10):
        one = after(one, float(at), ready=1, wanted=4, failures=5)
    assert one.sure == 1, "it stayed so"


def test_a_retry_forgets_and_is_heard_once() -> None:
    one = after(BEGUN, 0.0, failures=3)
    one = after(one, 5.0, failures=3, retry=4.0)
    assert (one.failures, one.request(1, 5.0)) == (0, 1)
    assert after(one, 6.0, failures=4, retry=4.0).failures == 1


def test_it_comes_back_from_json_and_the_limit_follows_the_cold_start() -> None:
    one = after(BEGUN, 0.0, failures=3)
    assert restored(Starts, asdict(one)) == one
    assert [limit_of(None, 10.0), limit_of(None, 60.0), limit_of(5.0, 60.0)] == [120.0, 240.0, 5.0]
