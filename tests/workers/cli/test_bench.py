"""`penstock bench`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.producers.fake_worker import FakeWorker
from tests.workers.cli.conftest import Run
from tests.workers.trials.bench.test_sending import serving

SMALL = ("--requests", "6", "--prompt-tokens", "5", "--output-tokens", "3")


def test_says_rates_latencies_goodput_and_its_own_cost(
    penstock: Run, worker: FakeWorker, progress_texts: list[str]
) -> None:
    with serving(worker):
        ran = penstock("bench", "tiny", *SMALL, "--ttft-limit", "30", "--tiers", "default=1,priority=1")
    assert (ran.status, ran.err) == (0, "")
    assert progress_texts[0] == "0 of 6 requests"
    assert progress_texts[-1].endswith("] 100%  6 of 6 requests")
    said = " ".join(ran.out.split())
    assert "tiny: closed loop, at most 8 at a time; 5 tokens in, 3 out; 6 requests" in said
    for part in ("p50 p95 p99", "TTFT", "time between tokens", "end to end", "queue wait", "6 completed, 0 failed"):
        assert part in said
    assert "100.0 % of all: TTFT at most 30000 ms" in said
    assert "% of a core; its event loop was late by" in said


def test_writes_figures_requests_and_a_picture(
    penstock: Run, worker: FakeWorker, tmp_path: Path, progress_texts: list[str]
) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    rate = ("--rate", "200", "--concurrency", "4", "--warm-up-requests", "2", "--seed", "3")
    with serving(worker):
        ran = penstock("bench", "tiny", *SMALL, *rate, "--json", "--out", str(out), "--plot", str(plot))
    figures, written = json.loads(ran.out), json.loads(out.read_text())
    samples = written.pop("samples")
    assert written == figures
    assert progress_texts == [], "not with --json"
    assert figures["requests"]["completed"] == 6
    assert figures["settings"]["rate"] == 200
    assert [sample["number"] for sample in samples] == list(range(8))
    assert all(len(sample["tokens"]) == 3 for sample in samples)
    ElementTree.parse(plot)


def test_prompts_come_from_a_file(penstock: Run, worker: FakeWorker, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("def main():\nimport os\n")
    with serving(worker):
        ran = penstock("bench", "tiny", "--requests", "3", "--prompts", str(tmp_path / "prompts"), "--json")
    assert json.loads(ran.out)["settings"]["prompts"] == 2


def test_nothing_completed_is_status_1(penstock: Run) -> None:
    ran = penstock("bench", "tiny", *SMALL, "--prompt-tokens", "100000")
    assert ran.status == 1
    assert "no request was completed: {'400 context_length_exceeded': 6}" in ran.err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nobody",), "serves no model 'nobody'; it has: tiny"),
        (("tiny", "--tiers", "default=0"), "--tiers has 'default=0'; it takes"),
        (("tiny", "--tiers", "urgent"), "--tiers has 'urgent'"),
        (("tiny", "--prompts", "/nowhere"), "cannot use --prompts"),
        (("tiny", "--out", "/nowhere/x.json"), "cannot write /nowhere/x.json"),
        (("tiny", "--rate", "0"), "--rate"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(penstock: Run, args: tuple[str, ...], says: str) -> None:
    ran = penstock("bench", *args)
    assert ran.status == 2
    assert says in " ".join(ran.err.split())


def test_without_a_gateway_it_is_status_3(run: Run) -> None:
    assert run("bench", "tiny", "--url", "http://127.0.0.1:1").status == 3
