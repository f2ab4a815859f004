"""Requests that arrive by chance, what is told of them, and the chart."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.bench.load import TokenTimes, arrivals, figures, percentiles, plotted
from engine.bench.plot import Line, chart
from engine.request import Tier


def test_arrivals_are_as_often_as_is_asked_and_the_same_again() -> None:
    found = arrivals("chat", 4.0, 4000, 500, 7)
    assert found == arrivals("chat", 4.0, 4000, 500, 7)
    assert found[-1].at == pytest.approx(1000, rel=0.05)
    gaps = [b.at - a.at for a, b in pairwise(found)]
    # Exponential: as many below the mean as a Poisson process has.
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)


def test_mixes_are_what_they_are_called() -> None:
    one, other = arrivals("prefix", 1.0, 2, 500, 7)
    assert one.prompt[:400] == other.prompt[:400]
    assert one.prompt[400:] != other.prompt[400:]
    assert len(arrivals("long", 1.0, 1, 500, 7)[0].prompt) == 1500
    tiers = [one.tier for one in arrivals("tiers", 1.0, 500, 500, 7)]
    assert [tiers.count(tier) for tier in Tier] == pytest.approx([100, 300, 0, 100], abs=40)


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentiles([i / 1000 for i in range(1, 101)]) == pytest.approx({"p50": 50, "p95": 95, "p99": 99})
    assert percentiles([0.002]) == {"p50": 2, "p95": 2, "p99": 2}


def test_latencies_are_from_arrival_and_by_tier() -> None:
    told = [TokenTimes(Tier.PRIORITY, [0.1, 0.15, 0.2]), TokenTimes(Tier.BATCH, [2.0])]
    found = figures(told, 4.0)
    assert (found["requests"], found["output_tokens_per_s"]) == (2, 1.0)
    assert found["ttft_ms"]["p95"] == 2000
    assert found["itl_ms"]["p50"] == pytest.approx(50)
    assert {tier: own["p50"] for tier, own in found["ttft_ms_by_tier"].items()} == {"priority": 100, "batch": 2000}


def test_a_chart_has_each_line_where_its_points_are() -> None:
    svg = chart("a < b", "x", "y", [Line("up", [(1, 10), (10, 100)]), Line("flat", [(1, 10), (10, 10)])])
    tree = ElementTree.fromstring(svg)
    drawn = [line.get("points", "") for line in tree.iter("{http://www.w3.org/2000/svg}polyline")]
    up, flat = [[tuple(map(float, point.split(","))) for point in points.split()] for points in drawn]
    assert up[0] == flat[0]
    assert up[0][0] < up[1][0] == flat[1][0]
    # Upwards is towards 0.
    assert up[1][1] < up[0][1] == flat[1][1]
    assert "a &lt; b" in svg


@pytest.mark.parametrize("lines", [[], [Line("none", [(1, 0)])]])
def test_a_chart_of_nothing_is_refused(lines: list[Line]) -> None:
    with pytest.raises(ValueError, match=r"needs a point|no place for 0"):
        chart("", "", "", lines)


@pytest.mark.slow
def test_the_command_measures_and_draws(model_folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "load.json", tmp_path / "load.svg"
    command = [sys.executable, "-m", "engine.bench", "--model", str(model_folder), "--load", "--mix", "chat,tiers"]
    command += ["--rates", "20,40", "--requests", "5", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    ran = subprocess.run(
        [*command, "--json", str(out), "--plot", str(plot)], check=True, capture_output=True, text=True
    )
    assert "requests/s" in ran.stdout
    found = json.loads(out.read_text())["load"]
    assert [(mix, one["rate"], one["requests"]) for mix, rates in found.items() for one in rates] == [
        ("chat", 20, 5),
        ("chat", 40, 5),
        ("tiers", 20, 5),
        ("tiers", 40, 5),
    ]
    assert plot.read_text() == plotted(found)
