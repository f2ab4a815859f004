"""Times of schedules, also where the clock is changed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.sources.schedule import Cron, stamp

ZONE = "America/New_York"
#: Clocks go forward at 2026-03-08 07:00 UTC (2:00 is 3:00), and back at 2026-11-01 06:00 UTC (2:00 is 1:00).
SPRING, AUTUMN = "2026-03-07T23:00", "2026-10-31T23:00"


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


def times(cron: Cron, start: str, count: int) -> list[str]:
    found, now = [], at(start)
    for _ in range(count):
        now = cron.after(now)
        found.append(datetime.fromtimestamp(now, UTC).strftime("%dT%H:%M"))
    return found


@pytest.mark.parametrize(
    ("expression", "start", "wanted"),
    [
        ("30 2 * * *", SPRING, ["08T07:00", "09T06:30"]),  # 2:30 is left out: 3:00 in its place
        ("0 * * * *", "2026-03-08T05:30", ["08T06:00", "08T07:00", "08T08:00"]),
        ("30 1 * * *", AUTUMN, ["01T05:30", "02T06:30"]),  # 1:30 comes twice: the first one
        ("0 * * * *", "2026-11-01T04:30", ["01T05:00", "01T06:00", "01T07:00"]),
        ("*/30 1 * * *", AUTUMN, ["01T05:00", "01T05:30", "02T06:00"]),
        ("@daily", SPRING, ["08T05:00", "09T04:00"]),
    ],
)
def test_changes_of_the_clock(expression: str, start: str, wanted: list[str]) -> None:
    assert times(Cron.parse(expression, ZONE), start, len(wanted)) == wanted


@given(
    st.sampled_from(["30 2 * * *", "0 * * * *", "*/20 1-3 * * sun", "30 1 * * *", "15 2 29 3 *", "@monthly"]),
    st.sampled_from([ZONE, "Australia/Lord_Howe", "Africa/Casablanca", "UTC"]),
    st.integers(at("2026-01-01T00:00"), at("2027-12-31T00:00")),
)
def test_before_and_after_are_one_sequence(expression: str, zone: str, now: int) -> None:
    cron = Cron(expression, Cron.parse("@daily", zone).zone)
    later = cron.after(now)
    assert later > now
    assert cron.before(later + 1) == later
    assert cron.before(later) == cron.last_due(later - 1)
    assert cron.last_due(later) == later


def test_jitter_puts_each_firing_off_by_its_own_amount_within_its_bound() -> None:
    cron = Cron.parse("0 * * * *", "UTC", "nightly", 600)
    hours = [cron.after(at("2026-01-01T00:00") + 3600 * hour) for hour in range(100)]
    late = [cron.fires_at(hour) - hour for hour in hours]
    assert all(0 <= one < 600 for one in late)
    assert len(set(late)) == 100
    assert cron.fires_at(hours[0]) == Cron.parse("0 * * * *", "UTC", "nightly", 600).fires_at(hours[0])
    assert cron.last_due(cron.fires_at(hours[5]) - 0.01) == hours[4]
    assert cron.last_due(cron.fires_at(hours[5])) == hours[5]


@pytest.mark.parametrize(
    ("expression", "zone", "jitter", "wrong"),
    [
        ("60 * * * *", "UTC", 0, "five fields"),
        ("* * * * * *", "UTC", 0, "five fields"),
        ("R * * * *", "UTC", 0, "five fields"),
        ("0 H * * *", "UTC", 0, "five fields"),
        ("@reboot", "UTC", 0, "five fields"),
        ("", "UTC", 0, "five fields"),
        ("0 0 30 2 *", "UTC", 0, "never comes"),
        ("* * * * *", "Mars/Olympus", 0, "zone's name"),
        ("* * * * *", "../etc/passwd", 0, "zone's name"),
        ("* * * * *", "UTC", 60, "less than the time between"),
    ],
)
def test_refused(expression: str, zone: str, jitter: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Cron.parse(expression, zone, "x", jitter)


def test_a_stamp_is_utc() -> None:
    assert stamp(at("2026-11-22T03:00")) == "20261122T030000Z"
