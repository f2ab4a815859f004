"""`penstock autoscaler` and `penstock scale`: real processes, one of which leads, and what operators are told."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from redis import Redis

from producers.contract import keys
from tests.receiver import Process
from tests.waiting import suspend
from tests.workers.autoscaler.conftest import Fleet
from tests.workers.cli.conftest import Run

OPTIONS = ("--model", "tiny", "--max", "4", "--lease", "3", "--interval", "0.05", "--health-port", "0")


@pytest.fixture
def fleet(valkey: Redis) -> Fleet:
    return Fleet(valkey)


@pytest.fixture
def two(fleet: Fleet, valkey_url: str) -> Iterator[dict[str, Process]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Process("workers.cli", "autoscaler", *OPTIONS, "--name", name, BROKER_URL=valkey_url)
            )
            for name in "ab"
        }


def test_one_leads_and_another_follows_one_that_is_paused_killed_or_ended(
    fleet: Fleet, two: dict[str, Process], operate: Run
) -> None:
    """A paused leader goes on with what it saw: it is refused, and stands by."""

    def led_by() -> str:
        return str(fleet.state().get("by", ""))

    first = two["a"].until(led_by)
    other = "b" if first == "a" else "a"
    fleet.fill(30)
    two[first].until(lambda: fleet.state()["wanted"] == 1)
    suspend(two[first].process.pid)
    two[other].until(lambda: led_by() == other)
    before = len(fleet.history())
    two[first].process.send_signal(signal.SIGCONT)
    two[first].until(lambda: re.search("another autoscaler leads|store was away", two[first].log.read_text()))
    assert all(one["by"] == other for one in fleet.history()[before:])
    told = re.search(r"/livez and /readyz on port (\d+)", two[first].log.read_text())
    assert told is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{told[1]}/readyz") as answer:
        assert json.load(answer) == {"status": "ready"}, "it stands by"
    two[other].stop(signal.SIGKILL)
    two[first].until(lambda: led_by() == first)
    assert fleet.state()["memory"]["changed_at"] is not None, "it goes on from what was kept"
    assert two[first].stop() == 0
    assert not fleet.valkey.exists(keys.SCALE_LEADER), "it resigned"
    assert "wanted" in operate("scale", "ls").out


def test_explain_tells_what_was_seen_the_formula_and_the_last_changes(
    fleet: Fleet, valkey_url: str, operate: Run
) -> None:
    fleet.valkey.hset(keys.PROFILES, "tiny@v1", json.dumps({"knee": 5, "cold_start": {"imports": 1.25, "total": 2.5}}))
    fleet.fill(7)
    fleet.lease("w", running=4, kv_blocks_used=1, kv_blocks_total=10)
    arguments = ("autoscaler", *OPTIONS, "--rule", "step=0.01")
    with Process("workers.cli", *arguments, BROKER_URL=valkey_url) as process:
        process.until(lambda: fleet.state().get("wanted") == 2)
    ran = operate("scale", "explain", "tiny")
    assert ran.status == 0
    for words in (
        "tiny: 2 workers wanted",
        "7 default queued",
        "0 in flight; 1 worker ready",
        "a = 2      room: latency-sensitive tasks queued and in flight, over 0.8 of the knee (5)",
        "tokens a task and tokens/s were never measured",
        "4 running, 10% of the KV cache",
        "limits     0 to 4",
        "cool-down  300 s, ",
        "cold start 2.50 s (imports 1.25)",
        "last changes, the newest first:",
        "out from 1 to 2: 7 queued and 0 in flight, 4 a worker",
    ):
        assert words in ran.out
    found = json.loads(operate("scale", "explain", "--json", "--history", "1").out)
    assert (found["pool"], found["wanted"], len(found["history"])) == ("tiny", 2, 1)
    ran = operate("scale", "explain", "nobody")
    assert (ran.status, ran.err) == (2, "penstock: nobody scales a pool nobody; there are tiny\n")


def test_a_models_name_means_the_pools_of_its_versions(operate: Run, valkey: Redis) -> None:
    for version in ("v1", "v2"):
        valkey.hset(keys.SCALE_POOLS, f"tiny@{version}", json.dumps({"model": "tiny", "wanted": 1}))
    out = operate("scale", "explain", "tiny").out
    assert "tiny@v1: " in out
    assert "tiny@v2: " in out
    assert operate("scale", "retry", "tiny").out.splitlines() == [
        f"tiny@{version}: no autoscaler leads; the next one tries at once" for version in ("v1", "v2")
    ]
    assert sorted(valkey.hkeys(keys.SCALE_RETRIES)) == [b"tiny@v1", b"tiny@v2"]


def test_a_number_is_pinned_for_a_time_and_unpinned(operate: Run, valkey: Redis) -> None:
    valkey.hset(keys.SCALE_POOLS, "tiny@v1", json.dumps({"model": "tiny", "wanted": 1, "rules": {"max": 2}}))
    assert (
        "tiny@v1: pinned at 2, for 2h; no autoscaler leads now"
        in operate("scale", "pin", "tiny", "2", "--for", "2h").out
    )
    pin = json.loads(valkey.hget(keys.SCALE_PINS, "tiny@v1") or b"{}")
    assert (pin["workers"], pin["until"] - pin["at"]) == (2, 7200)
    refused = operate("scale", "pin", "tiny", "3")
    assert refused.status == 2
    assert "3 workers: the pool has 0 to 2" in refused.err
    for time in ("0s", "0.5s", "367d", "9" * 400):
        refused = operate("scale", "pin", "tiny", "1", "--for", time)
        assert (refused.status, f"--for is {time}; it must be from 1s to 366d" in refused.err) == (2, True)
    assert json.loads(valkey.hget(keys.SCALE_PINS, "tiny@v1") or b"{}") == pin
    assert operate("scale", "pin", "none", "1").status == 2
    assert operate("scale", "unpin", "tiny").out == "tiny@v1: the policy decides again\n"
    assert operate("scale", "unpin", "tiny").out == "tiny@v1: it was not pinned\n"


def test_what_nobody_decides_any_more_is_said_and_what_cannot_be_read(operate: Run, valkey: Redis) -> None:
    assert "No pool is scaled: start `penstock autoscaler`" in operate("scale", "ls").out
    valkey.hset(keys.SCALE_POOLS, "tiny", "{")
    assert "cannot be read" in operate("scale", "explain").out
    assert "cannot be read" in operate("scale", "ls").out
    assert operate("scale", "retry", "tiny").status == 0
    valkey.hset(keys.SCALE_POOLS, mapping={"other@1": "{", "other@2": "{"})
    assert operate("scale", "explain", "other").out.splitlines() == [
        f"other@{version}: its kept state cannot be read; the autoscaler that leads writes a new one"
        for version in (1, 2)
    ]
    valkey.xadd(keys.SCALE_DECISIONS, {"of": "another release"})
    valkey.xadd(keys.SCALE_DECISIONS, {"pool": "gone", "decision": '{"at": 1, "wanted": 0, "reason": "0: all gone"}'})
    assert re.search(r"gone: nobody scales it any more\n.*\n.*0  0: all gone", operate("scale", "explain", "gone").out)
    assert float(valkey.hget(keys.SCALE_RETRIES, "tiny") or 0) > 1e9


def test_a_dry_run_prints_decisions(fleet: Fleet, valkey_url: str) -> None:
    fleet.fill(3)
    with Process("workers.cli", "autoscaler", *OPTIONS[:4], "--dry-run", BROKER_URL=valkey_url) as process:
        process.until(lambda: "out from 0 to 1: 3 queued" in process.log.read_text())
        assert process.stop() == 0
    assert not fleet.valkey.exists(keys.SCALE_LEADER, keys.SCALE_POOLS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "there is no pool: name a model with --model, or a file with --config"),
        (("--model", "tiny", "--min", "3"), "min is 3 and max is 1"),
        (("--model", "tiny", "--rule", "speed=1"), "there is no key speed; a pool has model"),
        (("--model", "tiny", "--rule", "blind=1"), "blind of tiny is 1 s; it must be above --interval, 1 s"),
        (("--model", "tiny", "--config", "x.toml"), "options of one pool do not go with --config"),
        (("--config", "/nowhere.toml"), "cannot read /nowhere.toml: No such file"),
        (("--model", "tiny", "--actuator", "kubernetes://x"), "kubernetes"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(run: Run, options: tuple[str, ...], said: str) -> None:
    ran = run("autoscaler", "--broker", "redis://127.0.0.1:1/0", *options)
    assert ran.status == 2
    assert said in ran.err
