"""`penstock scale simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from redis import Redis

from producers.contract import keys
from tests.workers.autoscaler.conftest import Fleet
from tests.workers.cli.conftest import Run

SMALL = ("scale", "simulate", "--synthetic", "flat", "--tasks", "300", "--duration", "1200", "--min", "1", "--max", "6")


def test_a_table_compares_scalers(run: Run, progress_texts: list[str]) -> None:
    ran = run(*SMALL, "--cool-down", "30")
    assert (ran.status, ran.err) == (0, "")
    assert {text.rpartition("%  ")[2] for text in progress_texts} >= {"policy", "clairvoyant"}
    assert "flat with seed 0: 300 tasks; a worker: knee 16, 320 tokens/s, cold start 60 s; 1 to 6 workers" in ran.out
    for name in ("policy", "keda listLength", "hpa cpu", "clairvoyant", "of clairvoyant", "worker-hours"):
        assert name in ran.out


def test_writes_figures_samples_a_picture_and_the_trace(run: Run, tmp_path: Path) -> None:
    out, plot, trace = tmp_path / "o.json", tmp_path / "p.svg", tmp_path / "t.csv"
    files = ("--out", str(out), "--plot", str(plot), "--write-trace", str(trace))
    ran = run(*SMALL, *files, "--json", "--price", "3", "--rule", "target_wait.default=5", "--rule", "headroom=0.9")
    said, written = json.loads(ran.out), json.loads(out.read_text())
    samples = written.pop("samples")
    assert written == said
    assert said["settings"]["rules"]["target_wait"]["default"] == 5
    assert said["settings"]["rules"]["headroom"] == 0.9
    policy = said["scalers"]["policy"]
    assert policy["cost"] == pytest.approx(3 * policy["worker_hours"], abs=0.01)
    assert samples["policy"][-1]["worker_s"] == pytest.approx(3600 * policy["worker_hours"], abs=2)
    texts = [element.text or "" for element in ElementTree.parse(plot).iter() if element.tag.endswith("text")]
    assert texts.count("hours") == 4
    assert not [text for text in texts if re.fullmatch(r"[\d.]{6,}", text)], "round numbers at the axes"
    again = json.loads(run("scale", "simulate", "--trace", str(trace), *SMALL[-4:], "--no-compare", "--json").out)
    assert (again["tasks"], list(again["scalers"])) == (300, ["policy"])


def test_a_missed_objective_is_status_1(run: Run) -> None:
    ran = run(*SMALL, "--objective", "0", "--no-compare")
    assert ran.status == 1
    assert "the objective was missed: 0.00% of the priority tasks had their first token within 0 s" in ran.err


def test_the_worker_comes_from_a_kept_profile(run: Run, valkey: Redis, valkey_url: str) -> None:
    kept = {"knee": 5.4, "tokens_per_s": 7000, "cold_start": {"total": 2.5}}
    valkey.hset(keys.PROFILES, "tiny@v1", json.dumps(kept))
    asked = ("--no-compare", "--json", "--broker", valkey_url, "--profile")
    said = json.loads(run(*SMALL, *asked, "tiny@v1").out)["settings"]["model"]
    assert (said["knee"], said["slots"], said["tokens_per_s"], said["cold_start"]) == (5, 10, 7000, 2.5)
    assert said["prompt_cost"] == 1.0  # the profile counts prompts' tokens like others
    assert json.loads(run(*SMALL, "--knee", "9", *asked, "tiny@v1").out)["settings"]["model"]["knee"] == 9
    ran = run(*SMALL, *asked, "tiny@v2")
    assert (ran.status, "no profile of 'tiny@v2' is kept" in ran.err) == (2, True)


async def test_what_the_autoscaler_kept_is_computed_again(
    run: Run, valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    from producers import AsyncClient
    from workers.autoscaler.autoscaler import Autoscaler, AutoscalerSettings
    from workers.autoscaler.policy import Rules
    from workers.autoscaler.pools import PoolSettings, Scaled, fixed

    fleet = Fleet(valkey)
    async with AsyncClient(valkey_url) as client:
        pools = fixed([Scaled(PoolSettings("tiny", rules=Rules(max=4, step=0.05)), None)])
        running = asyncio.create_task(Autoscaler(client, pools, AutoscalerSettings(every=0.02)).run())
        fleet.fill(40)
        while fleet.state().get("wanted") != 4:  # noqa: ASYNC110  it is in the store
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    path = tmp_path / "decisions"
    told = await asyncio.to_thread(run, "scale", "explain", "tiny", "--history", "50", "--json", "--broker", valkey_url)
    path.write_text(told.out)
    ran = await asyncio.to_thread(run, "scale", "simulate", "--decisions", str(path))
    assert (ran.status, ran.out.endswith(" decisions computed again, 0 differ\n")) == (0, True), ran
    assert int(ran.out.split()[0]) >= 3
    wrong = json.loads(told.out)
    wrong["history"][0]["wanted"] = 3
    path.write_text(json.dumps(wrong))
    ran = await asyncio.to_thread(run, "scale", "simulate", "--decisions", str(path))
    assert ran.status == 1
    assert "kept 3, computed 4" in ran.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give one of --trace FILE, --synthetic SHAPE and --decisions FILE"),
        (("--synthetic", "flat", "--trace", "x"), "give one of"),
        (("--synthetic", "square"), "no shape 'square'"),
        (("--synthetic", "diurnal", "--peak", "3"), "the peak is 3; it must be 1 to 2"),
        (("--synthetic", "flat", "--mix", "urgent=1"), "--mix has 'urgent=1'"),
        (("--synthetic", "flat", "--min", "5", "--max", "4"), "min is 5 and max is 4"),
        (("--synthetic", "flat", "--rule", "haste=1"), "haste"),
        (("--synthetic", "flat", "--knee", "8", "--slots", "4"), "the knee is 8 and the slots are 4"),
        (("--synthetic", "flat", "--tokens-per-s", "-1"), "tokens_per_s is -1"),
        (("--synthetic", "flat", "--plot", "/nowhere/x.svg"), "cannot write /nowhere/x.svg"),
        (("--trace", "/nowhere"), "cannot read /nowhere"),
        (("--decisions", "/nowhere"), "cannot read /nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused(run: Run, args: tuple[str, ...], says: str) -> None:
    ran = run("scale", "simulate", *args)
    assert ran.status == 2
    assert says in " ".join(ran.err.split())
