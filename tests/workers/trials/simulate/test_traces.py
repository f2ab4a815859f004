"""Traces: what is read, what is refused and where, and what is drawn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from workers.trials.simulate.traces import Arrival, Synthetic, parse, read, write

HEAD = "time,tier,prompt_tokens,output_tokens\n"


def test_columns_may_stand_in_any_order_and_lines_too() -> None:
    lines = ["tier, output_tokens, who, prompt_tokens, time\n", "batch,7,x,5,107.5\n", "priority,3,y,2,100\n"]
    assert parse(lines, "t") == [Arrival(0.0, 0, 2, 3), Arrival(7.5, 3, 5, 7)]


def test_dates_count_from_the_first_and_are_utc_without_a_zone() -> None:
    lines = [HEAD, "2026-11-23T10:00:00+01:00,default,1,1\n", "2026-11-23T09:00:30.5,flex,1,1\n"]
    assert [one.at for one in parse(lines, "t")] == [0.0, 30.5]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "t, line 1: no column time, tier, prompt_tokens, output_tokens"),
        (["time,tier,output_tokens\n"], "t, line 1: no column prompt_tokens"),
        ([HEAD], "t has no task"),
        ([HEAD, "1,default,1,1\n", "soon,default,1,1\n"], "t, line 3: time is 'soon'"),
        ([HEAD, "nan,default,1,1\n"], "t, line 2: time is 'nan'"),
        ([HEAD, "1,urgent,1,1\n"], "t, line 2: tier is 'urgent'; it must be priority, default, flex, batch"),
        ([HEAD, "1,default,-1,1\n"], "t, line 2: prompt_tokens is '-1'"),
        ([HEAD, "1,default,1,1.5\n"], "t, line 2: output_tokens is '1.5'"),
        ([HEAD, "1,default,1\n"], "t, line 2: output_tokens is missing"),
        ([HEAD, "0,default,1,1\n", "1e9,default,1,1\n"], "t: 11,574 days from the first task to the last; at most 366"),
        ([HEAD, "1,default,1,10000001\n"], "t, line 2: output_tokens is '10000001'"),
        ([HEAD, "1,default,1,1\n", "2026-11-23,default,1,1\n"], "t, line 3: time is in seconds on some lines"),
    ],
)
def test_a_bad_line_is_named(lines: list[str], says: str) -> None:
    with pytest.raises(ValueError, match="^" + says.replace(".", r"\.")):
        parse(lines, "t")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(HEAD.encode() + b"1,default,1,\xff\n")
    with pytest.raises(ValueError, match="no CSV file in UTF-8"):
        read(tmp_path / "t.csv")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    drawn = Synthetic(tasks=200, duration=600, seed=3).arrivals()
    write(tmp_path / "t.csv", drawn)
    first = drawn[0].at
    again = read(tmp_path / "t.csv")
    assert [one[1:] for one in again] == [one[1:] for one in drawn]
    assert [one.at for one in again] == pytest.approx([one.at - first for one in drawn], abs=2e-3)


@pytest.mark.parametrize("shape", ["diurnal", "burst", "flat"])
def test_a_drawn_trace_has_its_number_mix_and_means(shape: str) -> None:
    settings = Synthetic(shape, tasks=20_000, seed=1)
    drawn = settings.arrivals()
    assert drawn == Synthetic(shape, tasks=20_000, seed=1).arrivals() != Synthetic(shape, tasks=20_000).arrivals()
    assert [sum(one.rank == rank for one in drawn) for rank in range(4)] == [4000, 8000, 3000, 5000]
    assert all(0 <= one.at <= settings.duration for one in drawn)
    assert sum(one.output for one in drawn) / 20_000 == pytest.approx(1500, rel=0.05)
    assert sum(one.prompt for one in drawn) / 20_000 == pytest.approx(1200, rel=0.05)
    assert [len(Synthetic(shape, tasks=tasks).arrivals()) for tasks in (1, 2, 7, 101)] == [1, 2, 7, 101]


def test_the_day_is_busiest_at_noon_and_batch_comes_in_files() -> None:
    drawn = Synthetic(tasks=20_000, bursts=0).arrivals()
    hours = [sum(one.rank < 3 and one.at // 3600 == hour for one in drawn) for hour in range(24)]
    assert sum(hours[11:13]) > 5 * sum(hours[:1] + hours[23:])
    batch = [one.at for one in drawn if one.rank == 3]
    close = sum(later - earlier < 0.1 for earlier, later in pairwise(batch))
    assert close > 0.95 * len(batch)


@pytest.mark.parametrize("wrong", [{"shape": "square"}, {"peak": 2.5}, {"peak": 0.5}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no shape|peak"):
        Synthetic(**wrong)  # type: ignore[arg-type]
