"""`penstock rollout`: another version takes a model's new tasks, while requests go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from engine.text import ModelCard
from producers import AsyncClient, Client
from producers.client import directory
from producers.contract import keys
from producers.store.fleet import cards, rollouts
from producers.store.fleet.rollouts import Rollout
from tests.processes import Worker
from tests.stub_engine import token
from tests.waiting import PATIENCE_S
from tests.warm import Forked
from tests.workers.rig import Rig
from workers import rollout
from workers.errors import Refused
from workers.library import find_model
from workers.library.reference import BUNDLED, described
from workers.processes import PENSTOCK
from workers.rollout import Carrier, New, begin, cancel

OLD, NEW = (ModelCard.from_folder(BUNDLED / name).version for name in ("tiny", "tiny-v2"))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients here know within an instant where new tasks go, so less time passes until the old version is done."""
    monkeypatch.setattr(directory, "FRESH_S", 0.05)
    monkeypatch.setattr(rollout, "SETTLED_S", 1.0)
    monkeypatch.setattr(rollout, "LOOK_S", 0.05)


def up(rig: Rig, version: str, **more: Any) -> Worker:
    return rig.worker(model="tiny", STUB_VERSION=version, STUB_STEP_S=0.01, **more)


def new(reference: str = "tiny=tiny-v2") -> New:
    found = find_model(reference)
    return New(found, *described(found))


async def carried(
    rig: Rig,
    rollout: Rollout,
    *,
    timeout: float = 60.0,  # noqa: ASYNC109
    drain_old: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Rollout:
    async with AsyncClient(rig.url) as client:
        with Redis.from_url(rig.url) as store:
            return await Carrier(client, store, new(), say, timeout, drain_old).run(rollout)


class Requests:
    """Requests, several at a time, for as long as it stands; each reads its stream to the end."""

    def __init__(self, rig: Rig, at_once: int = 4) -> None:
        self.ended: list[tuple[str, list[int]]] = []
        self.failed: list[str] = []
        self._rig, self._over = rig, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(k,)) for k in range(at_once)]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, seed: int) -> None:
        with Client(self._rig.url) as client:
            while not self._over.is_set():
                try:
                    handle = client.submit(model="tiny", prompt=[1, 2, 3], max_tokens=20, seed=seed)
                    events = list(handle.stream())
                    self.ended.append((handle.id, [event.token_id for event in events if hasattr(event, "token_id")]))
                    if self.ended[-1][1] != [token(seed, 0, i) for i in range(20)]:
                        self.failed.append(f"{handle.id} was cut or repeated: {self.ended[-1][1]}")
                except Exception as error:
                    self.failed.append(repr(error))

    def versions(self) -> dict[str, int]:
        """Version -> number of tasks; each was made by one worker alone."""
        found: dict[str, int] = {}
        for task_id, _ in self.ended:
            record = self._rig.record(task_id)
            assert (record["status"], record["claims"]) == ("completed", "1")
            found[record["version"]] = found.get(record["version"], 0) + 1
        return found


async def test_no_request_fails_and_each_is_made_by_one_version(rig: Rig) -> None:
    """The new worker comes up before the switch, and takes nothing; the old one drains once it has nothing left."""
    cards.publish(rig.store, *described(find_model("tiny")))
    old = up(rig, OLD)
    with Requests(rig) as requests:
        rig.until(lambda: len(requests.ended) > 5)
        begun = begin(rig.store, new(), None, 1)
        assert (begun.phase, begun.before, begun.workers) == ("starting", OLD, 1)
        up(rig, NEW)
        before = len(requests.ended)
        rig.until(lambda: len(requests.ended) > before + 5)
        assert requests.versions().keys() == {OLD}
        assert (await carried(rig, begun)).phase == "done"
        before = len(requests.ended)
        rig.until(lambda: len(requests.ended) > before + 5)
    assert requests.failed == []
    made = requests.versions()
    assert made.keys() == {OLD, NEW}
    assert old.process.wait(PATIENCE_S) == 0
    assert len(requests.ended) == sum(made.values())


async def test_old_workers_that_an_autoscaler_keeps_warm_are_not_waited_for(rig: Rig) -> None:
    cards.publish(rig.store, *described(find_model("tiny")))
    old = up(rig, OLD)
    up(rig, NEW)
    begun = begin(rig.store, new(), 1, 1)
    rig.store.set(keys.SCALE_LEADER, "one")
    rig.store.hset(keys.SCALE_POOLS, f"tiny@{OLD}", json.dumps({"at": rig.store.time()[0]}))
    lines: list[str] = []
    assert (await carried(rig, begun, drain_old=False, say=lines.append)).phase == "done"
    assert lines[-1] == f"workers of version {OLD} that its autoscaler ends later: 1"
    assert not any("no autoscaler" in line for line in lines[1:])
    assert old.process.poll() is None, "it may be gone back to"


async def test_one_that_is_cancelled_in_the_moment_of_the_switch_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be called cancelled, and new tasks would go to the new version all the same."""
    cards.publish(rig.store, *described(find_model("tiny")))
    begun = begin(rig.store, new(), 1, 0)
    asked = replace(begun, workers=0)  # they are ready at once
    assert rollouts.change(rig.store, begun, asked)
    publishes = cards.publish

    def late(store: Redis, *args: Any) -> Any:
        assert cancel(rig.store, "tiny").phase == "cancelled"
        return publishes(store, *args)

    monkeypatch.setattr(cards, "publish", late)
    assert (await carried(rig, asked)).phase == "done"
    assert (cards.read(rig.store, "tiny") or {})["version"] == NEW


async def test_new_workers_that_never_come_change_nothing(rig: Rig) -> None:
    cards.publish(rig.store, *described(find_model("tiny")))
    pool = {"at": rig.store.time()[0], "trouble": "3 tries in a row failed: out of memory"}
    rig.store.hset(keys.SCALE_POOLS, f"tiny@{NEW}", json.dumps(pool))
    ended = await carried(rig, begin(rig.store, new(), 2, 0), timeout=0.2)
    assert ended.phase == "failed"
    assert f"nothing was switched; after 0.2 s, ready workers of version {NEW}: 0 of 2" in ended.reason
    assert "3 tries in a row failed: out of memory" in ended.reason
    assert standing(rig.store)["version"] == OLD


async def test_starts_that_are_given_up_end_it_at_once(rig: Rig) -> None:
    """Those of this rollout, and of the new version alone. Seconds that are left until another try are told once."""
    cards.publish(rig.store, *described(find_model("tiny")))
    lines: list[str] = []
    said = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        said.set()

    def trouble(pool: str, words: str, given_up: float | None, failures: int) -> None:
        state = {"at": rig.store.time()[0], "trouble": words, "given_up": given_up, "starts": {"failures": failures}}
        rig.store.hset(keys.SCALE_POOLS, pool, json.dumps(state))

    async with AsyncClient(rig.url) as client:
        begun = begin(rig.store, new(), 1, 0)
        trouble("tiny", "given up", begun.asked + 1, 5)
        trouble(f"tiny@{NEW}", "the next try is in 5 s", begun.asked - 1, 1)
        carrying = asyncio.create_task(Carrier(client, rig.store, new(), say, 600.0).run(begun))
        await asyncio.wait_for(said.wait(), PATIENCE_S)
        trouble(f"tiny@{NEW}", "the next try is in 4 s", None, 1)
        await asyncio.sleep(0.3)
        trouble(f"tiny@{NEW}", "given up: no such file", begun.asked + 1, 5)
        ended = await asyncio.wait_for(carrying, PATIENCE_S)
    assert (ended.phase, "no such file" in ended.reason, len(lines)) == ("failed", True, 1)
    assert standing(rig.store)["version"] == OLD


async def test_another_card_that_was_published_meanwhile_ends_it(rig: Rig) -> None:
    cards.publish(rig.store, *described(find_model("tiny")))
    begun = begin(rig.store, new(), 1, 0)
    cards.publish(rig.store, new().card | {"version": "0123456789ab"}, {})
    ended = await carried(rig, begun)
    assert (ended.phase, "that of version 0123456789ab" in ended.reason) == ("failed", True)


async def test_a_run_goes_on_where_another_one_died(rig: Rig) -> None:
    """Killed while it waits; and after it had published the card, before it wrote so."""
    cards.publish(rig.store, *described(find_model("tiny")))
    process = command(rig, "tiny=tiny-v2", "--workers", "1")
    rig.until(lambda: rig.store.hexists(keys.ROLLOUTS, "tiny"))
    process.kill()
    process.wait(PATIENCE_S)
    begun = begin(rig.store, new(), None, 5)
    assert (begun.phase, begun.workers) == ("starting", 1), "the same rollout"
    cards.publish(rig.store, new().card, new().files, over=OLD)
    up(rig, NEW)
    assert (await carried(rig, begun)).phase == "done"


def test_the_command_tells_what_it_waits_for_and_may_be_interrupted_and_cancelled(rig: Rig, tmp_path: Path) -> None:
    cards.publish(rig.store, *described(find_model("tiny")))
    log = tmp_path / "log"
    log.touch()
    process = command(rig, "tiny=tiny-v2", log=log)
    rig.until(lambda: f"ready workers of version {NEW}: 0 of 1" in log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    status = command(rig, "--status", "tiny", "--json", log=tmp_path / "status")
    assert (status.wait(PATIENCE_S), json.loads((tmp_path / "status").read_text())["phase"]) == (0, "starting")
    assert command(rig, "tiny", "--cancel", log=log).wait(PATIENCE_S) == 0
    assert command(rig, "tiny", "--cancel", log=log).wait(PATIENCE_S) == 2
    assert "no rollout of tiny is under way: it is cancelled" in log.read_text()
    assert standing(rig.store)["version"] == OLD


def test_the_command_tells_that_nobody_serves_what_is_left_and_how_to_start_a_worker(rig: Rig, tmp_path: Path) -> None:
    """Of a version whose workers are gone, and which no autoscaler starts."""
    cards.announce(rig.store, described(find_model("tiny"))[0], keys.Pool("tiny", OLD, "f"), {})
    with Client(rig.url) as client:
        client.submit(model="tiny", prompt=[1, 2, 3], max_tokens=2)
    begun = begin(rig.store, new(), None, 1)
    cards.publish(rig.store, new().card, new().files)
    assert rollouts.change(rig.store, begun, begun.to("draining", 1.0))
    log = tmp_path / "log"
    log.touch()
    process = command(rig, "tiny=tiny-v2", log=log)
    hint = "(no worker takes more of them: start one with `penstock worker --model tiny=FOLDER`, the folder of"
    rig.until(lambda: f"tasks left of version {OLD}: 1 {hint}" in log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130


def test_plain_celery_tasks_go_to_the_version_of_the_card(rig: Rig) -> None:
    """Whoever sends them names the model alone: workers of another version leave them to those that come."""
    cards.publish(rig.store, *described(find_model("tiny")))
    up(rig, NEW)
    with rig.sender() as app:
        kwargs = {"prompt": [1], "max_tokens": 2}
        sent = [app.send_task(keys.TASK_NAME, queue=keys.model_queue("tiny"), kwargs=kwargs) for _ in range(3)]
        waits = keys.model_queue("tiny")
        rig.until(lambda: rig.waiting(waits) == 3)
        old = up(rig, OLD)
        assert [one.get(timeout=PATIENCE_S)["status"] for one in sent] == ["completed"] * 3
        assert {rig.record(one.id)["version"] for one in sent} == {OLD}
        cards.publish(rig.store, new().card, new().files)
        rig.until(lambda: rig.record(again(app, kwargs))["version"] == NEW)
        assert old.process.poll() is None


def again(app: Any, kwargs: dict[str, Any]) -> str:
    sent = app.send_task(keys.TASK_NAME, queue=keys.model_queue("tiny"), kwargs=kwargs)
    sent.get(timeout=PATIENCE_S)
    return str(sent.id)


class TestWhatIsRefused:
    def test_a_model_that_is_not_there_or_has_this_version(self, valkey: Redis) -> None:
        with pytest.raises(Refused, match="there is no model tiny to update: `penstock models publish"):
            begin(valkey, new(), None, 1)
        cards.publish(valkey, *described(find_model("tiny=tiny-v2")))
        with pytest.raises(Refused, match=f"new tasks of tiny go to version {NEW} already"):
            begin(valkey, new(), None, 1)

    def test_a_version_that_can_do_less(self, valkey: Redis) -> None:
        cards.publish(valkey, *described(find_model("tiny")))
        mute = new()
        mute.card["capabilities"] = ["generate"]
        with pytest.raises(Refused, match="lacks chat, which version"):
            begin(valkey, mute, None, 1)

    def test_a_second_rollout_until_the_first_has_switched(self, valkey: Redis) -> None:
        cards.publish(valkey, *described(find_model("tiny")))
        begun = begin(valkey, new(), None, 1)
        other = New(find_model("tiny=tiny-draft"), {**new().card, "version": "0123456789ab"}, {})
        with pytest.raises(Refused, match=f"a rollout of tiny to version {NEW} .* is under way"):
            begin(valkey, other, None, 1)
        cards.publish(valkey, new().card, new().files)
        with pytest.raises(Refused, match=f"new tasks of tiny go to version {NEW} already: roll back with"):
            cancel(valkey, "tiny")
        assert rollouts.change(valkey, begun, begun.to("draining", 1.0))
        assert begin(valkey, other, None, 1).before == NEW


def test_a_card_that_workers_wrote_is_published_before_the_first_new_worker_could_replace_it(valkey: Redis) -> None:
    cards.announce(valkey, described(find_model("tiny"))[0], keys.Pool("tiny", OLD, "f"), {})
    begin(valkey, new(), None, 1)
    cards.announce(valkey, new().card, keys.Pool("tiny", NEW, "f"), new().files)
    assert standing(valkey)["version"] == OLD


def command(rig: Rig, *arguments: str, log: Path = Path(os.devnull)) -> Forked:
    argv = [*PENSTOCK, "rollout", *arguments]
    return Forked(argv, {**os.environ, "BROKER_URL": rig.url}, log)


def standing(store: Redis) -> dict[str, Any]:
    card = cards.read(store, "tiny")
    assert card is not None
    return card
