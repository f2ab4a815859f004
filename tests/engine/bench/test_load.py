"""Requests that arrive by chance, and what is told of them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from engine.bench.load import TokenTimes, arrivals, figures, percentiles
from engine.bench.offline import main
from engine.request import Tier


def test_arrivals_are_as_often_as_is_asked_and_the_same_again() -> None:
    found = arrivals("chat", 4.0, 1000, 500, 7)
    assert found == arrivals("chat", 4.0, 1000, 500, 7)
    assert found[-1].at == pytest.approx(250, rel=0.05)
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


def test_the_command_measures(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    command = ["bench", "--model", str(model_folder), "--load", "--mix", "tiers", "--json", str(out)]
    command += ["--rates", "20,40", "--requests", "5", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert "requests/s" in capsys.readouterr().out
    found = json.loads(out.read_text())["load"]
    assert [(one["rate"], one["requests"]) for one in found["tiers"]] == [(20, 5), (40, 5)]
