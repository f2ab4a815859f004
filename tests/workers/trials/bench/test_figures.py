"""Figures and pictures, from samples of known times."""

from __future__ import annotations

import json
from array import array
from xml.etree import ElementTree

import pytest

from workers.trials.bench.figures import Limits, percentile, plot, summary
from workers.trials.bench.load import Client, Sample

CLIENT = Client(cpu_s=1.0, wall_s=10.0, lags=array("d", [0.001] * 99 + [0.5]))


def sample(number: int, due: float, *tokens: float, **more: object) -> Sample:
    made = Sample(number, "default", due, due, array("d", tokens), tokens[-1] if tokens else due + 1)
    for name, value in more.items():
        setattr(made, name, value)
    return made


#: TTFT 0.1 and 0.3, gaps 0.1 0.1 and 0.2 0.4, end to end 0.3 and 0.9.
TWO = [sample(0, 1.0, 1.1, 1.2, 1.3, queue_wait=0.05), sample(1, 2.0, 2.3, 2.5, 2.9, prompt_tokens=7)]


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = sample(0, 1.0, 5.0, sent=4.9)
    assert summary([late], CLIENT, Limits())["latency_s"]["ttft"]["mean"] == pytest.approx(4.0)


def test_figures_are_those_of_the_samples() -> None:
    figures = summary(TWO, CLIENT, Limits())
    latency = figures["latency_s"]
    assert latency["ttft"]["mean"] == pytest.approx(0.2)
    assert latency["ttft"]["max"] == pytest.approx(0.3)
    assert latency["itl"]["p50"] == pytest.approx(0.1)
    assert latency["itl"]["mean"] == pytest.approx(0.2)
    assert latency["e2e"]["p99"] == pytest.approx(0.9)
    assert latency["queue_wait"]["mean"] == pytest.approx(0.05)
    assert figures["duration_s"] == pytest.approx(1.9)
    assert figures["offered_per_s"] == pytest.approx(1.0)
    assert figures["completed_per_s"] == pytest.approx(2 / 1.9)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (7, 6)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 1.9)
    json.dumps(figures)


def test_failures_are_counted_by_kind_and_are_in_no_latency() -> None:
    failed = [sample(k, 1.0, error=error) for k, error in enumerate(["503", "silence", "503"], start=2)]
    figures = summary([*TWO, *failed], CLIENT, Limits())
    assert figures["requests"] == {"sent": 5, "completed": 2, "failed": 3, "errors": {"503": 2, "silence": 1}}
    assert figures["latency_s"] == summary(TWO, CLIENT, Limits())["latency_s"]
    assert figures["goodput"]["share"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), 2),
        (Limits(ttft=0.2), 1),
        (Limits(ttft=0.31, itl=0.3001), 2),
        (Limits(itl=0.2), 1),
        (Limits(ttft=0.2, itl=0.05), 0),
    ],
)
def test_goodput_is_of_those_that_kept_every_limit(limits: Limits, good: int) -> None:
    goodput = summary(TWO, CLIENT, limits)["goodput"]
    assert goodput["good"] == good
    assert goodput["per_s"] == pytest.approx(good / 1.9)


def test_a_request_without_tokens_keeps_no_limit_on_the_first() -> None:
    none = sample(0, 1.0)
    assert summary([none], CLIENT, Limits(ttft=100.0))["goodput"]["good"] == 0
    assert summary([none], CLIENT, Limits())["goodput"]["good"] == 1


def test_a_warm_up_counts_for_nothing() -> None:
    figures = summary(
        [sample(0, 0.0, 90.0, 99.0), *(sample(k, 1.0 * k, 1.0 * k + 0.1) for k in (1, 2))], CLIENT, Limits(), 1
    )
    assert figures["requests"]["sent"] == 2
    assert figures["latency_s"]["ttft"]["max"] == pytest.approx(0.1)


def test_tiers_have_figures_of_their_own() -> None:
    figures = summary([TWO[0], sample(1, 2.0, 2.3, tier="batch")], CLIENT, Limits())
    assert {tier: spread["ttft"]["max"] for tier, spread in figures["tiers"].items()} == pytest.approx(
        {"default": 0.1, "batch": 0.3}
    )


@pytest.mark.parametrize(("client", "bottleneck"), [(CLIENT, False), (Client(cpu_s=9.0, wall_s=10.0), True)])
def test_the_client_says_whether_it_was_in_the_way(client: Client, bottleneck: bool) -> None:
    assert summary(TWO, client, Limits())["client"]["bottleneck"] is bottleneck


def test_the_client_says_how_late_it_was() -> None:
    assert summary(TWO, CLIENT, Limits())["client"]["loop_late_p99_s"] == pytest.approx(0.001)


def test_nothing_measured_is_no_error() -> None:
    figures = summary([], Client(), Limits())
    assert figures["completed_per_s"] is None
    assert figures["latency_s"]["ttft"] is None
    json.dumps(figures)


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


class TestPlot:
    def lines(self, picture: str) -> list[list[tuple[float, float]]]:
        root = ElementTree.fromstring(picture)
        found = root.iter("{http://www.w3.org/2000/svg}polyline")
        return [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in found]

    def test_has_a_line_for_each_latency_and_for_the_load(self) -> None:
        picture = plot(TWO, "a <title> & more")
        texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
        assert {"a <title> & more", "TTFT", "between tokens", "end to end", "queue wait"} <= set(texts)
        assert len(self.lines(picture)) == 6

    def test_distributions_rise_to_the_right_and_stay_in_the_panel(self) -> None:
        many = [sample(k, 0.1 * k, 0.1 * k + 0.001 * (1 + k % 37), 0.1 * k + 0.2) for k in range(900)]
        for line in self.lines(plot(many, "t"))[:3]:
            across, up = [x for x, _ in line], [y for _, y in line]
            assert across == sorted(across)
            assert up == sorted(up, reverse=True)
            assert len(line) <= 400
            assert min(across) >= 0
            assert min(up) >= 0

    def test_of_nothing_says_so(self) -> None:
        assert "nothing was measured" in plot([], "t")
        ElementTree.fromstring(plot([sample(0, 0.0, error="x")], "t"))

    def test_of_tokens_that_came_together_is_drawn(self) -> None:
        ElementTree.fromstring(plot([sample(0, 0.0, 1.0, 1.0, 1.0)], "t"))
