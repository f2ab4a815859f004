"""`penstock rollout start` and its neighbours; `penstock rollout NAME=MODEL` stays what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from redis import Redis

from producers.contract import keys
from tests.workers.cli.conftest import Run


@pytest.fixture
def candidate(operate: Run) -> str:
    """`tiny` is published; the version of another one, its alias `candidate`."""
    operate("models", "publish", "tiny")
    version: str = json.loads(operate("models", "publish", "tiny-v2", "--as", "tiny@candidate", "--json").out)[
        "version"
    ]
    return version


def test_a_rollout_is_started_shown_paused_promoted_reported_and_aborted(
    operate: Run, candidate: str, tmp_path: Path
) -> None:
    started = operate("rollout", "start", "tiny", "--to", "candidate", "--steps", "5,50,100", "--hold", "2m")
    assert started.status == 0
    assert "no sweeper leads" in started.err
    assert f"-> {candidate}: preparing at 0%" in started.out
    assert "waits for 1 ready workers" in started.out
    state = json.loads(operate("rollout", "status", "tiny", "--json").out)
    assert (state["version"], state["plan"]["steps"], state["plan"]["hold_s"]) == (candidate, [5.0, 50.0], 120.0)
    assert set(state["metrics"]) >= {"failed", "first_token", "end_to_end_p95"}
    assert "judging at 5%" in operate("rollout", "promote", "tiny").out
    assert "5%" in operate("models", "split", "tiny").out
    assert "paused at 5%" in operate("rollout", "pause", "tiny").out
    assert "judging at 5%" in operate("rollout", "resume", "tiny").out
    assert "abort tiny" in operate("rollout", "tiny=tiny-v2").err, "the short form does not go on with it"
    assert "under way" in operate("models", "rm", "tiny").err
    assert "aborted at 0%" in operate("rollout", "abort", "tiny").out
    page = tmp_path / "report.html"
    operate("rollout", "report", "tiny", "--out", str(page))
    assert page.read_text("utf-8").startswith("<!doctype html>")
    decisions = json.loads(operate("rollout", "report", "tiny").out)["decisions"]
    assert [row["what"] for row in decisions] == ["start", "raise", "pause", "resume", "abort"]


def test_status_says_why_workers_do_not_come_up(operate: Run, candidate: str, valkey: Redis) -> None:
    assert "No model has a rollout." in operate("rollout", "status").err
    assert "No model has a rollout." in operate("rollout", "--status").err
    operate("rollout", "start", "tiny", "--to", "candidate")
    state = {"at": valkey.time()[0] + 1, "trouble": "2 tries in a row failed: cannot get object config.json"}
    valkey.hset(keys.SCALE_POOLS, f"tiny@{candidate}", json.dumps(state))
    assert f"ready workers of {candidate}; 2 tries in a row" in operate("rollout", "status", "tiny").out
    assert "cannot get object" in json.loads(operate("rollout", "report", "tiny").out)["waits"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--to", "nothing"), "'nothing' is no alias or version of tiny"),
        (("--to", "candidate", "--steps", "1,x"), "are no steps"),
        (("--to", "candidate", "--steps", "20,10"), "rising percentages"),
        (("--to", "candidate", "--hold", "soon"), "'soon' is no time"),
        (("--to", "candidate", "--metric", "speed=1"), "there is no metric 'speed'"),
        (("--to", "candidate", "--metric", "failed"), "NAME=MARGIN"),
        (("--to", "candidate", "--alpha", "0"), "alpha is 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    operate: Run, candidate: str, options: tuple[str, ...], reason: str
) -> None:
    refused = operate("rollout", "start", "tiny", *options)
    assert refused.status
    assert reason in " ".join(refused.err.split())
    assert "has no rollout" in operate("rollout", "status", "tiny").err


@pytest.mark.parametrize(
    ("content", "reason"),
    [(" \n\n", "has no phrase"), ("é\n" * (1 << 15), "more than 65,536 bytes"), ("\xff", "cannot be read as UTF-8")],
)
def test_a_file_of_refusals_that_is_none_is_refused(operate: Run, tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "refusals.txt"
    file.write_bytes(content.encode("latin-1" if content == "\xff" else "utf-8"))
    refused = operate("rollout", "start", "tiny", "--to", "candidate", "--refusals", str(file))
    assert refused.status == 2
    assert reason in " ".join(refused.err.split())


def test_the_short_form_needs_no_word_before_it(operate: Run) -> None:
    assert "there is no model tiny to update" in " ".join(operate("rollout", "tiny=tiny-v2").err.split())
    assert operate("rollout", "--status").status == 0
